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
  const Start* starts;    // [groups][R], the offset of symmetric weights times minus the sum; else 0
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

  // The weights `kBytesAhead` after those that are multiplied, for a tile whose columns are one range. With AVX-512, a
  // tile of several rows has so many instructions for a line of weights that the processor by itself reaches the next
  // lines too late. With AVX2, tiles of one or two rows of 4-bit weights do.
  static GroupFetch ahead(const uint8_t* w, int64_t group_bytes) { return {w + kBytesAhead, group_bytes, 0}; }

  static constexpr int64_t kBytesAhead = OSTINATO_ISA >= 2 ? 6 << 10 : 1 << 10;
  // The second level cache, or with AVX2 the first: there, shares are multiplied faster from the first.
  static constexpr int kLocality = OSTINATO_ISA >= 2 ? 2 : 3;

  const uint8_t* begin;
  int64_t per_group;   // 0 = nothing
  int64_t per_column;
};

// sums[R][32] += x[groups][R] * w[groups][32], where all groups together have `steps` steps. The last group may be
// shorter.
template <Widening Bits, int R>
void quantized_tile(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape, float* sums,
                    const GroupFetch& fetch) {
  constexpr int V = quant_vectors(R);
  const QuantFormat& format = shape.format;
  const bool is_symmetric = format.symmetric;
  const bool has_minimums = format.has_minimums;
  const auto offset = static_cast<float>(format.offset());
  const int64_t header_bytes = format.header_bytes();
  for (int column = 0; column < kPanel; column += V * F32::width) {
    const uint32_t* units = x.units;
    const uint8_t* panel = w;
    const uint8_t* fetched = fetch.begin + column * fetch.per_column;
    int64_t group = 0;
    for (int64_t done = 0; done < steps; done += shape.group_steps, ++group) {
      const int64_t count = std::min(shape.group_steps, steps - done);
      const uint8_t* data = panel + header_bytes + column * 4;
      const float* row_scales = x.scales + group * R;
      const float* row_sums = x.sums + group * R;
      for (int64_t byte = 0; byte < fetch.per_group; byte += 64) __builtin_prefetch(fetched + byte, 0, GroupFetch::kLocality);
      fetched += fetch.per_group;
      F32 whole[R][V];
      sum_group<Bits>(units, data, count, x.starts + group * R, whole);
      units += count * quant_units(Bits) * R;
      // The expressions of `Factors::add_product`. All formats share the loop that adds products to the sums. With such
      // a loop in each of two branches, compilers would move their common part before the branch, and run out of
      // registers. Minimums are subtracted by a loop of their own.
      F32 scales[V];
      F32 zeros[V];
      load_factors(format, panel, column, scales);
      if (!is_symmetric) load_factors(format, panel, kPanel + column, zeros);
      if (!is_symmetric && !has_minimums) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            whole[r][v] = fma(zeros[v] + broadcast(offset), broadcast(row_sums[r]), whole[r][v]);
          }
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          float* target = sums + r * kPanel + column + v * F32::width;
          store(target, fma(whole[r][v], scales[v] * broadcast(row_scales[r]), load(target)));
        }
      }
      if (has_minimums) {
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            float* target = sums + r * kPanel + column + v * F32::width;
            store(target, fma(zeros[v] * broadcast(row_scales[r]), broadcast(row_sums[r]), load(target)));
          }
        }
      }
      panel += header_bytes + count * format.step_bytes();
    }
  }
}

using QuantizedTile = void (*)(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape,
                               float* sums, const GroupFetch& fetch);

template <Widening Bits, int... R>
constexpr std::array<QuantizedTile, sizeof...(R)> make_quantized_tiles(std::integer_sequence<int, R...>) {
  return {&quantized_tile<Bits, R + 1>...};
}

// The tile of R rows is at index R - 1.
template <Widening Bits>
constexpr std::array<QuantizedTile, kQuantRows> kQuantizedTiles =
    make_quantized_tiles<Bits>(std::make_integer_sequence<int, kQuantRows>{});

}  // namespace ostinato::linear
