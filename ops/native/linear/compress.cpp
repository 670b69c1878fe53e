// The ops that write compressed linear weights and read their rows (compressed.h).
#include "linear/compressed.h"
#include "linear/give_rows.h"
#include "linear/pack_columns.h"

#include <vector>

namespace ostinato::linear {
namespace {

constexpr int kSampledSteps = 8;  // one of this many steps is counted to choose the exponents
constexpr uint32_t kExceptionLimit = 64;  // a chunk's exceptions, on average, up to which compression saves memory

int exponent_of(uint16_t value) { return value >> 7 & 0xff; }

// The lowest of the 15 successive exponents that most values have. Values are not zero or subnormal.
int choose_lowest(const uint16_t* values, int64_t steps) {
  uint32_t counts[256] = {};
  for (int64_t step = 0; step < steps; step += kSampledSteps) {
    for (int i = 0; i < 64; ++i) ++counts[exponent_of(values[step * 64 + i])];
  }
  uint32_t sum = 0;
  for (int exponent = 1; exponent < kCodes; ++exponent) sum += counts[exponent];
  uint32_t most = sum;
  int lowest = 1;
  for (int first = 2; first + kCodes - 2 < 256; ++first) {
    sum += counts[first + kCodes - 2] - counts[first - 1];
    if (sum >= most && sum > 0) {
      most = sum;
      lowest = first;
    }
  }
  return lowest;
}

// Writes the bytes and the codes of one step, which has 64 values. Returns whether an exponent has no code.
#if OSTINATO_ISA >= 2
bool compress_step(const uint16_t* values, int lowest, uint8_t* codes, uint8_t* bytes) {
  bool is_wrong = false;
  __m512i code[2], byte[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i value = _mm512_loadu_si512(values + 32 * i);
    const __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(value, 7), _mm512_set1_epi16(0xff));
    const __m512i above = _mm512_sub_epi16(exponent, _mm512_set1_epi16(static_cast<int16_t>(lowest)));
    const __mmask32 is_coded = _mm512_cmplt_epu16_mask(above, _mm512_set1_epi16(kCodes - 1));
    is_wrong |= (is_coded | _mm512_testn_epi16_mask(exponent, exponent)) != 0xffffffffu;
    code[i] = _mm512_maskz_add_epi16(is_coded, above, _mm512_set1_epi16(1));
    byte[i] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(value, 8), _mm512_set1_epi16(0x80)),
                              _mm512_and_si512(value, _mm512_set1_epi16(0x7f)));
  }
  _mm512_storeu_si512(codes, _mm512_packus_epi16(code[0], code[1]));
  _mm512_storeu_si512(bytes, _mm512_packus_epi16(byte[0], byte[1]));
  return is_wrong;
}
#elif OSTINATO_ISA == 1
bool compress_step(const uint16_t* values, int lowest, uint8_t* codes, uint8_t* bytes) {
  __m256i all_coded = _mm256_set1_epi16(-1);
  for (int half = 0; half < 2; ++half) {
    __m256i code[2], byte[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 32 * i + 16 * half));
      const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(value, 7), _mm256_set1_epi16(0xff));
      const __m256i above = _mm256_sub_epi16(exponent, _mm256_set1_epi16(static_cast<int16_t>(lowest)));
      const __m256i most = _mm256_set1_epi16(kCodes - 2);
      const __m256i is_coded = _mm256_cmpeq_epi16(_mm256_min_epu16(above, most), above);
      const __m256i is_zero = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
      all_coded = _mm256_and_si256(all_coded, _mm256_or_si256(is_coded, is_zero));
      code[i] = _mm256_and_si256(_mm256_add_epi16(above, _mm256_set1_epi16(1)), is_coded);
      byte[i] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(value, 8), _mm256_set1_epi16(0x80)),
                                _mm256_and_si256(value, _mm256_set1_epi16(0x7f)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * half), _mm256_packus_epi16(code[0], code[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 32 * half), _mm256_packus_epi16(byte[0], byte[1]));
  }
  return _mm256_movemask_epi8(all_coded) != -1;
}
#else
bool compress_step(const uint16_t* values, int lowest, uint8_t* codes, uint8_t* bytes) {
  bool is_wrong = false;
  for (int i = 0; i < 64; ++i) {
    const int exponent = exponent_of(values[i]), above = exponent - lowest, place = place_in_line(i);
    const bool is_coded = above >= 0 && above < kCodes - 1;
    is_wrong |= !is_coded && exponent != 0;
    codes[place] = static_cast<uint8_t>(is_coded ? above + 1 : 0);
    bytes[place] = static_cast<uint8_t>((values[i] >> 8 & 0x80) | (values[i] & 0x7f));
  }
  return is_wrong;
}
#endif

// Compresses the units of a panel, and appends its exceptions, or all units if it has many. Steps are a multiple of a
// chunk's. The header's offset is that in `aside`.
void compress_panel(const uint32_t* units, int64_t steps, uint8_t* panel, std::vector<uint8_t>& aside) {
  const auto* values = reinterpret_cast<const uint16_t*>(units);
  const int lowest = choose_lowest(values, steps);
  PanelHeader header{};
  for (int code = 1; code < kCodes; ++code) header.exponents[code] = static_cast<uint8_t>(lowest + code - 1);
  header.offset = aside.size();
  uint8_t* pair = panel + sizeof header;
  const auto limit = static_cast<uint64_t>(kExceptionLimit) * steps / kChunkSteps;
  for (int64_t step = 0; step < steps; step += 2, pair += kStepPairBytes) {
    uint8_t codes[2][64];
    for (int i = 0; i < 2; ++i) {
      const uint16_t* of_step = values + (step + i) * 64;
      if (!compress_step(of_step, lowest, codes[i], pair + 64 * (i + 1)) || header.count > limit) continue;
      for (int v = 0; v < 64; ++v) {
        const int exponent = exponent_of(of_step[v]);
        if (exponent == 0 || (exponent >= lowest && exponent < lowest + kCodes - 1)) continue;
        const Exception exception{static_cast<uint32_t>((step + i) * 64 + v), of_step[v], 0};
        const auto* data = reinterpret_cast<const uint8_t*>(&exception);
        aside.insert(aside.end(), data, data + sizeof exception);
        ++header.count;
      }
    }
    for (int i = 0; i < 64; ++i) pair[i] = static_cast<uint8_t>(codes[0][i] | codes[1][i] << 4);
  }
  if (header.count > limit) {
    header.count = PanelHeader::kWhole;
    aside.resize(header.offset);
    const auto* data = reinterpret_cast<const uint8_t*>(units);
    aside.insert(aside.end(), data, data + steps * kPanel * 4);
    std::memset(panel + sizeof header, 0, steps / 2 * kStepPairBytes);
  }
  aside.resize(round_up(static_cast<int64_t>(aside.size()), 64));
  std::memcpy(panel, &header, sizeof header);
}

// compress_linear(Tensor(a!) compressed, Tensor weight, SymInt first_row) -> Tensor
void compress_linear(Call& call) {
  const Tensor compressed = call.tensor();
  const Tensor weight = call.tensor();
  const int64_t first_row = call.integer();
  OSTINATO_CHECK(weight.dtype == DType::bfloat16 && weight.dim == 2 && is_contiguous(weight, 1),
                 "a weight to compress must be a bfloat16 matrix with contiguous rows");
  const int64_t in_features = weight.sizes[1];
  OSTINATO_CHECK(compressed.dim == 2 && first_row >= 0 && first_row % kPanel == 0 &&
                     first_row + weight.sizes[0] <= compressed.sizes[0] * kPanel,
                 "rows ", first_row, " to ", first_row + weight.sizes[0], " must begin a panel of 32 rows, and fit into ",
                 compressed.dim > 0 ? compressed.sizes[0] : 0, " panels");
  const int64_t steps = ceil_divide(in_features, 2);
  const CompressedWeight layout(compressed.as<uint8_t>(), nullptr, compressed.sizes[0], steps);
  const int64_t whole_steps = layout.chunks() * kChunkSteps, panel_bytes = layout.panel_bytes();
  OSTINATO_CHECK(compressed.dtype == DType::uint8 && compressed.sizes[1] == panel_bytes && is_contiguous(compressed),
                 "compressed must be a contiguous uint8 matrix with ", panel_bytes, " bytes in a row");
  const int64_t panels = ceil_divide(weight.sizes[0], kPanel);
  const auto panel_at = [&](int64_t panel) { return compressed.as<uint8_t>() + (first_row / kPanel + panel) * panel_bytes; };
  const Division division = divide_conversion(call.threads(), NumParts{panels}, panels * whole_steps * kPanel * 4);
  std::vector<std::vector<uint8_t>> aside(division.num_workers);
  call.threads().run(division.num_workers, [&](int worker) {
    const int64_t units = whole_steps * kPanel;
    AlignedMemory memory;
    memory.allocate(64, std::max<int64_t>(units, kPanel) * 4);
    uint32_t* const packed = static_cast<uint32_t*>(memory.data());
    for (int64_t panel = division.begin(worker); panel < division.end(worker); ++panel) {
      const int64_t row = panel * kPanel;
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, weight.sizes[0] - row));
      if (columns < kPanel) std::memset(packed, 0, units * 4);
      std::memset(packed + in_features / 2 * kPanel, 0, (units - in_features / 2 * kPanel) * 4);
      pack_columns(weight.as<char>() + row * weight.strides[0] * 2, weight.strides[0] * 2, columns, in_features * 2, steps,
                   packed);
      compress_panel(packed, whole_steps, panel_at(panel), aside[worker]);
    }
  });
  uint64_t total = 0;
  for (int worker = 0; worker < division.num_workers; total += aside[worker++].size()) {
    for (int64_t panel = division.begin(worker); panel < division.end(worker); ++panel) {
      reinterpret_cast<PanelHeader*>(panel_at(panel))->offset += total;
    }
  }
  const int64_t sizes[] = {std::max<int64_t>(static_cast<int64_t>(total), 64)};
  const Tensor exceptions = call.empty(sizes, 1, DType::uint8);
  std::memset(exceptions.data, 0, 64);
  char* target = exceptions.as<char>();
  for (const std::vector<uint8_t>& part : aside) {
    if (!part.empty()) std::memcpy(target, part.data(), part.size());
    target += part.size();
  }
  call.give(exceptions);
}

// compressed_rows(Tensor weight, Tensor exceptions, Tensor ids, SymInt out_features, SymInt in_features) -> Tensor
void compressed_rows(Call& call) {
  const Tensor weight = call.tensor();
  const Tensor exceptions = call.tensor();
  const Tensor ids = call.tensor();
  const int64_t out_features = call.integer();
  const int64_t in_features = call.integer();
  const CompressedWeight compressed(weight, exceptions, out_features, in_features);
  const int64_t traffic = compressed.steps * 96;
  give_rows(call, ids, out_features, in_features, DType::bfloat16, traffic, [&](int64_t id, char* target) {
    PanelReader panel(compressed, id / kPanel);
    panel.read_column(static_cast<int>(id % kPanel), in_features, reinterpret_cast<BFloat16*>(target));
  });
}

}  // namespace

OSTINATO_KERNEL(compress_linear, compress_linear);
OSTINATO_KERNEL(compressed_rows, compressed_rows);

}  // namespace ostinato::linear
