// The linear op over weights that are floats of 8 bits, by matrix tiles (core/amx.h), for bfloat16 activations and any
// number of rows.
//
// A group of a panel is widened to bfloat16 tiles B (float8.h), which stay in the first level cache. All blocks of rows
// are multiplied by it as in linear/amx_linear.h. With one block, the next tile is widened while the processor still
// computes the products of this one. The sums of a group are scaled and added to those of the earlier groups, in
// ascending order. So the bits of a row do not depend on other rows.
#pragma once

#include "linear/amx_linear.h"
#include "quantized/float8.h"

namespace ostinato::linear {

// Whether each group consists of whole tiles.
inline bool suits_float8_tiles(const QuantizedShape& shape) { return shape.format.group_size % kTileValues == 0; }

template <class Out>
class Float8TileWorker {
 public:
  Float8TileWorker(const Problem& problem, const QuantizedWeight& weight, const TileBlocks& blocks)
      : p_(problem), weight_(weight), blocks_(blocks), registers_(tile_shapes(blocks.height)) {}
  ~Float8TileWorker() { fence_lines(); }

  // The blocks of `rows` rows. A step of the weight is 4 values of K.
  static TileBlocks make_blocks(int64_t rows, const QuantizedShape& shape) { return {rows, 2 * shape.steps}; }

  void pack(int64_t group) {
    const int64_t count = blocks_.first_block(group + 1) - blocks_.first_block(group);
    const int64_t num_sums = count * blocks_.height * kPanel;
    const int64_t padded = weight_.steps * 4;
    const int64_t line_units = ceil_divide(padded * 2, 64) * 16;
    float* memory = scratch(num_sums + count * blocks_.block_bytes() / 4 + line_units + line_bytes<BFloat16>(p_) / 4);
    sums_ = memory;
    memory += num_sums;
    auto* packed = reinterpret_cast<char*>(memory);
    memory += count * blocks_.block_bytes() / 4;
    auto* line = reinterpret_cast<BFloat16*>(memory);
    auto* ordered = reinterpret_cast<BFloat16*>(memory + line_units);
    const auto row_at = [&](int64_t row) {
      copy_in_pairs(row_in_order(p_, row, ordered), p_.in_features, padded, line);
      return line;
    };
    activations_ = pack_tiles(blocks_, group, padded, row_at, packed);
  }

  void multiply(int64_t group, int64_t panel) const {
    const int64_t first = blocks_.first_block(group);
    const int64_t last = blocks_.first_block(group + 1);
    if (last - first == 1) {
      multiply_block(first, panel);
    } else {
      multiply_pairs(first, last, panel);
    }
  }

 private:
  // A step of a tile has two values of K, a step of the weight four.
  static constexpr int64_t kStepsPerTile = kTileSteps / 2;
  static constexpr int64_t kMaxTiles = 256 / kTileValues;  // of the largest group

  // A group of a panel.
  struct Group {
    const uint8_t* header;
    const uint8_t* values;
    int64_t steps;  // of 4 values of K
    int64_t tiles;
  };
  Group group_at(int64_t panel, int64_t number) const {
    const uint8_t* header = weight_.panel(panel) + weight_.group_offset(number);
    const int64_t steps = std::min(weight_.group_steps, weight_.steps - number * weight_.group_steps);
    return {header, header + weight_.format.header_bytes(), steps, ceil_divide(steps, kStepsPerTile)};
  }

  // Widens pairs of tiles B of a group. Values past K are zero.
  static void widen_tiles(const Group& group, int64_t first, int64_t count, uint32_t* tiles) {
    const int64_t steps = std::min(count * kStepsPerTile, group.steps - first * kStepsPerTile);
    widen_to_pairs(group.values + first * kStepsPerTile * 4 * kPanel, steps, tiles);
    if (steps < count * kStepsPerTile) {
      std::memset(tiles + steps * 2 * kPanel, 0, (count * kTileSize - steps * 2 * kPanel) * 4);
    }
  }

  // The products of one block. The tiles C of a group are stored after the first product of the next one, which has
  // other tiles C.
  void multiply_block(int64_t block, int64_t panel) const {
    alignas(64) uint32_t tiles[2][kTileSize];
    alignas(64) float bias[kPanel];
    const int64_t rows = blocks_.num_rows(block);
    load_bias<BFloat16>(p_, panel * kPanel, bias);
    const char* x = activations_.data;
    uint32_t* current = tiles[0];
    uint32_t* following = tiles[1];
    Group group = group_at(panel, 0);
    Group previous{};
    widen_tiles(group, 0, 1, current);
    for (int64_t number = 0; number < weight_.groups; ++number) {
      const bool is_last = number + 1 == weight_.groups;
      const Group next = is_last ? Group{} : group_at(panel, number + 1);
      for (int64_t tile = 0; tile < group.tiles; ++tile, x += activations_.tile_bytes) {
        if (tile + 1 < group.tiles) {
          widen_tiles(group, tile + 1, 1, following);
        } else if (!is_last) {
          widen_tiles(next, 0, 1, following);
        }
        if (number % 2 == 0) {
          add_tile<0>(x, current, tile == 0);
          if (tile == 0 && number > 0) add_group<2>(previous, rows, false);
        } else {
          add_tile<2>(x, current, tile == 0);
          if (tile == 0) add_group<0>(previous, rows, number == 1);
        }
        std::swap(current, following);
      }
      previous = group;
      group = next;
    }
    if (weight_.groups % 2 == 1) {
      add_group<0>(previous, rows, weight_.groups == 1);
    } else {
      add_group<2>(previous, rows, false);
    }
    write_rows<Out>(p_, sums_, static_cast<int>(rows), bias, blocks_.row(block), panel * kPanel);
  }

  // Adds a product to the tiles C and C + 1, or begins with it.
  template <int C>
  OSTINATO_INLINE void add_tile(const char* x, const uint32_t* tiles, bool is_first) const {
    if (is_first) {
      amx::zero<C>();
      amx::zero<C + 1>();
    }
    amx::load<6>(tiles, kPanel * 4);
    amx::load<4>(x, activations_.row_bytes);
    amx::multiply_bfloat16<C, 4, 6>();
    amx::load<7>(tiles + amx::kTileColumns, kPanel * 4);
    amx::multiply_bfloat16<C + 1, 4, 7>();
  }

  // Scales the sums of a group in the tiles C and C + 1, and adds them to those of the earlier groups.
  template <int C>
  OSTINATO_INLINE void add_group(const Group& group, int64_t rows, bool is_first) const {
    alignas(64) float part[amx::kTileRows * kPanel];
    alignas(64) float scales[kPanel];
    amx::store<C>(part, kPanel * 4);
    amx::store<C + 1>(part + amx::kTileColumns, kPanel * 4);
    load_scales(weight_.format, group.header, scales);
    add_scaled(part, scales, rows, is_first, sums_);
  }

  // The products of several blocks, two at a time. A group of the panel is widened for all of them.
  void multiply_pairs(int64_t first, int64_t last, int64_t panel) const {
    alignas(64) uint32_t tiles[kMaxTiles * kTileSize];
    alignas(64) float bias[kPanel];
    alignas(64) float scales[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<BFloat16>(p_, column, bias);
    TileRows x_of_group = activations_;
    for (int64_t number = 0; number < weight_.groups; ++number) {
      const bool is_last = number + 1 == weight_.groups;
      const Group group = group_at(panel, number);
      widen_tiles(group, 0, group.tiles, tiles);
      const PackedTiles pairs{tiles, nullptr, group.tiles};
      load_scales(weight_.format, group.header, scales);
      TileRows x = x_of_group;
      x_of_group.data += group.tiles * x.tile_bytes;
      float* sums = sums_;
      for (int64_t block = first; block < last; block += 2) {
        alignas(64) float part[kPairRows * kPanel];
        const int64_t end = std::min(block + 2, last);
        const int64_t row = blocks_.row(block);
        const int64_t rows = blocks_.row(end) - row;
        if (is_last) fetch_output<Out>(p_, row, rows, column);
        if (end - block == 2) {
          multiply_blocks<2>(x, pairs, 0, group.tiles, {}, blocks_.height, part);
        } else {
          multiply_blocks<1>(x, pairs, 0, group.tiles, {}, blocks_.height, part);
        }
        add_scaled(part, scales, rows, number == 0, sums);
        if (is_last) write_rows<Out>(p_, sums, static_cast<int>(rows), bias, row, column);
        x.data += 2 * x.block_bytes;
        sums += 2 * blocks_.height * kPanel;
      }
    }
  }

  const Problem& p_;
  const QuantizedWeight& weight_;
  const TileBlocks& blocks_;
  const amx::TileScope registers_;
  TileRows activations_{};
  float* sums_ = nullptr;  // [rows of the group][32]
};

template <class Out>
void run_float8_tiles(const Problem& problem, const QuantizedWeight& weight) {
  using Worker = Float8TileWorker<Out>;
  run_panels<Worker>(streamed<Out>(problem), weight, Worker::make_blocks(problem.rows, weight));
}

}  // namespace ostinato::linear
