// The blocks of GGUF files: how their integers and scales lie in bytes. The layouts are those of ggml-quants.c.
#pragma once

#include "core/simd.h"
#include "linear/tasks.h"
#include "quantized/layout.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ostinato::linear {

// 16 bytes, in a register of the instruction set or in the compiler's own.
typedef uint8_t SixteenBytes __attribute__((vector_size(16)));
typedef uint64_t EightByteLanes __attribute__((vector_size(16)));  // for shifts: no processor shifts single bytes

OSTINATO_INLINE SixteenBytes load_sixteen(const void* p) {
  SixteenBytes x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
OSTINATO_INLINE void store_sixteen(uint8_t* p, SixteenBytes x) { std::memcpy(p, &x, sizeof(x)); }

// The `count` bits of each byte from bit `first` on.
OSTINATO_INLINE SixteenBytes bits_of(SixteenBytes x, int first, int count) {
  return (SixteenBytes)((EightByteLanes)x >> first) & static_cast<uint8_t>((1 << count) - 1);
}

// The bits of 16 successive values, the first in the lowest bit, as bytes of 16 or 0.
OSTINATO_INLINE SixteenBytes spread_bits(const uint8_t* bits) {
  constexpr uint64_t kOnes = 0x0101010101010101ull, kPlaces = 0x8040201008040201ull;
  const EightByteLanes pair = {bits[0] * kOnes & kPlaces, bits[1] * kOnes & kPlaces};
  return (SixteenBytes)((SixteenBytes)pair != 0) & 16;
}

// Twice each float of 4 bits, plus 12 (kE2m1 of layout.h).
OSTINATO_INLINE SixteenBytes widen_e2m1(SixteenBytes codes) {
#if OSTINATO_ISA >= 1
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return (SixteenBytes)_mm_shuffle_epi8(table, (__m128i)codes);
#else
  const SixteenBytes code = codes & 7;
  const SixteenBytes size = code + ((SixteenBytes)(code > 4) & (code - 4)) + ((SixteenBytes)(code == 7) & 2);
  const SixteenBytes is_negative = (SixteenBytes)(codes > 7);
  return 12 + ((size ^ is_negative) - is_negative);
#endif
}

// How the integers of a type of blocks lie in bytes. A block has kBytes bytes and kValues integers. The low 4 bits of
// the integers begin at byte kLow: kChunk bytes hold kChunk integers in their low 4 bits, and the next kChunk integers
// in their high 4 bits. If kChunk is 0, the integers are bytes with a sign, to which 128 is added. Another kHighBits
// bits of each integer begin at byte kHigh. If kIsE2m1 is set, the 4 bits are floats, which become twice their value
// plus 12.
template <int kBytes, int kValues, int kLow, int kChunk, int kHigh, int kHighBits, bool kIsE2m1 = false>
struct Integers {
  static constexpr int bytes = kBytes, values = kValues;

  // Unpacks blocks `begin` to `end`, and adds `added` to each integer.
  static void unpack(const uint8_t* blocks, int64_t begin, int64_t end, uint8_t added, uint8_t* out) {
    for (int64_t block = begin; block < end; ++block) {
      unpack_block(blocks + block * kBytes, added, out + block * kValues);
    }
  }

 private:
  // Adds what lies above the low 4 bits of the 16 integers from number `first` on, and `added`.
  OSTINATO_INLINE static SixteenBytes complete(const uint8_t* source, int first, SixteenBytes values, uint8_t added) {
    if constexpr (kIsE2m1) return widen_e2m1(values) + added;
    if constexpr (kHighBits == 1 && kValues == 32) values |= spread_bits(source + kHigh + first / 8);
    // The low bits of 32 bytes are of 32 values, the next bits of the next 32.
    if constexpr (kHighBits > 0 && kValues > 32) {
      constexpr int kPlanes = 8 / kHighBits;
      const SixteenBytes bytes = load_sixteen(source + kHigh + first / (32 * kPlanes) * 32 + first % 32);
      values |= (SixteenBytes)((EightByteLanes)bits_of(bytes, first / 32 % kPlanes * kHighBits, kHighBits) << 4);
    }
    return values + added;
  }

  OSTINATO_INLINE static void unpack_block(const uint8_t* source, uint8_t added, uint8_t* target) {
    if constexpr (kChunk == 0) {
      for (int i = 0; i < kValues; i += 16) store_sixteen(target + i, load_sixteen(source + kLow + i) + 128 + added);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kValues / 2; i += 16) {
        const SixteenBytes both = load_sixteen(source + kLow + i);
        const int low = i / kChunk * 2 * kChunk + i % kChunk, high = low + kChunk;
        store_sixteen(target + low, complete(source, low, both & 15, added));
        store_sixteen(target + high, complete(source, high, bits_of(both, 4, 4), added));
      }
    }
  }
};

OSTINATO_INLINE float half_at(const uint8_t* place) {
  Float16 half;
  std::memcpy(&half, place, sizeof(half));
  return to_float(half);
}

// One float16 scale at byte kScale of a block, and one shift, if any, at byte kShift. A shift is minus a minimum.
template <int kScale, int kShift = -1>
struct HalfFactors {
  static constexpr int groups = 1;
  static constexpr DType dtype = DType::float16;
  static constexpr bool has_minimums = kShift >= 0;

  static void read(const uint8_t* block, void* scales, void* minimums) {
    std::memcpy(scales, block + kScale, 2);
    if constexpr (has_minimums) {
      uint16_t shift;
      std::memcpy(&shift, block + kShift, 2);
      shift ^= 0x8000;
      std::memcpy(minimums, &shift, 2);
    }
  }
};

// Eight scales and eight minimums of 6 bits in 12 bytes, which multiply two float16 numbers (Q4_K, Q5_K).
struct KFactors {
  static constexpr int groups = 8;
  static constexpr DType dtype = DType::float32;
  static constexpr bool has_minimums = true;

  static void read(const uint8_t* block, void* scales, void* minimums) {
    constexpr uint32_t kSix = 0x3F3F3F3Fu, kLow = 0x0F0F0F0Fu, kHigh = 0x30303030u;
    uint32_t scale, least, rest;
    std::memcpy(&scale, block + 4, 4), std::memcpy(&least, block + 8, 4), std::memcpy(&rest, block + 12, 4);
    const uint32_t words[4] = {scale & kSix, (rest & kLow) | (scale >> 2 & kHigh), least & kSix,
                               (rest >> 4 & kLow) | (least >> 2 & kHigh)};
    uint8_t bytes[16];
    std::memcpy(bytes, words, sizeof(bytes));
    const float of_scales = half_at(block), of_minimums = half_at(block + 2);
    for (int i = 0; i < 8; ++i) static_cast<float*>(scales)[i] = of_scales * static_cast<float>(bytes[i]);
    for (int i = 0; i < 8; ++i) static_cast<float*>(minimums)[i] = of_minimums * static_cast<float>(bytes[8 + i]);
  }
};

// Sixteen scales of 8 bits with a sign, which multiply a float16 number (Q6_K).
struct ByteFactors {
  static constexpr int groups = 16;
  static constexpr DType dtype = DType::float32;
  static constexpr bool has_minimums = false;

  static void read(const uint8_t* block, void* scales, void*) {
    const float whole = half_at(block + 208);
    const auto* factors = reinterpret_cast<const int8_t*>(block + 192);
    for (int i = 0; i < 16; ++i) static_cast<float*>(scales)[i] = whole * static_cast<float>(factors[i]);
  }
};

// 2 ** (byte - 128), half the scale of MXFP4, whose integers are twice its floats.
struct PowerFactors {
  static constexpr int groups = 1;
  static constexpr DType dtype = DType::float32;
  static constexpr bool has_minimums = false;

  static void read(const uint8_t* block, void* scales, void*) {
    const uint32_t exponent = block[0];
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;  // the two least are subnormal
    std::memcpy(scales, &bits, 4);
  }
};

// A type of blocks.
struct BlockType {
  const char* name;
  int64_t bytes, values;
  // Unpacks blocks `begin` to `end`, and adds `added` to each integer.
  void (*unpack)(const uint8_t* blocks, int64_t begin, int64_t end, uint8_t added, uint8_t* out);
  // Reads the factors of successive blocks: [count][groups] scales, and as many minimums if the type has them.
  void (*read_factors)(const uint8_t* blocks, int64_t count, uint8_t* scales, uint8_t* minimums);
  int64_t groups;  // of a block
  DType factors;
  bool has_minimums;
};

template <class Values, class Scales>
constexpr BlockType make_block_type(const char* name) {
  const auto read_factors = [](const uint8_t* blocks, int64_t count, uint8_t* scales, uint8_t* minimums) {
    constexpr int64_t kSize = Scales::groups * (Scales::dtype == DType::float32 ? 4 : 2);
    for (int64_t i = 0; i < count; ++i) {
      Scales::read(blocks + i * Values::bytes, scales + i * kSize, minimums + i * kSize);
    }
  };
  return {name, Values::bytes, Values::values, Values::unpack, read_factors, Scales::groups, Scales::dtype,
          Scales::has_minimums};
}

constexpr BlockType kBlockTypes[] = {
    make_block_type<Integers<18, 32, 2, 16, 0, 0>, HalfFactors<0>>("Q4_0"),
    make_block_type<Integers<20, 32, 4, 16, 0, 0>, HalfFactors<0, 2>>("Q4_1"),
    make_block_type<Integers<22, 32, 6, 16, 2, 1>, HalfFactors<0>>("Q5_0"),
    make_block_type<Integers<24, 32, 8, 16, 4, 1>, HalfFactors<0, 2>>("Q5_1"),
    make_block_type<Integers<34, 32, 2, 0, 0, 0>, HalfFactors<0>>("Q8_0"),
    make_block_type<Integers<144, 256, 16, 32, 0, 0>, KFactors>("Q4_K"),
    make_block_type<Integers<176, 256, 48, 32, 16, 1>, KFactors>("Q5_K"),
    make_block_type<Integers<210, 256, 0, 64, 128, 2>, ByteFactors>("Q6_K"),
    make_block_type<Integers<17, 32, 1, 16, 0, 0, true>, PowerFactors>("MXFP4"),
};

// The type called `name`. Checks that `blocks` has `dim` dimensions, and one block of this type in the last of them.
inline const BlockType& block_type(const std::string& name, const Tensor& blocks, int dim) {
  const BlockType* type = std::find_if(std::begin(kBlockTypes), std::end(kBlockTypes),
                                       [&](const BlockType& each) { return name == each.name; });
  OSTINATO_CHECK(type != std::end(kBlockTypes), "blocks of this type have no kernel");
  OSTINATO_CHECK(blocks.dtype == DType::uint8 && blocks.dim == dim && is_contiguous(blocks) &&
                     blocks.sizes[dim - 1] == type->bytes,
                 "blocks must be contiguous bytes in ", dim, " dimensions, the last of which has the ", type->bytes,
                 " bytes of a block");
  return *type;
}

}  // namespace ostinato::linear
