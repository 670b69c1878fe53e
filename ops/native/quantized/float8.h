// The linear op over weights that are floats of 8 bits (e4m3): rows of activations times panels.
//
// A part of a panel is widened to floats in the first level cache. Widening is exact. Then all rows are multiplied by
// it (linear/tiles.h), and their sums are scaled and added to the sums of the earlier parts. Activations are not
// rounded. A part is a group of K, or some of its values if a group has many. Parts follow in ascending order, so the
// bits of a row do not depend on other rows.
//
// With a dot product of bfloat16, bfloat16 activations are multiplied by weights widened to bfloat16, of which a
// product takes two values of K. The four bytes of a column are the values k to k + 3. The cheapest pairs to widen are
// (k, k + 2) and (k + 1, k + 3), because they are the even and the odd bytes. The activations are packed in the same
// order.
#pragma once

#include "linear/tasks.h"
#include "linear/tiles.h"
#include "linear/transpose.h"
#include "quantized/activations.h"
#include "quantized/layout.h"

#include <array>
#include <utility>

#if OSTINATO_ISA >= 3
#include <cpuid.h>
#endif

namespace ostinato::linear {

#if OSTINATO_ISA >= 2
// The bytes a where the mask's bits are 0, and those of b where they are 1.
OSTINATO_INLINE __m512i select_bits(__m512i a, __m512i b, __m512i mask) {
  return _mm512_ternarylogic_epi32(a, b, mask, 0xd8);
}
#endif

// widen_pairs(p, even, odd) widens four values of K of 16 columns to bfloat16. `even` receives the pairs (k, k + 2),
// and `odd` the pairs (k + 1, k + 3). An e4m3 with the exponent e >= 1 has the exponent e + 120 as bfloat16. Its
// subnormals, below 2 ** -6, are looked up.
#if defined(__GFNI__) && defined(__AVX512VBMI__)

// Computes the low bytes and the high bytes of all 64 bfloat16s, and then joins them.
OSTINATO_INLINE void widen_pairs(const uint8_t* p, __m512i* even, __m512i* odd) {
  const __m512i bytes = _mm512_loadu_si512(p);
  __m512i low = _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(0x01020408), 0);  // bytes << 4
  // The sign, and 60 + half of the exponent. The half has three bits; its highest bit also inverts the bits of 60.
  __m512i high = _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(0x1020404040404080), 60);
  const __mmask64 small = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x78));
  // The low three bits of a subnormal are its index in these tables.
  low = _mm512_mask_permutexvar_epi8(low, small, bytes, _mm512_set1_epi64(0x6040'2000'c080'0000));
  high = _mm512_mask_permutexvar_epi8(high, small, bytes, _mm512_set1_epi64(0x3c3c'3c3c'3b3b'3b00));
  high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8);  // the sign, which tables lack
  const __m512i second = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
  *even = select_bits(low, _mm512_slli_epi16(high, 8), second);
  *odd = select_bits(_mm512_srli_epi16(low, 8), high, second);
}

#elif OSTINATO_ISA >= 2

alignas(64) constexpr uint16_t kSmallFloat8[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

// The low bytes of 16-bit lanes as bfloat16, without signs.
OSTINATO_INLINE __m512i widen_magnitudes(__m512i bytes) {
  const __m512i wide = _mm512_add_epi16(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_cmplt_epu16_mask(bytes, _mm512_set1_epi16(8));
  return _mm512_mask_permutexvar_epi16(wide, small, bytes, _mm512_load_si512(kSmallFloat8));
}

OSTINATO_INLINE void widen_pairs(const uint8_t* p, __m512i* even, __m512i* odd) {
  const __m512i bytes = _mm512_loadu_si512(p);
  const __m512i mask = _mm512_set1_epi16(0x7f);
  const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  const __m512i low = widen_magnitudes(_mm512_and_si512(bytes, mask));
  const __m512i high = widen_magnitudes(_mm512_and_si512(_mm512_srli_epi16(bytes, 8), mask));
  *even = select_bits(low, _mm512_slli_epi16(bytes, 8), sign);
  *odd = select_bits(high, bytes, sign);
}

#endif

// Whether the units of a widened weight are pairs of bfloat16, for a dot product. Otherwise they are floats.
template <class Kind>
constexpr bool kIsPairs = Kind::kElements == 2;

// Bytes ahead of the present weights that are prefetched into the second level cache. Widening is so long that the
// processor does not reach the next loads by itself.
constexpr int64_t kFetchAhead = 4096;

// Widens `steps` of 4 values of K to the panel layout of linear/layout.h: out[2 * steps][32] pairs.
inline void widen_to_pairs(const uint8_t* data, int64_t steps, uint32_t* out) {
  for (int64_t step = 0; step < steps; ++step, data += 4 * kPanel, out += 2 * kPanel) {
#if OSTINATO_ISA >= 2
    for (int column = 0; column < kPanel; column += 16) {
      __m512i even, odd;
      __builtin_prefetch(data + column * 4 + kFetchAhead, 0, 2);
      widen_pairs(data + column * 4, &even, &odd);
      _mm512_storeu_si512(out + column, even);
      _mm512_storeu_si512(out + kPanel + column, odd);
    }
#else
    const auto high = [](uint8_t value) { return bit_cast<uint32_t>(from_float8(value)) >> 16; };
    for (int column = 0; column < kPanel; ++column) {
      const uint8_t* four = data + column * 4;
      out[column] = high(four[0]) | high(four[2]) << 16;
      out[kPanel + column] = high(four[1]) | high(four[3]) << 16;
    }
#endif
  }
}

// Widens `steps` of 4 values of K to floats: out[4 * steps][32].
inline void widen_to_floats(const uint8_t* data, int64_t steps, float* out) {
  for (int64_t step = 0; step < steps; ++step, data += 4 * kPanel, out += 4 * kPanel) {
#if OSTINATO_ISA >= 2
    for (int column = 0; column < kPanel; column += 16) {
      __m512i pairs[2];
      widen_pairs(data + column * 4, pairs, pairs + 1);
      for (int i = 0; i < 2; ++i) {
        const __m512i high = _mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
        _mm512_storeu_si512(out + i * kPanel + column, _mm512_slli_epi32(pairs[i], 16));
        _mm512_storeu_si512(out + (i + 2) * kPanel + column, high);
      }
    }
#elif OSTINATO_ISA == 1
    for (int column = 0; column < kPanel; column += 8) {
      // The bits of an e4m3, shifted, are a float16 whose value is smaller by 2 ** 8, because the bias of its exponent
      // is larger by 8. The processor converts float16.
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + column * 4));
      const auto store_values = [&](__m256i signed_bytes, float* target) {
        const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
        const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(signed_bytes, 1), mask);
        const __m256 factor = _mm256_set1_ps(256.0f);
        const __m256 first = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor);
        const __m256 second = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor);
        const auto in_order = [](__m256 x) {
          return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
        };
        _mm256_storeu_ps(target + column, in_order(_mm256_shuffle_ps(first, second, 0x88)));
        _mm256_storeu_ps(target + 2 * kPanel + column, in_order(_mm256_shuffle_ps(first, second, 0xdd)));
      };
      store_values(_mm256_slli_epi16(bytes, 8), out);
      store_values(bytes, out + kPanel);
    }
#else
    for (int column = 0; column < kPanel; ++column) {
      for (int i = 0; i < 4; ++i) out[i * kPanel + column] = from_float8(data[column * 4 + i]);
    }
#endif
  }
}

template <class Kind>
OSTINATO_INLINE void widen(const uint8_t* data, int64_t steps, uint32_t* out) {
  if constexpr (kIsPairs<Kind>) {
    widen_to_pairs(data, steps, out);
  } else {
    widen_to_floats(data, steps, reinterpret_cast<float*>(out));
  }
}

// Copies a row of bfloat16 in the order of widened pairs: in each four values, the second and third are exchanged.
// Writes `padded` values, a multiple of 4, of which those from `count` on are zero.
inline void copy_in_pairs(const BFloat16* x, int64_t count, int64_t padded, BFloat16* out) {
  int64_t k = 0;
#if OSTINATO_ISA >= 2
  const __m512i places = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
  for (; k + 32 <= count; k += 32) {
    _mm512_storeu_si512(out + k, _mm512_shuffle_epi8(_mm512_loadu_si512(x + k), places));
  }
#endif
  for (; k < padded; k += 4) {
    BFloat16 four[4] = {};
    if (k < count) std::memcpy(four, x + k, std::min<int64_t>(4, count - k) * sizeof(BFloat16));
    const BFloat16 exchanged[] = {four[0], four[2], four[1], four[3]};
    std::memcpy(out + k, exchanged, sizeof exchanged);
  }
}

#if OSTINATO_ISA >= 3
// Whether `multiply_widened` prefetches weights by instructions. With them, one row takes 0.6 times as long on a Zen 5,
// and 1.6 times as long on a Zen 4 (AMD's family 19h).
inline bool fetches_by_instructions() {
  static const bool is_zen4 = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return false;
    __get_cpuid(1, &eax, &ebx, &ecx, &edx);
    return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 0x19;
  }();
  return !is_zen4;
}

// Computes the bits of `widen_to_pairs` and a tile of R rows, without storing the widened weights:
//   sums[R][32] = x[2 * steps][R] * w
template <int R>
void multiply_widened(const float* x, const uint8_t* data, int64_t steps, float* sums) {
  constexpr int V = kPanel / F32::width;
  F32 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = broadcast(0.0f);
  }
  const bool fetches = fetches_by_instructions();
  for (int64_t step = 0; step < steps; ++step, data += 4 * kPanel, x += 2 * R) {
    if (fetches) {
      __builtin_prefetch(data + kFetchAhead, 0, 2);
      __builtin_prefetch(data + kFetchAhead + 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      __m512i even, odd;
      widen_pairs(data + v * 4 * F32::width, &even, &odd);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[r][v].v = _mm512_dpbf16_ps(sum[r][v].v, (__m512bh)broadcast(x[r]).v, (__m512bh)even);
        sum[r][v].v = _mm512_dpbf16_ps(sum[r][v].v, (__m512bh)broadcast(x[R + r]).v, (__m512bh)odd);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + r * kPanel + v * F32::width, sum[r][v]);
  }
}

using MultiplyWidened = void (*)(const float* x, const uint8_t* data, int64_t steps, float* sums);
constexpr int kFewRows = 8;  // up to which widening weights anew for each product is faster than storing them

template <int... R>
constexpr std::array<MultiplyWidened, sizeof...(R)> make_multiply_widened(std::integer_sequence<int, R...>) {
  return {&multiply_widened<R + 1>...};
}

// The function for `rows` rows is at index `rows - 1`.
constexpr auto kMultiplyWidened = make_multiply_widened(std::make_integer_sequence<int, kFewRows>{});
#endif

// sums[rows][32] += part[rows][32] * scales, or = if `is_first`.
inline void add_scaled(const float* part, const float* scales, int64_t rows, bool is_first, float* sums) {
  for (int column = 0; column < kPanel; column += F32::width) {
    const F32 scale = load(scales + column);
    for (int64_t r = 0; r < rows; ++r) {
      float* target = sums + r * kPanel + column;
      store(target, fma(load(part + r * kPanel + column), scale, is_first ? broadcast(0.0f) : load(target)));
    }
  }
}

// A group's scales as floats.
inline void load_scales(const QuantFormat& format, const uint8_t* header, float* scales) {
  for (int c = 0; c < kPanel; c += F32::width) store(scales + c, load_factors(format, header, c));
}

template <class In, class Out>
class Float8RowWorker {
#if OSTINATO_ISA >= 3
  using Kind = std::conditional_t<std::is_same_v<In, BFloat16>, BFloat16Pairs, Float32>;
#else
  using Kind = Float32;
#endif

 public:
  // The bytes of a packed row of activations.
  static int64_t row_bytes(const QuantizedShape& shape) { return shape.steps * kUnits * 4; }

  Float8RowWorker(const Problem& problem, const QuantizedWeight& weight, const RowGroups& groups)
      : p_(problem), weight_(weight), groups_(groups), row_units_(weight.steps * kUnits) {}

  // Packs each block as [units][rows].
  void pack(int64_t group) {
    const int64_t first_row = groups_.first_row(group);
    const int64_t rows = groups_.first_row(group + 1) - first_row;
    float* memory = scratch(line_bytes<In>(p_) / 4 + (rows + kMaxRows) * row_units_);
    auto* line = reinterpret_cast<In*>(memory);
    activations_ = memory + line_bytes<In>(p_) / 4;
    float* wide = activations_ + rows * row_units_;
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      const int height = groups_.blocks.height(block);
      float* packed = activations_ + (row - first_row) * row_units_;
      for (int r = 0; r < height; ++r) {
        const In* x = row_in_order(p_, row + r, line);
        float* units = height == 1 ? packed : wide + r * row_units_;
        if constexpr (kIsPairs<Kind>) {
          copy_in_pairs(x, p_.in_features, row_units_ * 2, reinterpret_cast<BFloat16*>(units));
        } else {
          for (int64_t k = 0; k < row_units_; ++k) units[k] = k < p_.in_features ? to_float(x[k]) : 0.0f;
        }
      }
      if (height > 1) transpose_units(wide, row_units_ * 4, height, row_units_, packed, height);
    }
  }

  void multiply(int64_t group, int64_t panel) const {
    alignas(64) uint32_t widened[kPartSteps * kUnits * kPanel];
    alignas(64) float sums[kMaxGroupRows * kPanel];
    alignas(64) float bias[kPanel];
    alignas(64) float scales[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<In>(p_, column, bias);
    const int64_t first_row = groups_.first_row(group);
    const int64_t first_block = groups_.first_block(group);
    const int64_t blocks = groups_.first_block(group + 1) - first_block;
    const bool in_registers = widens_in_registers(groups_.blocks.rows);
    for (int64_t step = 0; step < weight_.steps;) {
      const int64_t number = step / weight_.group_steps;
      const int64_t within = step % weight_.group_steps;
      const uint8_t* header = weight_.panel(panel) + weight_.group_offset(number);
      if (within == 0) load_scales(weight_.format, header, scales);
      const int64_t steps = std::min({kPartSteps, weight_.group_steps - within, weight_.steps - step});
      const uint8_t* data = header + weight_.format.header_bytes() + within * weight_.format.step_bytes();
      if (!in_registers) widen<Kind>(data, steps, widened);
      for (int64_t block = 0; block < blocks; ++block) {
        alignas(64) float part[kMaxRows * kPanel];
        const int64_t row = groups_.blocks.begin(first_block + block);
        const int rows = groups_.blocks.height(first_block + block);
        const float* x = activations_ + (row - first_row) * row_units_ + step * kUnits * rows;
        float* block_sums = sums + (row - first_row) * kPanel;
        if (in_registers) {
          multiply_few(x, data, steps, rows, part);
        } else {
          kTiles<Kind>[rows - 1](x, widened, steps * kUnits, part, Sum::begin, Fetch::none(widened));
        }
        add_scaled(part, scales, rows, step == 0, block_sums);
        if (step + steps == weight_.steps) write_rows<Out>(p_, block_sums, rows, bias, row, column);
      }
      step += steps;
    }
  }

 private:
  // Whether all rows are multiplied by weights that are widened in registers, by `multiply_few`.
#if OSTINATO_ISA >= 3
  static bool widens_in_registers(int64_t rows) { return kIsPairs<Kind> && rows <= kFewRows; }
  static void multiply_few(const float* x, const uint8_t* data, int64_t steps, int rows, float* part) {
    kMultiplyWidened[rows - 1](x, data, steps, part);
  }
#else
  static bool widens_in_registers(int64_t) { return false; }
  static void multiply_few(const float*, const uint8_t*, int64_t, int, float*) {}
#endif

  static constexpr int kUnits = 4 / Kind::kElements;    // units of a step of 4 values of K
  static constexpr int64_t kPartSteps = 64 / kUnits;    // steps of the largest part: 8 KiB when widened

  const Problem& p_;
  const QuantizedWeight& weight_;
  const RowGroups& groups_;
  const int64_t row_units_;
  float* activations_ = nullptr;
};

}  // namespace ostinato::linear
