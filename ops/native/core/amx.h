// Matrix tiles: AMX, the matrix unit of Intel processors since Sapphire Rapids.
//
// A thread has eight tile registers of up to 16 rows of 64 bytes. A product multiplies a tile A by a tile B and adds to
// a tile C. Tile A is [M][K]. A row of tile B is one step: four bytes of K (two bfloat16 or four 8-bit values) for each
// of 16 columns. Weights and keys are packed in this order. Tile C is [M][16] in float32 or int32.
//
// The macro OSTINATO_AMX is 1 for the processor's instructions. It is 2 for amx_emulation.h, which runs the same
// kernels on every machine, for tests. The instructions are written as assembly, because a compiler's intrinsics need
// the numbers of registers as literals.
//
// Linux enables the registers on request. ops/native/instruction_sets.py makes the request before it chooses this
// level.
#pragma once

#include "core/simd.h"

#if OSTINATO_AMX == 2
#include "core/amx_emulation.h"
#endif

#include <cstdint>
#include <cstring>

namespace ostinato::amx {

constexpr int kTileRows = 16;   // at most, of every tile
constexpr int kTileBytes = 64;  // the most bytes of a row
constexpr int kTileColumns = 16;  // columns of B and C

// The shapes of the registers, in the layout that the processor reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Registers [first, last) have `count` rows of `bytes`.
  void set(int first, int last, int count, int bytes) {
    for (int tile = first; tile < last; ++tile) {
      rows[tile] = static_cast<uint8_t>(count);
      row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
  }
};
static_assert(sizeof(TileShapes) == 64);

#if OSTINATO_AMX == 1

OSTINATO_INLINE void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
OSTINATO_INLINE void release() { asm volatile("tilerelease"); }

template <int T>
OSTINATO_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
// Rows lie `stride` bytes apart.
template <int T>
OSTINATO_INLINE void load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(T) : "memory");
}
template <int T>
OSTINATO_INLINE void store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(T) : "memory");
}
// C += A * B, where A and B are bfloat16 and C is float32
template <int C, int A, int B>
OSTINATO_INLINE void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// C += A * B, where A is int8, B is uint8 and C is int32
template <int C, int A, int B>
OSTINATO_INLINE void multiply_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// The same, where B is int8
template <int C, int A, int B>
OSTINATO_INLINE void multiply_signed_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

inline void configure(const TileShapes& shapes) { emulation::configure(shapes.rows, shapes.row_bytes); }
inline void release() { emulation::release(); }
template <int T>
void zero() {
  emulation::zero(T);
}
template <int T>
void load(const void* rows, int64_t stride) {
  emulation::load(T, rows, stride);
}
template <int T>
void store(void* rows, int64_t stride) {
  emulation::store(T, rows, stride);
}
template <int C, int A, int B>
void multiply_bfloat16() {
  emulation::multiply_bfloat16(C, A, B);
}
template <int C, int A, int B>
void multiply_bytes() {
  emulation::multiply_bytes<uint8_t>(C, A, B);
}
template <int C, int A, int B>
void multiply_signed_bytes() {
  emulation::multiply_bytes<int8_t>(C, A, B);
}

#endif

// Configures the calling thread's registers with these shapes, and releases them at the end of the scope. A context
// switch copies 8 KiB for a thread with configured registers, and nothing for a thread without.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes) { configure(shapes); }
  ~TileScope() { release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace ostinato::amx
