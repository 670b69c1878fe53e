// Arithmetic on 8 bytes at a time in 64-bit words, for the conversion of weights. Byte 0 is the lowest.
#pragma once

#include "core/simd.h"

#include <cstdint>

namespace ostinato::linear {

// The 8 nibbles (4-bit halves of bytes) of a word as 8 bytes, the lowest first.
OSTINATO_INLINE uint64_t spread_halves(uint32_t word) {
  uint64_t bytes = word;
  bytes = (bytes | bytes << 16) & 0x0000FFFF0000FFFFull;
  bytes = (bytes | bytes << 8) & 0x00FF00FF00FF00FFull;
  return (bytes | bytes << 4) & 0x0F0F0F0F0F0F0F0Full;
}

// Bytes 0 to 3 become the lower nibbles of 4 bytes, bytes 4 to 7 the upper nibbles.
OSTINATO_INLINE uint32_t join_halves(uint64_t bytes) {
  bytes &= 0x0F0F0F0F0F0F0F0Full;
  return static_cast<uint32_t>(bytes) | static_cast<uint32_t>(bytes >> 32) << 4;
}

// Transposes 8 rows of 8 bytes.
OSTINATO_INLINE void transpose_bytes(uint64_t (&rows)[8]) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t swap = (rows[i] >> 32 ^ rows[i + 4]) & 0x00000000FFFFFFFFull;
    rows[i] ^= swap << 32;
    rows[i + 4] ^= swap;
  }
  for (const int i : {0, 1, 4, 5}) {
    const uint64_t swap = (rows[i] >> 16 ^ rows[i + 2]) & 0x0000FFFF0000FFFFull;
    rows[i] ^= swap << 16;
    rows[i + 2] ^= swap;
  }
  for (int i = 0; i < 8; i += 2) {
    const uint64_t swap = (rows[i] >> 8 ^ rows[i + 1]) & 0x00FF00FF00FF00FFull;
    rows[i] ^= swap << 8;
    rows[i + 1] ^= swap;
  }
}

}  // namespace ostinato::linear
