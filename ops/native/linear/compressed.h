// The layout of a compressed linear weight: bfloat16 in 12 bits, without loss.
//
// The exponents of a matrix's weights have few different values, so four bits name an exponent ("70% Size, 100%
// Accuracy", Zhang et al., 2025, arXiv:2504.11651, codes exponents by their frequency; codes of one length need no
// search). A panel is that of layout.h. It begins with a header, and has one chunk for each 16 steps of two values of K;
// missing steps are zero. A chunk has three cache lines for each two steps:
//   64 codes        the low four bits are a code of the first step, the high ones a code of the second step
//   64 bytes, twice sign and seven bits of the mantissa of each value of a step
// A code is an index into the header's table of exponents. Entry 0 is 0, for zeros and subnormals.
//
// Byte 16 * l + 8 * v + j of a line stands for value 32 * v + 8 * l + j of a step (columns of 32, two values each). So
// unpacking bytes within lanes of 16 bytes gives values in the order of layout.h with vectors of any width.
//
// Values with other exponents are exceptions: (place in the panel, value), sorted, in a tensor of their own. A panel
// with many of them is stored there as a whole, in the layout of layout.h, and its chunks are not used.
#pragma once

#include "core/simd.h"
#include "linear/layout.h"

#include <algorithm>

namespace ostinato::linear {

constexpr int kChunkSteps = 16;
constexpr int kChunkUnits = kChunkSteps * kPanel;
constexpr int64_t kStepPairBytes = 3 * 64;
constexpr int64_t kChunkBytes = kChunkSteps / 2 * kStepPairBytes;
constexpr int kCodes = 16;

// Prefetches the two steps 4 KiB behind those at `pair` into the second level cache.
OSTINATO_INLINE void fetch_pair(const uint8_t* pair) {
  for (int line = 0; line < 3; ++line) __builtin_prefetch(pair + 4096 + line * 64, 0, 2);
}

// The byte of a line for a value of its step.
constexpr int place_in_line(int value) { return value % 32 / 8 * 16 + value / 32 * 8 + value % 8; }

struct Exception {
  uint32_t place;  // step * 64 + column * 2 + (0 or 1 for the value of K in the step)
  uint16_t bits;
  uint16_t unused;
};
static_assert(sizeof(Exception) == 8);

struct alignas(64) PanelHeader {
  static constexpr uint32_t kWhole = 0xffffffff;  // in `count`: the panel is stored as a whole

  uint8_t exponents[kCodes];
  uint64_t offset;  // bytes from the beginning of the exceptions to those of this panel
  uint32_t count;
  uint8_t unused[36];
};
static_assert(sizeof(PanelHeader) == 64);

struct CompressedWeight {
  // A matrix whose shape was checked before, such as one of a stack.
  CompressedWeight(const uint8_t* first_panel, const uint8_t* exceptions, int64_t num_panels, int64_t num_steps)
      : data(first_panel), aside(exceptions), panels(num_panels), steps(num_steps) {}
  CompressedWeight(const Tensor& weight, const Tensor& exceptions, int64_t out_features, int64_t in_features)
      : CompressedWeight(weight.as<uint8_t>(), exceptions.as<uint8_t>(), ceil_divide(out_features, kPanel),
                         ceil_divide(in_features, 2)) {
    OSTINATO_CHECK(weight.dtype == DType::uint8 && weight.dim == 2 && weight.sizes[0] == panels &&
                       weight.sizes[1] == panel_bytes() && is_contiguous(weight),
                   "a compressed weight of ", out_features, " x ", in_features, " values must be a contiguous uint8 matrix [",
                   panels, ", ", panel_bytes(), "], as compress_linear_weight returns it");
    OSTINATO_CHECK(exceptions.dtype == DType::uint8 && exceptions.dim == 1 && exceptions.sizes[0] >= 64 &&
                       exceptions.strides[0] == 1,
                   "exceptions must be the bytes that compress_linear_weight returned with the weight");
  }

  int64_t chunks() const { return ceil_divide(steps, kChunkSteps); }
  int64_t panel_bytes() const { return static_cast<int64_t>(sizeof(PanelHeader)) + chunks() * kChunkBytes; }
  int64_t bytes() const { return panels * panel_bytes(); }
  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes(); }
  // As of PackedWeight. The offsets in the headers of a stack's panels are from the beginning of its exceptions.
  CompressedWeight first_half() const { return {data, aside, panels / 2, steps}; }
  CompressedWeight next(int64_t count) const { return {panel(count * panels), aside, panels, steps}; }

  const uint8_t* data;
  const uint8_t* aside;  // exceptions, and panels that are stored as a whole
  int64_t panels;
  int64_t steps;
};

#if OSTINATO_ISA >= 1
// Parts of a step that are widened in registers: two vectors, at columns width * part and 16 + width * part.
constexpr int kStepParts = kPanel / 2 / F32::width;
#endif

// Joins codes and bytes to values. All forms give the same bits.
class Widener {
 public:
#if OSTINATO_ISA >= 1
  // The two steps at `pair`, in the order of layout.h.
  OSTINATO_INLINE void widen(const uint8_t* pair, uint32_t* out) const {
    for (int part = 0; part < kStepParts; ++part, out += F32::width) {
      F32 units[2][2];
      widen(pair, part, units);
      for (int i = 0; i < 4; ++i) store(reinterpret_cast<float*>(out + 16 * i), units[i / 2][i % 2]);
    }
  }
#endif

#if OSTINATO_ISA >= 2
  explicit Widener(const uint8_t* exponents) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents)));
    high_ = _mm512_and_si512(_mm512_srli_epi16(table, 1), _mm512_set1_epi8(0x7f));
    low_ = _mm512_and_si512(_mm512_slli_epi16(table, 7), _mm512_set1_epi8(-128));
  }

  // A part of each of the two steps at `pair`.
  OSTINATO_INLINE void widen(const uint8_t* pair, int, F32 (&units)[2][2]) const {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i codes = _mm512_loadu_si512(pair);
    join(_mm512_and_si512(codes, mask), _mm512_loadu_si512(pair + 64), units[0]);
    join(_mm512_and_si512(_mm512_srli_epi16(codes, 4), mask), _mm512_loadu_si512(pair + 128), units[1]);
  }

 private:
  OSTINATO_INLINE void join(__m512i codes, __m512i bytes, F32* units) const {
    const __m512i sign = _mm512_set1_epi8(-128);
    // (bytes & sign) | exponent's high bits, and (bytes & ~sign) | its lowest bit
    const __m512i high = _mm512_ternarylogic_epi32(bytes, sign, _mm512_shuffle_epi8(high_, codes), 0xea);
    const __m512i low = _mm512_ternarylogic_epi32(bytes, sign, _mm512_shuffle_epi8(low_, codes), 0xba);
    units[0] = {_mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high))};
    units[1] = {_mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high))};
  }

  __m512i high_;
  __m512i low_;
#elif OSTINATO_ISA == 1
  explicit Widener(const uint8_t* exponents) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents)));
    high_ = _mm256_and_si256(_mm256_srli_epi16(table, 1), _mm256_set1_epi8(0x7f));
    low_ = _mm256_and_si256(_mm256_slli_epi16(table, 7), _mm256_set1_epi8(-128));
  }

  // A part of each of the two steps at `pair`.
  OSTINATO_INLINE void widen(const uint8_t* pair, int part, F32 (&units)[2][2]) const {
    const __m256i mask = _mm256_set1_epi8(15);
    const auto line = [&](int index) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + 64 * index + 32 * part));
    };
    const __m256i codes = line(0);
    join(_mm256_and_si256(codes, mask), line(1), units[0]);
    join(_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask), line(2), units[1]);
  }

 private:
  OSTINATO_INLINE void join(__m256i codes, __m256i bytes, F32* units) const {
    const __m256i sign = _mm256_set1_epi8(-128);
    const __m256i high = _mm256_or_si256(_mm256_and_si256(bytes, sign), _mm256_shuffle_epi8(high_, codes));
    const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, bytes), _mm256_shuffle_epi8(low_, codes));
    units[0] = {_mm256_castsi256_ps(_mm256_unpacklo_epi8(low, high))};
    units[1] = {_mm256_castsi256_ps(_mm256_unpackhi_epi8(low, high))};
  }

  __m256i high_;
  __m256i low_;
#else
  explicit Widener(const uint8_t* exponents) {
    for (int i = 0; i < kCodes; ++i) exponents_[i] = static_cast<uint16_t>(exponents[i] << 7);
  }

  void widen(const uint8_t* pair, uint32_t* out) const {
    for (int step = 0; step < 2; ++step, out += kPanel) {
      uint16_t values[2 * kPanel];
      for (int i = 0; i < 64; ++i) {
        const int place = place_in_line(i);
        const int code = pair[place] >> (4 * step) & 15;
        const int byte = pair[64 * (step + 1) + place];
        values[i] = static_cast<uint16_t>((byte & 0x80) << 8 | exponents_[code] | (byte & 0x7f));
      }
      std::memcpy(out, values, sizeof values);
    }
  }

 private:
  uint16_t exponents_[kCodes];
#endif
};

// Reads a panel, from one chunk to the next or by columns.
class PanelReader {
 public:
  PanelReader(const CompressedWeight& weight, int64_t panel)
      : header_(reinterpret_cast<const PanelHeader*>(weight.panel(panel))),
        chunks_(weight.panel(panel) + sizeof(PanelHeader)),
        widener_(header_->exponents),
        aside_(weight.aside + header_->offset) {
    if (!is_whole()) {
      next_ = reinterpret_cast<const Exception*>(aside_);
      end_ = next_ + header_->count;
    }
  }

  // Whether the panel's units are stored as they are, at `whole()`.
  bool is_whole() const { return header_->count == PanelHeader::kWhole; }
  const uint32_t* whole() const { return reinterpret_cast<const uint32_t*>(aside_); }

  const uint8_t* chunk(int64_t index) const { return chunks_ + index * kChunkBytes; }
  const Widener& widener() const { return widener_; }

  // Whether a chunk has exceptions. Chunks are asked for in ascending order.
  bool has_exceptions(int64_t index) const {
    return next_ != end_ && next_->place < static_cast<uint64_t>(index + 1) * (2 * kChunkUnits);
  }

  // Widens a chunk to its units in the order of layout.h, and prefetches. Chunks are widened in ascending order; between
  // them, all that have exceptions are widened.
  [[gnu::noinline]] void widen_chunk(int64_t index, uint32_t* units) {
    const uint8_t* pair = chunk(index);
    for (int step = 0; step < kChunkSteps; step += 2, pair += kStepPairBytes) {
      fetch_pair(pair);
      widener_.widen(pair, units + step * kPanel);
    }
    if (has_exceptions(index)) put_exceptions(index, units);
  }

  // Writes the first `count` values of K of one column.
  void read_column(int column, int64_t count, BFloat16* out) const {
    if (is_whole()) {
      const auto* values = reinterpret_cast<const BFloat16*>(whole()) + 2 * column;
      for (int64_t k = 0; k < count; ++k) out[k] = values[k / 2 * 2 * kPanel + k % 2];
      return;
    }
    const int place = place_in_line(2 * column);  // of the value with an even k; the odd one follows it
    for (int64_t k = 0; k < count; ++k) {
      const int64_t step = k / 2;
      const uint8_t* pair = chunks_ + step / 2 * kStepPairBytes;
      const int at = place + static_cast<int>(k % 2), odd = static_cast<int>(step % 2);
      const int byte = pair[64 * (1 + odd) + at], exponent = header_->exponents[pair[at] >> (4 * odd) & 15];
      out[k].bits = static_cast<uint16_t>((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
    }
    for (const Exception* each = next_; each != end_; ++each) {
      const int64_t k = each->place / (2 * kPanel) * 2 + each->place % 2;
      if (static_cast<int>(each->place % (2 * kPanel)) / 2 == column && k < count) out[k].bits = each->bits;
    }
  }

 private:
  [[gnu::noinline]] void put_exceptions(int64_t index, uint32_t* units) {
    const int64_t first = index * (2 * kChunkUnits);
    auto* values = reinterpret_cast<char*>(units);
    for (; has_exceptions(index); ++next_) {
      std::memcpy(values + (next_->place - first) * sizeof(uint16_t), &next_->bits, sizeof(uint16_t));
    }
  }

  const PanelHeader* header_;
  const uint8_t* chunks_;
  Widener widener_;
  const uint8_t* aside_;
  const Exception* next_ = nullptr;
  const Exception* end_ = nullptr;
};

}  // namespace ostinato::linear
