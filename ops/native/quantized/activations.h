// Quantises the activations of a linear op over quantised weights.
#pragma once

#include "core/simd.h"
#include "linear/tasks.h"

#include <cstring>
#include <type_traits>

namespace ostinato::linear {

// Stores each lane as 8 bits; lanes hold whole numbers in [-127, 127].
OSTINATO_INLINE void store_bytes(int8_t* p, F32 x) {
#if OSTINATO_ISA >= 2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
#elif OSTINATO_ISA == 1
  const __m256i whole = _mm256_cvtps_epi32(x.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < F32::width; ++i) p[i] = static_cast<int8_t>(x.v[i]);
#endif
}

#if OSTINATO_ISA >= 2
// Sets `most` to the largest magnitude of x. Returns false if x has an infinity or a NaN.
OSTINATO_INLINE bool largest_magnitude(const BFloat16* x, int64_t count, float* most) {
  __m512i largest = _mm512_setzero_si512();  // magnitudes have the order of their bits
  for (int64_t k = 0; k < count; k += 32) {
    const __mmask32 present = count - k >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - k)) - 1;
    const __m512i magnitude = _mm512_and_si512(_mm512_maskz_loadu_epi16(present, x + k), _mm512_set1_epi16(0x7fff));
    largest = _mm512_max_epu16(largest, magnitude);
  }
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i ones = _mm_set1_epi16(-1);  // the only instruction that compares across lanes finds a minimum
  const auto least = static_cast<uint16_t>(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, ones)), 0));
  const uint32_t bits = 0xffffu - least;
  *most = bit_cast<float>(bits << 16);
  return bits < 0x7f80;
}
#endif

// Quantises one group of a row: writes values / scale, whole numbers in [-127, 127], and returns their sum. `padded`
// numbers are written; those past `count` are zero.
// A group with an infinity or a NaN gets the scale NaN.
template <class T>
float quantize_group(const T* x, int64_t count, int64_t padded, int8_t* out, float* scale) {
  T tail[F32::width];
  const int64_t whole = count / F32::width * F32::width;
  if (whole < count) {
    std::memset(tail, 0, sizeof tail);
    std::memcpy(tail, x + whole, (count - whole) * sizeof(T));
  }
  const auto at = [&](int64_t k) { return load(k < whole ? x + k : tail); };
  float most = 0.0f;
  float zero_or_nan = 0.0f;
  bool finite = false;
#if OSTINATO_ISA >= 2
  if constexpr (std::is_same_v<T, BFloat16>) finite = largest_magnitude(x, count, &most);
#endif
  if (!finite) {
    F32 largest = broadcast(0.0f);
    F32 wrong = broadcast(0.0f);
    for (int64_t k = 0; k < count; k += F32::width) {
      const F32 value = at(k);
      largest = max(largest, max(value, broadcast(0.0f) - value));
      wrong = fma(value, broadcast(0.0f), wrong);
    }
    most = reduce_max(largest);
    zero_or_nan = reduce_sum(wrong);
  }
  const bool usable = most >= 0x1p-100f && zero_or_nan == 0.0f;
  *scale = usable ? most / 127.0f : zero_or_nan;
  const F32 factor = broadcast(usable ? 127.0f / most : 0.0f);
  F32 sum = broadcast(0.0f);
  for (int64_t k = 0; k < padded; k += F32::width) {
    F32 value = broadcast(0.0f);
    if (usable && k < count) value = round_to_integer(at(k) * factor);
    store_bytes(out + k, value);
    sum = sum + value;
  }
  return reduce_sum(sum);
}

// A row of x in the order of the weight's columns. If that order differs from the row's own, the row is copied to
// `line` [in_features].
template <class T>
const T* row_in_order(const Problem& p, int64_t row, T* line) {
  const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
  if (p.order == nullptr) return x;
  for (int64_t k = 0; k < p.in_features; ++k) line[k] = x[p.order[k]];
  return line;
}

// The size in bytes of the `line` that `row_in_order` needs, a multiple of 64.
template <class T>
int64_t line_bytes(const Problem& p) {
  return p.order == nullptr ? 0 : round_up(p.in_features * static_cast<int64_t>(sizeof(T)), 64);
}

}  // namespace ostinato::linear
