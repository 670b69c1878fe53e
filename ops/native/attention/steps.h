// The multiply-accumulate step of the attention kernel, one struct for each type of the cache. A step multiplies four bytes
// of keys or values by a query or by the softmax's weights.
//
// A struct defines the elements of the cache and of the other operand, and how they are multiplied:
//   Step     four bytes of the cache, or one in a cache of 8 bits: `elements` of a key or a value
//   Factor   four bytes of a query or of the softmax's weights; kParts of them for each step
//   load<kPart>           part kPart of a vector of steps, as the multiplication takes it
//   load_first_8<kPart>   the same for 8 steps, which become the first lanes
//   load_halves<kPart>    the same for 8 steps at one address and 8 at another
// Parts are multiplied in order, so a sum runs over the elements in order.
#pragma once

#include "core/register_tiles.h"

#include <type_traits>

namespace ostinato::attention {

struct FloatStep {
  using Step = float;
  using Factor = float;
  static constexpr int elements = 1;
  static constexpr int kParts = 1;
  template <int>
  OSTINATO_INLINE static F32 load(const float* p) {
    return ostinato::load(p);
  }
  template <int>
  OSTINATO_INLINE static F32 load_first_8(const float* p) {
    return load_8(p);
  }
#if OSTINATO_ISA >= 2
  template <int>
  OSTINATO_INLINE static F32 load_halves(const float* low, const float* high) {
    return ostinato::load_halves(low, high);
  }
#endif
  OSTINATO_INLINE static F32 broadcast(const float* p) { return ostinato::broadcast(*p); }
  OSTINATO_INLINE static F32 without_odd(F32 x) { return x; }
  OSTINATO_INLINE static void accumulate(F32& sum, F32 a, F32 b) { sum = fma(a, b, sum); }
};

// Two bfloat16, the earlier one in the low half, widened to floats as they are loaded.
struct WideningStep {
  using Step = uint32_t;
  using Factor = float;
  static constexpr int elements = 2;
  static constexpr int kParts = 2;
  template <int kPart>
  OSTINATO_INLINE static F32 load(const uint32_t* p) {
    return widen<kPart>(ostinato::load(reinterpret_cast<const float*>(p)));
  }
  template <int kPart>
  OSTINATO_INLINE static F32 load_first_8(const uint32_t* p) {
    return widen<kPart>(load_8(reinterpret_cast<const float*>(p)));
  }
#if OSTINATO_ISA >= 2
  template <int kPart>
  OSTINATO_INLINE static F32 load_halves(const uint32_t* low, const uint32_t* high) {
    return widen<kPart>(
        ostinato::load_halves(reinterpret_cast<const float*>(low), reinterpret_cast<const float*>(high)));
  }
#endif
  OSTINATO_INLINE static F32 broadcast(const float* p) { return ostinato::broadcast(*p); }
  OSTINATO_INLINE static F32 without_odd(F32 x) { return x; }  // not called; clang++ wants it to exist
  OSTINATO_INLINE static void accumulate(F32& sum, F32 a, F32 b) { add_product(sum, a, b); }

 private:
  template <int kPart>
  OSTINATO_INLINE static F32 widen(F32 pairs) {
    return kPart == 0 ? low_of_pairs(pairs) : high_of_pairs(pairs);
  }
};

// One element of 8 bits, without its scale: softmax_block multiplies scores and weights by the scales.
struct ByteStep {
  using Step = int8_t;
  using Factor = float;
  static constexpr int elements = 1;
  static constexpr int kParts = 1;
  template <int>
  OSTINATO_INLINE static F32 load(const int8_t* p) {
    return ostinato::load(p);
  }
  template <int>
  OSTINATO_INLINE static F32 load_first_8(const int8_t* p) {
    return load_8(p);
  }
#if OSTINATO_ISA >= 2
  template <int>
  OSTINATO_INLINE static F32 load_halves(const int8_t* low, const int8_t* high) {
    return ostinato::load_halves(low, high);
  }
#endif
  OSTINATO_INLINE static F32 broadcast(const float* p) { return ostinato::broadcast(*p); }
  OSTINATO_INLINE static F32 without_odd(F32 x) { return x; }
  OSTINATO_INLINE static void accumulate(F32& sum, F32 a, F32 b) { sum = fma(a, b, sum); }
};

#if OSTINATO_ISA >= 3 && !OSTINATO_AMX
// Two bfloat16, the earlier one in the low half, multiplied and added by one instruction.
struct PairStep {
  using Step = uint32_t;
  using Factor = uint32_t;
  static constexpr int elements = 2;
  static constexpr int kParts = 1;
  template <int>
  OSTINATO_INLINE static __m512bh load(const uint32_t* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  template <int>
  OSTINATO_INLINE static __m512bh load_first_8(const uint32_t* p) {
    return (__m512bh)_mm512_maskz_loadu_epi32(0xff, p);
  }
  template <int>
  OSTINATO_INLINE static __m512bh load_halves(const uint32_t* low, const uint32_t* high) {
    return (__m512bh)ostinato::load_halves(reinterpret_cast<const float*>(low), reinterpret_cast<const float*>(high)).v;
  }
  OSTINATO_INLINE static __m512bh broadcast(const uint32_t* p) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*p));
  }
  // The later element of each pair becomes zero.
  OSTINATO_INLINE static __m512bh without_odd(__m512bh x) {
    return (__m512bh)_mm512_and_si512((__m512i)x, _mm512_set1_epi32(0xffff));
  }
  OSTINATO_INLINE static void accumulate(F32& sum, __m512bh a, __m512bh b) { sum.v = _mm512_dpbf16_ps(sum.v, a, b); }
};
#endif

// Calls run(part) with each part of a step as a constant.
template <class S, class Run>
OSTINATO_INLINE void for_parts(const Run& run) {
  run(std::integral_constant<int, 0>{});
  if constexpr (S::kParts == 2) run(std::integral_constant<int, 1>{});
}

// The number of factors for `num_elements` elements.
template <class S>
constexpr int num_factors(int num_elements) {
  return num_elements * S::kParts / S::elements;
}

}  // namespace ostinato::attention
