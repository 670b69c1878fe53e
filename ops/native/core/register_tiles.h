// What register tiles need: sums that stay in registers, and pairs of bfloat16 as their operands.
//
// A tile has up to 12 sums with the 16 registers of AVX2, and up to 28 with the 32 of AVX-512. g++ 12 chooses forms of
// the multiply-add that move sums to other registers, and then keeps some of them in memory: 5 of 12 in a tile of
// bfloat16, which had two thirds of its present speed. So the instructions that decide it are written out here.
#pragma once

#include "core/simd.h"

namespace ostinato {

// sum += x * y, in the register of `sum`.
OSTINATO_INLINE void add_product(F32& sum, F32 x, F32 y) {
#if OSTINATO_ISA == 1 || OSTINATO_ISA == 2
  auto result = sum.v;
  asm("vfmadd231ps %2, %1, %0" : "+v"(result) : "v"(x.v), "v"(y.v));
  sum.v = result;
#else
  sum = fma(x, y, sum);
#endif
}

// Each lane holds two bfloat16: the earlier in its low half, the later in its high half. These functions return one of
// the two as floats.
OSTINATO_INLINE F32 low_of_pairs(F32 pairs) {
#if OSTINATO_ISA >= 2
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))};
#elif OSTINATO_ISA == 1
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.v), 16))};
#else
  return {(FloatLanes)((UintLanes)pairs.v << 16)};
#endif
}
#if OSTINATO_ISA == 1
alignas(32) constexpr uint32_t kHighHalves[] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
#endif
OSTINATO_INLINE F32 high_of_pairs(F32 pairs) {
#if OSTINATO_ISA >= 2
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#elif OSTINATO_ISA == 1
  __m256 high = pairs.v;
  asm("vandps %1, %0, %0" : "+x"(high) : "m"(kHighHalves));  // so the mask takes no register
  return {high};
#else
  return {(FloatLanes)((UintLanes)pairs.v & 0xffff0000u)};
#endif
}

// The inverse: `low` and `high` are bfloat16 widened to floats.
OSTINATO_INLINE F32 pair_up(F32 low, F32 high) {
#if OSTINATO_ISA >= 2
  return {_mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(high.v), _mm512_srli_epi32(_mm512_castps_si512(low.v), 16)))};
#elif OSTINATO_ISA == 1
  return {_mm256_castsi256_ps(
      _mm256_or_si256(_mm256_castps_si256(high.v), _mm256_srli_epi32(_mm256_castps_si256(low.v), 16)))};
#else
  return {(FloatLanes)((UintLanes)high.v | ((UintLanes)low.v >> 16))};
#endif
}

}  // namespace ostinato
