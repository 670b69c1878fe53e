// Register tiles of the quantised linear op: a few rows of 8-bit activations times one panel of quantised weights.
//
// The sum of a group of K is exact (products.h). It is scaled and added to the result's float32 accumulator, groups in
// ascending order. So the bits of a row do not depend on other rows.
#pragma once

#include "quantized/products.h"

#include <array>
#include <utility>

namespace ostinato::linear {

// A block of quantised activations as tiles read it; R rows.
struct QuantizedRows {
  const uint32_t* units;  // [steps * quant_units][R]
  const float* scales;    // [groups][R]
  const float* sums;      // [groups][R], minus the sum of the group's values
};

// Weights that a tile prefetches while it is computed. For each group, and each range of columns that is summed
// together, the tile prefetches `per_group` bytes. They begin at `begin + column * per_column + group * per_group`,
// where `column` is the first column of the range.
struct GroupFetch {
  // All blocks of rows of activations are multiplied by the same weights, one block after another. Meanwhile each block
  // prefetches a share of the weights that come afterwards. Returns the share of block number `block` of `blocks`.
  // `next` and `bytes` are these weights. The weights that are multiplied now have `groups` groups.
  static GroupFetch share(const uint8_t* next, int64_t bytes, int64_t groups, int64_t block, int64_t blocks, int rows) {
    const int64_t share = bytes / blocks;
    const int64_t columns = quant_vectors(rows) * F32::width;
    return {next + share * block, ceil_divide(share * columns, kPanel * groups), share / kPanel};
  }

  const uint8_t* begin;
  int64_t per_group;   // 0 = nothing
  int64_t per_column;
};

// sums[R][32] = x[groups][R] * w[groups][32], where all groups together have `steps` steps. The last group may be
// shorter. When `added` is set, the products are added to `sums` instead.
template <Widening Bits, int R>
void quantized_tile(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape, float* sums,
                    bool added, const GroupFetch& fetch) {
  constexpr int V = quant_vectors(R);
  const QuantFormat& format = shape.format;
  for (int column = 0; column < kPanel; column += V * F32::width) {
    const uint32_t* units = x.units;
    const uint8_t* panel = w;
    const uint8_t* fetched = fetch.begin + column * fetch.per_column;
    bool add_before = added;
    int64_t group = 0;
    for (int64_t done = 0; done < steps; done += shape.group_steps, ++group) {
      const int64_t count = std::min(shape.group_steps, steps - done);
      const uint8_t* data = panel + format.header_bytes() + column * 4;
      const float* row_scales = x.scales + group * R;
      const float* row_sums = x.sums + group * R;
      for (int64_t byte = 0; byte < fetch.per_group; byte += 64) __builtin_prefetch(fetched + byte);
      fetched += fetch.per_group;
      F32 whole[R][V];
      sum_group<Bits>(units, data, count, whole);
      units += count * quant_units(Bits) * R;
      const auto factors = make_factors<V>(format, panel, column);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 row_scale = broadcast(row_scales[r]);
        const F32 minus_sum = broadcast(row_sums[r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          float* target = sums + r * kPanel + column + v * F32::width;
          const F32 before = add_before ? load(target) : broadcast(0.0f);
          store(target, factors[v].add_product(format.has_minimums, whole[r][v], row_scale, minus_sum, before));
        }
      }
      add_before = true;
      panel += format.header_bytes() + count * format.step_bytes();
    }
  }
}

using QuantizedTile = void (*)(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape,
                               float* sums, bool added, const GroupFetch& fetch);

template <Widening Bits, int... R>
constexpr std::array<QuantizedTile, sizeof...(R)> make_quantized_tiles(std::integer_sequence<int, R...>) {
  return {&quantized_tile<Bits, R + 1>...};
}

// The tile of R rows is at index R - 1.
template <Widening Bits>
constexpr std::array<QuantizedTile, kQuantRows> kQuantizedTiles =
    make_quantized_tiles<Bits>(std::make_integer_sequence<int, kQuantRows>{});

}  // namespace ostinato::linear
