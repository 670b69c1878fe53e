// Transposing blocks of four-byte units, for packing weights and activations.
//
// If rows are a multiple of 4096 bytes apart, a plain loop takes four cycles for each unit, because its loads and
// stores share page offsets. Transposing whole registers takes less than half a cycle for each unit at any pitch.
#pragma once

#include "core/simd.h"

#include <algorithm>

namespace ostinato::linear {

OSTINATO_INLINE F32 load_lanes(const float* p, int count) {
#if OSTINATO_ISA >= 2
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
#else
  if (count == F32::width) return load(p);
  float lanes[F32::width] = {};
  for (int i = 0; i < count; ++i) std::memcpy(lanes + i, p + i, sizeof *p);
  return load(lanes);
#endif
}

OSTINATO_INLINE void store_lanes(float* p, F32 x, int count) {
#if OSTINATO_ISA >= 2
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x.v);
#else
  if (count == F32::width) return store(p, x);
  float lanes[F32::width];
  store(lanes, x);
  for (int i = 0; i < count; ++i) std::memcpy(p + i, lanes + i, sizeof *p);
#endif
}

#if OSTINATO_ISA >= 2
// Units [0, 16) of four rows: out[c * 4 + r] = unit c of row r. A fifth of the instructions of `transpose`.
OSTINATO_INLINE void transpose_four_rows(const char* rows, int64_t row_bytes, float* out) {
  const auto row = [&](int r) { return _mm512_loadu_ps(reinterpret_cast<const float*>(rows + r * row_bytes)); };
  const __m512d low_01 = _mm512_castps_pd(_mm512_unpacklo_ps(row(0), row(1)));
  const __m512d high_01 = _mm512_castps_pd(_mm512_unpackhi_ps(row(0), row(1)));
  const __m512d low_23 = _mm512_castps_pd(_mm512_unpacklo_ps(row(2), row(3)));
  const __m512d high_23 = _mm512_castps_pd(_mm512_unpackhi_ps(row(2), row(3)));
  // Quarter l of `quads[j]` has the four rows of unit 4 l + j.
  const __m512d quads[4] = {_mm512_unpacklo_pd(low_01, low_23), _mm512_unpackhi_pd(low_01, low_23),
                            _mm512_unpacklo_pd(high_01, high_23), _mm512_unpackhi_pd(high_01, high_23)};
  const __m512d even_01 = _mm512_shuffle_f64x2(quads[0], quads[1], 0x88);  // units 0, 8, 1, 9
  const __m512d odd_01 = _mm512_shuffle_f64x2(quads[0], quads[1], 0xdd);   // units 4, 12, 5, 13
  const __m512d even_23 = _mm512_shuffle_f64x2(quads[2], quads[3], 0x88);
  const __m512d odd_23 = _mm512_shuffle_f64x2(quads[2], quads[3], 0xdd);
  auto* target = reinterpret_cast<double*>(out);
  _mm512_storeu_pd(target, _mm512_shuffle_f64x2(even_01, even_23, 0x88));
  _mm512_storeu_pd(target + 8, _mm512_shuffle_f64x2(odd_01, odd_23, 0x88));
  _mm512_storeu_pd(target + 16, _mm512_shuffle_f64x2(even_01, even_23, 0xdd));
  _mm512_storeu_pd(target + 24, _mm512_shuffle_f64x2(odd_01, odd_23, 0xdd));
}
#endif

#if OSTINATO_ISA <= 1
// out[c * num_rows + r] = unit c of row r, for fewer rows than a vector has lanes. Whole vectors are stored: the next
// units overwrite the lanes past the last row. Returns the number of units; the last units, for which there are no next
// ones, are left to the caller.
inline int64_t transpose_few_rows(const char* rows, int64_t row_bytes, int num_rows, int64_t num_units, float* out) {
  constexpr int kBlock = F32::width;
  const float* row[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    row[i] = reinterpret_cast<const float*>(rows + std::min(i, num_rows - 1) * row_bytes);
  }
  int64_t unit = 0;
  for (; unit + kBlock + kBlock / num_rows <= num_units; unit += kBlock) {
    F32 block[kBlock];
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) block[i] = load(row[i] + unit);
    transpose(block);
    float* target = out + unit * num_rows;
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) store(target + i * num_rows, block[i]);
  }
  return unit;
}
#endif

// out[c * pitch + r] = unit c of row r; rows lie `row_bytes` apart, at any alignment.
[[gnu::noinline]] inline void transpose_units(const void* rows, int64_t row_bytes, int num_rows, int64_t num_units,
                                              void* out, int64_t pitch) {
  constexpr int kBlock = F32::width;
  int64_t unit = 0;
#if OSTINATO_ISA >= 2
  if (num_rows == 4 && pitch == 4) {  // a step that verifies three drafts
    for (; unit + kBlock <= num_units; unit += kBlock) {
      transpose_four_rows(static_cast<const char*>(rows) + unit * 4, row_bytes, static_cast<float*>(out) + unit * 4);
    }
  }
#else
  if (num_rows < kBlock && pitch == num_rows) {
    unit = transpose_few_rows(static_cast<const char*>(rows), row_bytes, num_rows, num_units, static_cast<float*>(out));
  }
#endif
  for (; unit < num_units; unit += kBlock) {
    const int units = static_cast<int>(std::min<int64_t>(kBlock, num_units - unit));
    for (int row = 0; row < num_rows; row += kBlock) {
      const int lanes = std::min(kBlock, num_rows - row);
      const char* source = static_cast<const char*>(rows) + row * row_bytes + unit * 4;
      F32 block[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        block[i] = i < lanes ? load_lanes(reinterpret_cast<const float*>(source + i * row_bytes), units)
                             : broadcast(0.0f);
      }
      transpose(block);
      float* target = static_cast<float*>(out) + unit * pitch + row;
      for (int i = 0; i < units; ++i) store_lanes(target + i * pitch, block[i], lanes);
    }
  }
}

}  // namespace ostinato::linear
