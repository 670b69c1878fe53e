// Transposing blocks of four-byte units, for packing weights and activations.
//
// A plain loop runs at four cycles a unit when rows are a multiple of 4096 bytes apart, because its loads
// and stores then share page offsets; whole registers cost less than half a cycle a unit at any pitch.
#pragma once

#include <cstdint>
#include <cstring>

#if OSTINATO_ISA >= 2
#include <immintrin.h>
#endif

namespace ostinato::linear {

#if OSTINATO_ISA >= 2

// columns[c] lane r = unit c of row r, for c < num_units <= 16 and r < num_rows <= 16; the rest is zero.
inline void transpose_units(const void* rows, int64_t row_bytes, int num_rows, int num_units, __m512i (&columns)[16]) {
  const auto present = static_cast<__mmask16>((1u << num_units) - 1);
  __m512i a[16];
  __m512i b[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    a[r] = r < num_rows ? _mm512_maskz_loadu_epi32(present, static_cast<const char*>(rows) + r * row_bytes)
                        : _mm512_setzero_si512();
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    columns[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    columns[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    columns[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    columns[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

#endif

// out[c * pitch + r] = unit c of row r, for c < num_units and r < num_rows; at most 16 units and 16 rows.
[[gnu::noinline]] inline void transpose_to(const void* rows, int64_t row_bytes, int num_rows, int num_units,
                                           uint32_t* out, int64_t pitch) {
#if OSTINATO_ISA >= 2
  __m512i columns[16];
  transpose_units(rows, row_bytes, num_rows, num_units, columns);
  const auto present = static_cast<__mmask16>((1u << num_rows) - 1);
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c) {
    if (c < num_units) _mm512_mask_storeu_epi32(out + c * pitch, present, columns[c]);
  }
#else
  for (int r = 0; r < num_rows; ++r) {
    const char* row = static_cast<const char*>(rows) + r * row_bytes;
    for (int c = 0; c < num_units; ++c) std::memcpy(out + c * pitch + r, row + c * 4, 4);
  }
#endif
}

// As transpose_to, but a unit is a pair of bfloat16 that becomes two rows of floats: even, then odd.
[[gnu::noinline]] inline void widen_to(const void* rows, int64_t row_bytes, int num_rows, int num_units,
                                       uint32_t* out, int64_t pitch) {
#if OSTINATO_ISA >= 2
  __m512i columns[16];
  transpose_units(rows, row_bytes, num_rows, num_units, columns);
  const auto present = static_cast<__mmask16>((1u << num_rows) - 1);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c) {
    if (c < num_units) {
      _mm512_mask_storeu_epi32(out + 2 * c * pitch, present, _mm512_slli_epi32(columns[c], 16));
      _mm512_mask_storeu_epi32(out + (2 * c + 1) * pitch, present, _mm512_and_si512(columns[c], high));
    }
  }
#else
  for (int r = 0; r < num_rows; ++r) {
    const char* row = static_cast<const char*>(rows) + r * row_bytes;
    for (int c = 0; c < num_units; ++c) {
      uint32_t unit;
      std::memcpy(&unit, row + c * 4, 4);
      out[2 * c * pitch + r] = unit << 16;
      out[(2 * c + 1) * pitch + r] = unit & 0xffff0000u;
    }
  }
#endif
}

}  // namespace ostinato::linear
