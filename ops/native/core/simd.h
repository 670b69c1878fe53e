// Float vectors, whose width depends on the instruction set, and the functions on them that kernels need.
//
// F32 holds `width` floats: 16 with AVX-512, 8 with AVX2, 4 elsewhere (compiler vector extensions, which
// become SSE2 or NEON). No function reassociates: equal inputs give equal bits at every call.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/intrinsics.h"

#define OSTINATO_INLINED __attribute__((always_inline))  // of a lambda
#define OSTINATO_INLINE inline OSTINATO_INLINED

namespace ostinato {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// ---- one element -----------------------------------------------------------------------------------------

template <class To, class From>
OSTINATO_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

OSTINATO_INLINE float to_float(float x) { return x; }
OSTINATO_INLINE float to_float(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
OSTINATO_INLINE float to_float(Float16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);  // also right for subnormals
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;                       // infinity and NaN
  return bit_cast<float>(bits | static_cast<uint32_t>(x.bits & 0x8000) << 16);
}

OSTINATO_INLINE void from_float(float x, float* out) { *out = x; }
OSTINATO_INLINE void from_float(float x, BFloat16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool nan = x != x;
  out->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
OSTINATO_INLINE void from_float(float x, Float16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // adding 0.5 makes the float unit round at a half's subnormal spacing
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// ---- vectors ---------------------------------------------------------------------------------------------

#if OSTINATO_ISA >= 2

struct F32 {
  static constexpr int width = 16;
  __m512 v;
};
OSTINATO_INLINE F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }
OSTINATO_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
OSTINATO_INLINE F32 load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
OSTINATO_INLINE F32 load(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OSTINATO_INLINE F32 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 8 lanes each from two places.
OSTINATO_INLINE F32 load_halves(const int8_t* low, const int8_t* high) {
  const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(both))};
}
OSTINATO_INLINE F32 load_halves(const float* low, const float* high) {
  const __m512d first = _mm512_castpd256_pd512(_mm256_castps_pd(_mm256_loadu_ps(low)));
  return {_mm512_castpd_ps(_mm512_insertf64x4(first, _mm256_castps_pd(_mm256_loadu_ps(high)), 1))};
}
// The first 8 lanes from memory, the others zero.
OSTINATO_INLINE F32 load_8(const float* p) { return {_mm512_maskz_loadu_ps(0xff, p)}; }
OSTINATO_INLINE F32 load_8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
OSTINATO_INLINE F32 load_8(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_zextsi256_si512(_mm256_slli_epi32(wide, 16)))};
}
OSTINATO_INLINE F32 load_8(const Float16* p) {
  const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_zextps256_ps512(wide)};
}
OSTINATO_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
OSTINATO_INLINE void store(int8_t* p, F32 x) {  // whole numbers from -128 to 127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x.v)));
}
OSTINATO_INLINE void store(BFloat16* p, F32 x) {
#if OSTINATO_ISA >= 3
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(x.v);
#else
  const __m512i whole = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(whole, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(whole, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i result =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  const __m256i bits = _mm512_cvtepi32_epi16(result);
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}
OSTINATO_INLINE void store(Float16* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
OSTINATO_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OSTINATO_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
OSTINATO_INLINE float reduce_max(F32 x) { return _mm512_reduce_max_ps(x.v); }
OSTINATO_INLINE float reduce_sum(F32 x) { return _mm512_reduce_add_ps(x.v); }
// Lanes in [first, last) keep x, the others become `other`. The bounds may lie outside of the vector.
OSTINATO_INLINE F32 keep_range(F32 x, int first, int last, F32 other) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 low = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first));
  return {_mm512_mask_mov_ps(other.v, _mm512_mask_cmplt_epi32_mask(low, lane, _mm512_set1_epi32(last)), x.v)};
}
OSTINATO_INLINE F32 round_to_integer(F32 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Exchanges rows and columns of width x width lanes of 32 bits.
OSTINATO_INLINE void transpose(F32* rows) {
  __m512 pairs[16];
  __m512d quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(pairs[i + j]);
      const __m512d b = _mm512_castps_pd(pairs[i + j + 2]);
      quads[i + 2 * j] = _mm512_unpacklo_pd(a, b);
      quads[i + 2 * j + 1] = _mm512_unpackhi_pd(a, b);
    }
  }
  for (int j = 0; j < 4; ++j) {  // quads[4 g + j]: rows 4 g .. 4 g + 3, column 4 lane + j
    const __m512 q[4] = {_mm512_castpd_ps(quads[j]), _mm512_castpd_ps(quads[4 + j]),
                         _mm512_castpd_ps(quads[8 + j]), _mm512_castpd_ps(quads[12 + j])};
    const __m512 even_low = _mm512_shuffle_f32x4(q[0], q[1], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(q[0], q[1], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(q[2], q[3], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(q[2], q[3], 0xdd);
    rows[j].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[4 + j].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[8 + j].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[12 + j].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

#elif OSTINATO_ISA == 1

struct F32 {
  static constexpr int width = 8;
  __m256 v;
};
OSTINATO_INLINE F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }
OSTINATO_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
OSTINATO_INLINE F32 load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
OSTINATO_INLINE F32 load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
OSTINATO_INLINE F32 load(const Float16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
OSTINATO_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.v); }
OSTINATO_INLINE void store(int8_t* p, F32 x) {  // whole numbers from -128 to 127
  const __m256i whole = _mm256_cvttps_epi32(x.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
OSTINATO_INLINE void store(BFloat16* p, F32 x) {
  const __m256i whole = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(whole, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(whole, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i result =
      _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
  const __m128i bits =
      _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
}
OSTINATO_INLINE void store(Float16* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
OSTINATO_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
OSTINATO_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
OSTINATO_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
OSTINATO_INLINE float reduce_max(F32 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
OSTINATO_INLINE float reduce_sum(F32 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
OSTINATO_INLINE F32 keep_range(F32 x, int first, int last, F32 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
  return {_mm256_blendv_ps(other.v, x.v, _mm256_castsi256_ps(_mm256_andnot_si256(below, inside)))};
}
OSTINATO_INLINE F32 round_to_integer(F32 x) {
  return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OSTINATO_INLINE F32 scale_by_power(F32 mantissa, F32 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(mantissa.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
OSTINATO_INLINE void transpose(F32* rows) {
  __m256 quads[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 low_a = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    const __m256 high_a = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    const __m256 low_b = _mm256_unpacklo_ps(rows[i + 2].v, rows[i + 3].v);
    const __m256 high_b = _mm256_unpackhi_ps(rows[i + 2].v, rows[i + 3].v);
    quads[i] = _mm256_shuffle_ps(low_a, low_b, 0x44);
    quads[i + 1] = _mm256_shuffle_ps(low_a, low_b, 0xee);
    quads[i + 2] = _mm256_shuffle_ps(high_a, high_b, 0x44);
    quads[i + 3] = _mm256_shuffle_ps(high_a, high_b, 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j].v = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    rows[4 + j].v = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}

#else

typedef float FloatLanes __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(16)));
typedef uint32_t UintLanes __attribute__((vector_size(16)));
typedef uint16_t HalfLanes __attribute__((vector_size(8)));

struct F32 {
  static constexpr int width = 4;
  FloatLanes v;
};
OSTINATO_INLINE F32 broadcast(float x) { return {FloatLanes{x, x, x, x}}; }
OSTINATO_INLINE F32 load(const float* p) {
  F32 x;
  std::memcpy(&x.v, p, sizeof(x.v));
  return x;
}
OSTINATO_INLINE F32 load(const int8_t* p) { return {FloatLanes{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }
OSTINATO_INLINE UintLanes load_wide(const void* p) {
  HalfLanes halves;
  std::memcpy(&halves, p, sizeof(halves));
  return __builtin_convertvector(halves, UintLanes);
}
OSTINATO_INLINE F32 load(const BFloat16* p) { return {(FloatLanes)(load_wide(p) << 16)}; }
OSTINATO_INLINE F32 load(const Float16* p) {  // as to_float(Float16)
  const UintLanes bits = load_wide(p);
  const FloatLanes magnitude = (FloatLanes)((bits & 0x7fff) << 13) * 0x1p112f;
  const UintLanes infinite = (UintLanes)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
  return {(FloatLanes)((UintLanes)magnitude | infinite | ((bits & 0x8000) << 16))};
}
OSTINATO_INLINE void store(BFloat16* p, F32 x) {  // as from_float(float, BFloat16*)
  const UintLanes bits = (UintLanes)x.v;
  const UintLanes nan = (UintLanes)(x.v != x.v);
  const UintLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const HalfLanes halves = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), HalfLanes);
  std::memcpy(p, &halves, sizeof(halves));
}
OSTINATO_INLINE void store(Float16* p, F32 x) {
  for (int i = 0; i < 4; ++i) from_float(x.v[i], p + i);
}
OSTINATO_INLINE void store(float* p, F32 x) { std::memcpy(p, &x.v, sizeof(x.v)); }
OSTINATO_INLINE void store(int8_t* p, F32 x) {  // whole numbers from -128 to 127
  for (int i = 0; i < 4; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
OSTINATO_INLINE F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
OSTINATO_INLINE F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
OSTINATO_INLINE F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
OSTINATO_INLINE F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
OSTINATO_INLINE F32 fma(F32 a, F32 b, F32 c) {
#ifdef __FP_FAST_FMAF
  F32 x;
  for (int i = 0; i < 4; ++i) x.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return x;
#else
  return {a.v * b.v + c.v};
#endif
}
OSTINATO_INLINE F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
OSTINATO_INLINE F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
OSTINATO_INLINE float reduce_max(F32 x) {
  const float a = x.v[0] > x.v[2] ? x.v[0] : x.v[2];
  const float b = x.v[1] > x.v[3] ? x.v[1] : x.v[3];
  return a > b ? a : b;
}
OSTINATO_INLINE float reduce_sum(F32 x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
OSTINATO_INLINE F32 keep_range(F32 x, int first, int last, F32 other) {
  const IntLanes lane = {0, 1, 2, 3};
  return {((lane >= first) & (lane < last)) ? x.v : other.v};
}
OSTINATO_INLINE F32 round_to_integer(F32 x) {
  const F32 magic = broadcast(0x1.8p23f);  // pushes the fraction out of the mantissa
  return (x + magic) - magic;
}
OSTINATO_INLINE F32 scale_by_power(F32 mantissa, F32 n) {
  const IntLanes exponent = __builtin_convertvector(n.v, IntLanes) + 127;
  return {mantissa.v * (FloatLanes)(exponent << 23)};
}
OSTINATO_INLINE void transpose(F32* rows) {
  const F32 in[4] = {rows[0], rows[1], rows[2], rows[3]};
  for (int i = 0; i < 4; ++i) rows[i].v = FloatLanes{in[0].v[i], in[1].v[i], in[2].v[i], in[3].v[i]};
}

#endif

#if OSTINATO_ISA < 2
template <class T>
OSTINATO_INLINE F32 load_8(const T* p) {
  static_assert(F32::width <= 8, "only vectors of 16 lanes have a remainder of 8");
  return load(p);
}
#endif

// ---- memory ----------------------------------------------------------------------------------------------

// Writes a cache line (64 bytes at a multiple of 64) to memory, without reading it first.
OSTINATO_INLINE void stream_line(void* place, const void* line) {
#if OSTINATO_ISA >= 2
  _mm512_stream_si512(static_cast<__m512i*>(place), _mm512_load_si512(line));
#else
  std::memcpy(place, line, 64);
#endif
}
// Orders the lines written by `stream_line` before all later writes of this thread.
OSTINATO_INLINE void fence_lines() {
#if OSTINATO_ISA >= 2
  _mm_sfence();
#endif
}

// ---- built from the above --------------------------------------------------------------------------------

// 2 ** x for x <= 120; NaN for NaN. The relative error is below 2e-7 from -126 on. The result is exactly 1 at 0, and exactly 0 below
// -126 (-127 without AVX-512). A subnormal result would take the processor a hundred cycles. The polynomial is the
// minimax one of degree 5 on [-0.5, 0.5] with its constant term fixed to 1.
OSTINATO_INLINE F32 exp2(F32 x) {
#if OSTINATO_ISA < 2
  x = max(broadcast(-127.0f), x);  // the second argument if it is NaN
#endif
  const F32 n = round_to_integer(x);
  const F32 f = x - n;
  F32 p = broadcast(0x1.5bba14p-10f);
  p = fma(p, f, broadcast(0x1.3cea88p-7f));
  p = fma(p, f, broadcast(0x1.c6b752p-5f));
  p = fma(p, f, broadcast(0x1.ebf9bcp-3f));
  p = fma(p, f, broadcast(0x1.62e42ap-1f));
  p = fma(p, f, broadcast(1.0f));
#if OSTINATO_ISA >= 2
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p.v, n.v)};
#else
  return scale_by_power(p, n);
#endif
}

// tanh(x), absolute error below 3e-7; NaN for NaN.
OSTINATO_INLINE F32 tanh(F32 x) {
  const F32 limit = broadcast(20.0f);  // tanh is 1 in float from there on
  const F32 clamped = max(broadcast(-20.0f), min(limit, x));
  const F32 e = exp2(clamped * broadcast(2.885390082f));  // exp(2 x)
  return broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
}

}  // namespace ostinato
