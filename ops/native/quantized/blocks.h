// The blocks of GGUF files: how their integers lie in bytes. The layouts are those of ggml-quants.c.
#pragma once

#include "core/simd.h"
#include "linear/tasks.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ostinato::linear {

// Unpacks blocks `begin` to `end`, and adds `added` to each integer. A block has kBytes bytes and kValues integers. The
// low 4 bits of the integers begin at byte kLow: kChunk bytes hold kChunk integers in their low 4 bits, and the next
// kChunk integers in their high 4 bits. If kChunk is 0, the integers are bytes with a sign, to which 128 is added.
// Another kHighBits bits of each integer begin at byte kHigh. If kIsE2m1 is set, the 4 bits are floats, which become
// twice their value plus 12.
template <int kBytes, int kValues, int kLow, int kChunk, int kHigh, int kHighBits, bool kIsE2m1 = false>
void unpack(const uint8_t* blocks, int64_t begin, int64_t end, uint8_t added, uint8_t* out) {
  for (int64_t block = begin; block < end; ++block) {
    const uint8_t* source = blocks + block * kBytes;
    uint8_t* target = out + block * kValues;
    if constexpr (kChunk == 0) {
      for (int i = 0; i < kValues; ++i) target[i] = static_cast<uint8_t>(source[kLow + i] + 128 + added);
      continue;
    } else {
      uint8_t values[kValues];
      for (int first = 0; first < kValues / 2; first += kChunk) {
        for (int i = 0; i < kChunk; ++i) values[2 * first + i] = source[kLow + first + i] & 15;
        for (int i = 0; i < kChunk; ++i) values[2 * first + kChunk + i] = source[kLow + first + i] >> 4;
      }
      if constexpr (kHighBits == 1 && kValues == 32) {  // a bit for each value, the first in the lowest bit
        uint32_t bits;
        std::memcpy(&bits, source + kHigh, 4);
        for (int i = 0; i < 32; ++i) values[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
      } else if constexpr (kHighBits > 0) {  // the low bits of 32 bytes are of 32 values, the next bits of the next 32
        constexpr int kPlanes = 8 / kHighBits;
        for (int first = 0; first < kValues; first += 32) {
          const uint8_t* bits = source + kHigh + first / (32 * kPlanes) * 32;
          const int shift = first / 32 % kPlanes * kHighBits;
          for (int i = 0; i < 32; ++i) {
            values[first + i] |= static_cast<uint8_t>((bits[i] >> shift & ((1 << kHighBits) - 1)) << 4);
          }
        }
      }
      if constexpr (kIsE2m1) {  // kE2m1 of layout.h in arithmetic that compilers turn into vectors
        for (int i = 0; i < kValues; ++i) {
          const int8_t code = static_cast<int8_t>(values[i] & 7);
          const int8_t size = static_cast<int8_t>(code + (code > 4 ? code - 4 : 0) + (code == 7 ? 2 : 0));
          values[i] = static_cast<uint8_t>(12 + (values[i] > 7 ? -size : size));
        }
      }
      for (int i = 0; i < kValues; ++i) target[i] = static_cast<uint8_t>(values[i] + added);
    }
  }
}

// A type of blocks. `unpack` unpacks blocks `begin` to `end` and adds `added` to each integer.
struct BlockType {
  const char* name;
  int64_t bytes, values;
  void (*unpack)(const uint8_t* blocks, int64_t begin, int64_t end, uint8_t added, uint8_t* out);
};

constexpr BlockType kBlockTypes[] = {
    {"Q4_0", 18, 32, unpack<18, 32, 2, 16, 0, 0>},       {"Q4_1", 20, 32, unpack<20, 32, 4, 16, 0, 0>},
    {"Q5_0", 22, 32, unpack<22, 32, 6, 16, 2, 1>},       {"Q5_1", 24, 32, unpack<24, 32, 8, 16, 4, 1>},
    {"Q8_0", 34, 32, unpack<34, 32, 2, 0, 0, 0>},        {"Q4_K", 144, 256, unpack<144, 256, 16, 32, 0, 0>},
    {"Q5_K", 176, 256, unpack<176, 256, 48, 32, 16, 1>}, {"Q6_K", 210, 256, unpack<210, 256, 0, 64, 128, 2>},
    {"MXFP4", 17, 32, unpack<17, 32, 1, 16, 0, 0, true>},
};

// The type called `name`. Checks that `blocks` is a matrix of bytes with one block of this type in each row.
inline const BlockType& block_type(const std::string& name, const Tensor& blocks) {
  const BlockType* type = std::find_if(std::begin(kBlockTypes), std::end(kBlockTypes),
                                       [&](const BlockType& each) { return name == each.name; });
  OSTINATO_CHECK(type != std::end(kBlockTypes), "blocks of this type have no kernel");
  OSTINATO_CHECK(blocks.dtype == DType::uint8 && blocks.dim == 2 && blocks.sizes[1] == type->bytes &&
                     (blocks.sizes[0] <= 1 || blocks.strides[0] == type->bytes) && blocks.strides[1] == 1,
                 "blocks must be a contiguous matrix of bytes, one block a row");
  return *type;
}

}  // namespace ostinato::linear
