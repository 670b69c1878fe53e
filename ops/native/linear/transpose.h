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

// out[c * pitch + r] = unit c of row r; rows lie `row_bytes` apart, at any alignment.
[[gnu::noinline]] inline void transpose_units(const void* rows, int64_t row_bytes, int num_rows, int64_t num_units,
                                              void* out, int64_t pitch) {
  constexpr int kBlock = F32::width;
  for (int64_t unit = 0; unit < num_units; unit += kBlock) {
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
