// The packed linear op for bfloat16 by matrix tiles (core/amx.h).
//
// In memory, 16 steps of a panel (two values of K each) are two tiles B side by side, whose rows of 16 columns are 128
// bytes apart. A tile A is 16 rows of activations with 32 values of K. One or two blocks of 16 rows are multiplied at a
// time, and two or four tiles C hold their sums. If more than two blocks share a panel, K is cut into passes
// (kPassTiles). A pass is computed for all blocks, so that its weights stay in the first level cache.
//
// Order of a sum: K is cut at multiples of 32. In each part, the products with even k are summed from zero in ascending
// order, and so are those with odd k. The two sums are added, and their sum is added to the result. Every step is
// rounded to float32, and subnormal numbers count as zeros. The sum contains no other row, so the bits of a row do not
// depend on other rows.
#pragma once

#include "core/amx.h"
#include "linear/tasks.h"

#include <type_traits>

namespace ostinato::linear {

constexpr int kPairRows = 2 * amx::kTileRows;  // of two blocks
constexpr int kTileSteps = 16;  // steps of two values of K
constexpr int64_t kTileValues = 2 * kTileSteps;
constexpr int kTileSize = kTileSteps * kPanel;             // four-byte units of a pair of tiles B
constexpr int64_t kTileGroupBytes = 1 << 20;  // packed activations of a group of rows: half of a 2 MiB cache
constexpr int64_t kPassTiles = 8;             // tiles of K at a time if a panel serves many blocks: 16 KiB

// The rows [0, rows) cut into blocks of one tile A each. All blocks except the last have the same height. Groups of
// blocks have nearly equal sizes.
struct TileBlocks {
  TileBlocks(int64_t rows, int64_t steps)
      : rows(rows),
        count(ceil_divide(rows, amx::kTileRows)),
        height(static_cast<int>(ceil_divide(rows, std::max<int64_t>(count, 1)))),
        tiles(ceil_divide(steps, kTileSteps)) {
    const int64_t pair_bytes = 2 * std::max<int64_t>(block_bytes(), 1);
    num_groups = ceil_divide(ceil_divide(count, 2), std::max<int64_t>(kTileGroupBytes / pair_bytes, 1));
  }
  int64_t num_blocks() const { return count; }
  int64_t block_bytes() const { return tiles * height * amx::kTileBytes; }
  int64_t first_block(int64_t group) const {  // pairs of blocks stay together
    return std::min(ceil_divide(count, 2) * group / num_groups * 2, count);
  }
  int64_t row(int64_t block) const { return std::min(block * height, rows); }
  int num_rows(int64_t block) const { return static_cast<int>(row(block + 1) - row(block)); }

  int64_t rows;
  int64_t count;
  int height;
  int64_t tiles;  // tiles along K
  int64_t num_groups;
};

// The addresses of a block's tiles A.
struct TileRows {
  const char* data;
  int64_t row_bytes;   // from row to row of a tile
  int64_t tile_bytes;  // from tile to tile of K
  int64_t block_bytes;
};

// Packs the rows of a group of blocks as tiles A. `row_at` returns the `in_features` values of a row. `row_at` may
// return the same memory each time, because the values are copied before the next call. Missing rows and values are
// zero.
template <class RowAt>
TileRows pack_tiles(const TileBlocks& blocks, int64_t group, int64_t in_features, const RowAt& row_at, char* packed) {
  const int64_t tile_bytes = blocks.height * amx::kTileBytes;
  const TileRows tiles{packed, amx::kTileBytes, tile_bytes, blocks.block_bytes()};
  const int64_t whole = in_features / kTileValues;
  const int64_t rest = in_features % kTileValues * 2;
  const int64_t last = blocks.first_block(group + 1);
  for (int64_t block = blocks.first_block(group); block < last; ++block, packed += tiles.block_bytes) {
    const int rows = blocks.num_rows(block);
    for (int r = 0; r < blocks.height; ++r) {
      char* target = packed + r * amx::kTileBytes;
      if (r >= rows) {
        for (int64_t tile = 0; tile < blocks.tiles; ++tile) std::memset(target + tile * tile_bytes, 0, amx::kTileBytes);
        continue;
      }
      const auto* row = reinterpret_cast<const char*>(row_at(blocks.row(block) + r));
      for (int64_t tile = 0; tile < whole; ++tile) {
        std::memcpy(target + tile * tile_bytes, row + tile * amx::kTileBytes, amx::kTileBytes);
      }
      if (rest > 0) {
        std::memset(target + whole * tile_bytes, 0, amx::kTileBytes);
        std::memcpy(target + whole * tile_bytes, row + whole * amx::kTileBytes, rest);
      }
    }
  }
  return tiles;
}

// Registers: 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
inline amx::TileShapes tile_shapes(int height) {
  amx::TileShapes shapes;
  shapes.set(0, 6, height, amx::kTileBytes);
  shapes.set(6, 8, kTileSteps, amx::kTileBytes);
  return shapes;
}

// C[2 b + v] += A[b] * B[v] for blocks b < kBlocks.
template <int kBlocks>
OSTINATO_INLINE void multiply_tiles(const TileRows& x, int64_t tile, const uint32_t* w) {
  const char* a = x.data + tile * x.tile_bytes;
  constexpr int64_t kStride = kPanel * 4;
  amx::load<6>(w, kStride);
  amx::load<4>(a, x.row_bytes);
  amx::multiply_bfloat16<0, 4, 6>();
  amx::load<7>(w + amx::kTileColumns, kStride);
  amx::multiply_bfloat16<1, 4, 7>();
  if constexpr (kBlocks == 2) {
    amx::load<5>(a + x.block_bytes, x.row_bytes);
    amx::multiply_bfloat16<2, 5, 6>();
    amx::multiply_bfloat16<3, 5, 7>();
  }
}

// Weights to fetch into the second level cache while a block is multiplied: lines [first, last) of each pair of tiles
// B.
struct Upcoming {
  const char* weight;  // null = nothing
  int64_t tile_bytes;  // from one pair of tiles to the next
  int first;
  int last;
};

// The pairs of tiles B of a packed panel.
struct PackedTiles {
  const uint32_t* units;
  const uint32_t* rest;  // the last pair, padded with zeros; null = there is none
  int64_t num_whole;     // pairs before it

  const uint32_t* operator()(int64_t tile) const { return tile == num_whole ? rest : units + tile * kTileSize; }
};

// sums [kBlocks * height][32] = x * w over tiles [first, last) of K, added to the values in `sums` unless `first` is 0.
// `w(tile)` returns a pair of tiles B.
template <int kBlocks, class Tiles>
void multiply_blocks(const TileRows& x, Tiles& w, int64_t first, int64_t last, const Upcoming& upcoming, int height,
                     float* sums) {
  constexpr int64_t kStride = kPanel * 4;
  float* below = sums + height * kPanel;
  if (first == 0) {
    amx::zero<0>();
    amx::zero<1>();
    if constexpr (kBlocks == 2) {
      amx::zero<2>();
      amx::zero<3>();
    }
  } else {
    amx::load<0>(sums, kStride);
    amx::load<1>(sums + amx::kTileColumns, kStride);
    if constexpr (kBlocks == 2) {
      amx::load<2>(below, kStride);
      amx::load<3>(below + amx::kTileColumns, kStride);
    }
  }
  for (int64_t tile = first; tile < last; ++tile) {
    if (upcoming.weight != nullptr) {
      const char* lines = upcoming.weight + tile * upcoming.tile_bytes;
      for (int line = upcoming.first; line < upcoming.last; ++line) __builtin_prefetch(lines + line * 64, 0, 2);
    }
    multiply_tiles<kBlocks>(x, tile, w(tile));
  }
  amx::store<0>(sums, kStride);
  amx::store<1>(sums + amx::kTileColumns, kStride);
  if constexpr (kBlocks == 2) {
    amx::store<2>(below, kStride);
    amx::store<3>(below + amx::kTileColumns, kStride);
  }
}

// Prefetches the lines of the result that a block will write. They are one row apart, so the hardware does not prefetch
// them.
template <class Out>
void fetch_output(const Problem& p, int64_t row, int64_t rows, int64_t column) {
  if (p.streams) return;
  const auto* out = static_cast<const Out*>(p.out) + column;
  for (int64_t r = row; r < row + rows; ++r) {
    const Out* place = out + p.out_row(r) * p.out_features;
    __builtin_prefetch(place, 1);
    if constexpr (sizeof(Out) == 4) __builtin_prefetch(place + 16, 1);
  }
  if (p.residual == nullptr) return;
  const auto* residual = static_cast<const Out*>(p.residual) + column;
  for (int64_t r = row; r < row + rows; ++r) __builtin_prefetch(residual + r * p.residual_stride);
}

// Gives the worker the tiles of a packed panel.
class PackedPanelTiles {
 public:
  using Weight = PackedWeight;

  static constexpr int64_t kTileStride = kTileSize * 4;  // bytes from one pair of tiles to the next
  static constexpr bool kOnceFetches = false;            // whether `once` prefetches by itself
  static const char* memory(const PackedWeight& weight, int64_t panel) {
    return reinterpret_cast<const char*>(weight.panel(panel));
  }

  PackedPanelTiles(const PackedWeight& weight, int64_t panel)
      : tiles_{weight.panel(panel), nullptr, ceil_divide(weight.steps, kTileSteps)} {
    if (const int64_t steps = weight.steps % kTileSteps; steps > 0) {
      --tiles_.num_whole;
      std::memset(rest_, 0, sizeof rest_);
      std::memcpy(rest_, tiles_.units + tiles_.num_whole * kTileSize, steps * kPanel * 4);
      tiles_.rest = rest_;
    }
  }

  // Tiles [first, last), each of which is read for every pair of blocks.
  PackedTiles many_times(int64_t, int64_t) const { return tiles_; }
  // All tiles, each of which is read once, in ascending order.
  PackedTiles once() const { return tiles_; }

 private:
  PackedTiles tiles_;
  alignas(64) uint32_t rest_[kTileSize];
};

template <class Out, class PanelTiles = PackedPanelTiles>
class TileWorker {
 public:
  using Weight = typename PanelTiles::Weight;

  TileWorker(const Problem& problem, const Weight& weight, const TileBlocks& blocks)
      : p_(problem), weight_(weight), blocks_(blocks), registers_(tile_shapes(blocks.height)) {}
  ~TileWorker() { fence_lines(); }

  void pack(int64_t group) {
    const int64_t first = blocks_.first_block(group);
    const int64_t last = blocks_.first_block(group + 1);
    const int64_t panel_sums = (last - first) * blocks_.height * kPanel;
    const int64_t num_sums = p_.gated == nullptr ? panel_sums : 2 * panel_sums;
    sums_ = scratch(num_sums + (last - first) * blocks_.block_bytes() / 4);
    factor_sums_ = sums_ + panel_sums;
    const auto* x = static_cast<const BFloat16*>(p_.x);
    if (p_.rows == 1 && p_.in_features % kTileValues == 0) {
      activations_ = {reinterpret_cast<const char*>(x), 0, amx::kTileBytes, 0};  // x already has the order of a tile
      return;
    }
    auto* packed = reinterpret_cast<char*>(sums_ + num_sums);
    const auto row_at = [&](int64_t row) { return x + row * p_.row_stride; };
    activations_ = pack_tiles(blocks_, group, p_.in_features, row_at, packed);
  }

  void multiply(int64_t group, int64_t panel) const {
    const int64_t column = panel * kPanel;
    const Range blocks{blocks_.first_block(group), blocks_.first_block(group + 1)};
    const int64_t next = panel + 1 < weight_.panels ? panel + 1 : -1;
    if (p_.gated == nullptr) {
      alignas(64) float bias[kPanel];
      load_bias<BFloat16>(p_, column, bias);
      multiply_panel(blocks, panel, next, sums_, column, [&](const float* sums, int rows, int64_t row) {
        write_rows<Out>(p_, sums, rows, bias, row, column);
      });
    } else if constexpr (std::is_same_v<Out, BFloat16>) {
      const int64_t factors = weight_.panels + panel;
      const GatedPanel<Out> gated(p_, column);
      multiply_panel(blocks, panel, factors, sums_, column, [](const float*, int, int64_t) {});
      multiply_panel(blocks, factors, next, factor_sums_, column, [&](const float* sums, int rows, int64_t row) {
        gated.write(sums_ + (sums - factor_sums_), sums, rows, row);
      });
    }
  }

 private:
  struct Range {
    int64_t first;
    int64_t last;
  };

  // Multiplies all blocks by a panel. Calls write(sums, rows, row) for one or two blocks at a time. Meanwhile the panel
  // `next` is prefetched, unless it is negative.
  template <class Write>
  void multiply_panel(Range blocks, int64_t panel, int64_t next, float* sums, int64_t column, const Write& write) const {
    PanelTiles tiles(weight_, panel);
    const char* upcoming = next < 0 ? nullptr : PanelTiles::memory(weight_, next);
    if (blocks.last - blocks.first <= 2) {
      auto all = tiles.once();
      const char* fetched = PanelTiles::kOnceFetches ? nullptr : upcoming;
      return multiply_part(blocks, all, fetched, sums, {0, blocks_.tiles}, column, write);
    }
    for (int64_t tile = 0; tile < blocks_.tiles; tile += kPassTiles) {
      const int64_t end = std::min(tile + kPassTiles, blocks_.tiles);
      auto some = tiles.many_times(tile, end);
      multiply_part(blocks, some, upcoming, sums, {tile, end}, column, write);
    }
  }

  // Multiplies some tiles of K for all blocks. After the last tiles, writes the result.
  template <class Tiles, class Write>
  void multiply_part(Range blocks, Tiles& weight, const char* next, float* sums, Range tiles, int64_t column,
                     const Write& write) const {
    constexpr int kLines = PanelTiles::kTileStride / 64;
    const bool is_last = tiles.last == blocks_.tiles;
    const auto pairs = static_cast<int>((blocks.last - blocks.first + 1) / 2);
    Upcoming upcoming{next, PanelTiles::kTileStride, 0, 0};
    TileRows x = activations_;
    for (int pair = 0; pair < pairs; ++pair, x.data += 2 * x.block_bytes, sums += 2 * blocks_.height * kPanel) {
      const int64_t block = blocks.first + 2 * pair;
      const int64_t end = std::min(block + 2, blocks.last);
      const int64_t row = blocks_.row(block);
      const int64_t rows = blocks_.row(end) - row;
      if (is_last) fetch_output<Out>(p_, row, rows, column);
      upcoming.first = kLines * pair / pairs;
      upcoming.last = kLines * (pair + 1) / pairs;
      if (end - block == 2) {
        multiply_blocks<2>(x, weight, tiles.first, tiles.last, upcoming, blocks_.height, sums);
      } else {
        multiply_blocks<1>(x, weight, tiles.first, tiles.last, upcoming, blocks_.height, sums);
      }
      if (is_last) write(sums, static_cast<int>(rows), row);
    }
  }

  const Problem& p_;
  const Weight& weight_;
  const TileBlocks& blocks_;
  const amx::TileScope registers_;
  TileRows activations_{};
  float* sums_ = nullptr;         // [rows of the group][32]
  float* factor_sums_ = nullptr;  // the same for the factors of a gated linear unit
};

template <class Out, class PanelTiles = PackedPanelTiles>
void run_tiles(const Problem& problem, const typename PanelTiles::Weight& weight) {
  run_panels<TileWorker<Out, PanelTiles>>(streamed<Out>(problem), weight, TileBlocks(problem.rows, weight.steps));
}

}  // namespace ostinato::linear
