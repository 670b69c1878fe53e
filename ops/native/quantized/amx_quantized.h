// The linear op over quantised weights by matrix tiles (core/amx.h), for steps of many rows.
//
// Within a group of K the sums are whole numbers and exact, and a group's sum is scaled and added by the expressions of
// tiles.h. So the bits are those of tiles.h, which computes steps of few rows.
//
// A chunk is up to 64 values of K of one group: a tile A of 16 rows, and two tiles B of 16 columns each. Weights of 4 bits
// are unpacked once for all rows that a panel is multiplied by.
#pragma once

#include "linear/amx_linear.h"
#include "quantized/activations.h"
#include "quantized/layout.h"

namespace ostinato::linear {

constexpr int kBlockSums = amx::kTileRows * kPanel;

inline int64_t chunk_steps(const QuantizedShape& shape) { return std::min<int64_t>(shape.group_steps, kTileSteps); }

// Whether matrix tiles are faster for this number of rows. They need groups of whole chunks. With short groups the
// scaling takes longer than the products. Weights of 4 bits have to be unpacked first.
inline bool suits_tiles(const QuantizedShape& shape, int64_t rows) {
  const int64_t least_rows = shape.format.bits == 8 ? 8 : 48;
  return rows >= least_rows && shape.format.group_size >= 64 && shape.group_steps % chunk_steps(shape) == 0;
}

template <Widening Bits, class In, class Out>
class QuantizedTileWorker {
 public:
  QuantizedTileWorker(const Problem& problem, const QuantizedWeight& weight, const TileBlocks& blocks)
      : p_(problem),
        weight_(weight),
        blocks_(blocks),
        chunk_(chunk_steps(weight)),
        chunks_(weight.group_steps / chunk_),
        steps_(weight.groups * weight.group_steps),
        registers_(shapes(blocks.height, static_cast<int>(chunk_))) {}
  ~QuantizedTileWorker() { fence_lines(); }

  void operator()(int64_t task) {
    const int64_t group = task / weight_.panels;
    if (group != packed_group_) pack(group);
    multiply(group, task % weight_.panels);
  }

 private:
  static amx::TileShapes shapes(int height, int chunk) {
    amx::TileShapes shapes;
    shapes.set(0, 4, height, amx::kTileBytes);
    shapes.set(4, 6, height, chunk * 4);
    shapes.set(6, 8, chunk, amx::kTileBytes);
    return shapes;
  }

  int64_t block_values() const { return steps_ * 4 * blocks_.height; }  // bytes
  int64_t block_factors() const { return weight_.groups * blocks_.height; }

  // Packs every block: values [chunks of K][rows][4 * chunk], scales and sums [groups][rows]. Missing rows are zero.
  void pack(int64_t group) {
    packed_group_ = group;
    const int64_t first = blocks_.first_block(group);
    const int64_t count = blocks_.first_block(group + 1) - first;
    const int64_t panel_bytes = steps_ * 4 * kPanel;
    const int64_t row_bytes = ceil_divide(steps_ * 4 + 64, 64) * 64;  // whole vectors are written
    const int64_t value_bytes = ceil_divide(count * block_values(), 64) * 64;
    const int64_t bytes = line_bytes<In>(p_) + panel_bytes + row_bytes + value_bytes;
    float* memory = scratch(bytes / 4 + 2 * count * block_factors());
    auto* ordered = reinterpret_cast<In*>(memory);
    memory += line_bytes<In>(p_) / 4;
    panel_ = reinterpret_cast<uint8_t*>(memory);
    auto* line = reinterpret_cast<int8_t*>(panel_ + panel_bytes);
    values_ = line + row_bytes;
    scales_ = memory + (panel_bytes + row_bytes + value_bytes) / 4;
    sums_ = scales_ + count * block_factors();
    std::memset(values_, 0, value_bytes);
    std::memset(scales_, 0, 2 * count * block_factors() * sizeof(float));
    const int64_t size = weight_.format.group_size;
    for (int64_t b = 0; b < count; ++b) {
      for (int r = 0; r < blocks_.num_rows(first + b); ++r) {
        const In* x = row_in_order(p_, blocks_.row(first + b) + r, ordered);
        for (int64_t g = 0; g < weight_.groups; ++g) {
          const int64_t begin = g * size;
          const int64_t present = std::min(size, p_.in_features - begin);
          const int64_t padded = std::min(size, weight_.steps * 4 - begin);
          const int64_t factor = b * block_factors() + g * blocks_.height + r;
          sums_[factor] = quantize_group(x + begin, present, padded, line, scales_ + factor);
          if (padded < size) std::memset(line + padded, 0, size - padded);
          for (int64_t c = 0; c < chunks_; ++c) {
            const int64_t tile = (g * chunks_ + c) * blocks_.height + r;
            std::memcpy(values_ + b * block_values() + tile * chunk_ * 4, line + c * chunk_ * 4, chunk_ * 4);
          }
        }
      }
    }
  }

  // The bytes of a panel's group as tiles B, [steps][32 columns][4]. Weights of 8 bits are not copied, those of 4 bits
  // are unpacked.
  const uint8_t* tiles_of(const uint8_t* panel, int64_t group) const {
    const uint8_t* data = panel + weight_.group_offset(group) + weight_.format.header_bytes();
    const int64_t steps = std::min(weight_.group_steps, weight_.steps - group * weight_.group_steps);
    if (Bits == kBytes && steps == weight_.group_steps) return data;
    uint8_t* out = panel_ + group * weight_.group_steps * 4 * kPanel;
    if (Bits == kBytes) {
      std::memcpy(out, data, steps * 4 * kPanel);
    } else {
      for (int64_t step = 0; step < steps; step += 2) {
        for (int byte = 0; byte < 4 * kPanel; byte += 8) {
          constexpr uint64_t kLowHalves = 0x0f0f0f0f0f0f0f0f;
          uint64_t both;
          std::memcpy(&both, data + step / 2 * 4 * kPanel + byte, 8);
          const uint64_t low = both & kLowHalves;
          const uint64_t high = both >> 4 & kLowHalves;
          std::memcpy(out + step * 4 * kPanel + byte, &low, 8);
          std::memcpy(out + (step + 1) * 4 * kPanel + byte, &high, 8);
        }
      }
    }
    if (Bits == kTable) {
      for (int64_t byte = 0; byte < steps * 4 * kPanel; ++byte) out[byte] = kE2m1[out[byte]];
    }
    std::memset(out + steps * 4 * kPanel, 0, (weight_.group_steps - steps) * 4 * kPanel);
    return out;
  }

  void multiply(int64_t group, int64_t panel) {
    alignas(64) float bias[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<In>(p_, column, bias);
    const uint8_t* weight = weight_.panel(panel);
    const int64_t first = blocks_.first_block(group);
    const int64_t last = blocks_.first_block(group + 1);
    tiles_.resize(weight_.groups);
    for (int64_t g = 0; g < weight_.groups; ++g) tiles_[g] = tiles_of(weight, g);
    for (int64_t block = first; block < last; block += 2) {
      alignas(64) float sums[2 * kBlockSums] = {};
      if (block + 1 < last) {
        multiply_blocks<2>(block - first, weight, sums);
      } else {
        multiply_blocks<1>(block - first, weight, sums);
      }
      const int64_t row = blocks_.row(block);
      const int64_t rows = blocks_.row(std::min(block + 2, last)) - row;
      write_rows<Out>(p_, sums, static_cast<int>(rows), bias, row, column);
    }
  }

  template <int kBlocks>
  void multiply_blocks(int64_t block, const uint8_t* weight, float* sums) {
    constexpr int64_t kStride = kPanel * 4;
    // two, used in turn, because reading what a tile has just stored is slow
    alignas(64) int32_t whole[2][2 * kBlockSums];
    const int height = blocks_.height;
    for (int64_t g = 0; g < weight_.groups; ++g) {
      amx::zero<0>();
      amx::zero<1>();
      if constexpr (kBlocks == 2) {
        amx::zero<2>();
        amx::zero<3>();
      }
      for (int64_t c = 0; c < chunks_; ++c) {
        const int8_t* a = values_ + block * block_values() + (g * chunks_ + c) * height * chunk_ * 4;
        const uint8_t* b = tiles_[g] + c * chunk_ * kStride;
        amx::load<4>(a, chunk_ * 4);
        amx::load<6>(b, kStride);
        amx::multiply_bytes<0, 4, 6>();
        amx::load<7>(b + amx::kTileBytes, kStride);
        amx::multiply_bytes<1, 4, 7>();
        if constexpr (kBlocks == 2) {
          amx::load<5>(a + block_values(), chunk_ * 4);
          amx::multiply_bytes<2, 5, 6>();
          amx::multiply_bytes<3, 5, 7>();
        }
      }
      int32_t* exact = whole[g % 2];
      amx::store<0>(exact, kStride);
      amx::store<1>(exact + amx::kTileColumns, kStride);
      if constexpr (kBlocks == 2) {
        amx::store<2>(exact + height * kPanel, kStride);
        amx::store<3>(exact + height * kPanel + amx::kTileColumns, kStride);
      }
      if (g > 0) add_group<kBlocks>(block, g - 1, weight, whole[(g - 1) % 2], sums);
    }
    add_group<kBlocks>(block, weight_.groups - 1, weight, whole[(weight_.groups - 1) % 2], sums);
  }

  // sums [rows][32] += (whole - zero points * sums of the rows) * scales, as in tiles.h.
  template <int kBlocks>
  void add_group(int64_t block, int64_t group, const uint8_t* panel, const int32_t* whole, float* sums) const {
    constexpr int kVectors = kPanel / F32::width;
    const uint8_t* header = panel + weight_.group_offset(group);
    const QuantFormat& format = weight_.format;
    const auto factors = make_factors<kVectors>(format, header, 0);
    const int height = blocks_.height;
    for (int b = 0; b < kBlocks; ++b) {
      const float* row_scales = scales_ + (block + b) * block_factors() + group * height;
      const float* row_sums = sums_ + (block + b) * block_factors() + group * height;
      for (int r = 0; r < height; ++r, whole += kPanel, sums += kPanel) {
        const F32 row_scale = broadcast(row_scales[r]);
        const F32 minus_sum = broadcast(-row_sums[r]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          float* target = sums + v * F32::width;
          store(target, factors[v].add_product(format.has_minimums, load_whole(whole + v * F32::width), row_scale, minus_sum,
                                               load(target)));
        }
      }
    }
  }

  static F32 load_whole(const int32_t* p) {
#if OSTINATO_ISA >= 2
    return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
#elif OSTINATO_ISA == 1
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#else
    F32 x;
    for (int i = 0; i < F32::width; ++i) x.v[i] = static_cast<float>(p[i]);
    return x;
#endif
  }

  const Problem& p_;
  const QuantizedWeight& weight_;
  const TileBlocks& blocks_;
  const int64_t chunk_;   // steps of a tile
  const int64_t chunks_;  // chunks of a group
  const int64_t steps_;   // steps of all groups, as if the last one were not shorter
  const amx::TileScope registers_;
  int64_t packed_group_ = -1;
  uint8_t* panel_ = nullptr;
  int8_t* values_ = nullptr;
  float* scales_ = nullptr;
  float* sums_ = nullptr;
  std::vector<const uint8_t*> tiles_;  // the tiles of each group of the panel
};

template <Widening Bits, class In, class Out>
void run_quantized_tiles(const Problem& problem, const QuantizedWeight& weight) {
  const TileBlocks blocks(problem.rows, weight.groups * weight.group_steps);
  const Problem call = streamed<Out>(problem);
  for_each_panel(call.threads, blocks.groups * weight.panels, weight.bytes(), blocks.count,
                 [&] { return QuantizedTileWorker<Bits, In, Out>(call, weight, blocks); });
}

}  // namespace ostinato::linear
