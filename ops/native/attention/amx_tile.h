// One tile of bfloat16 attention by matrix tiles (core/amx.h): up to 64 keys and values against blocks of 16 query rows.
//
// A group of the cache holds the keys of 16 tokens as tiles B (core/amx.h): 16 steps of two dimensions are 1 KiB. A
// group of values also has 16 tokens, as 8 rows of pairs. A tile B of values needs 32 tokens, that is two groups, which
// can lie in two blocks. So the values are first copied side by side. Values past the end of the context become zeros.
//
// Order of sums: a score is summed over the dimensions, an output over the tile's 64 keys. Both are summed in parts of 32,
// as amx_linear.h describes. The sums of a row contain no other row.
#pragma once

#include "attention/query_tiles.h"
#include "core/amx.h"

#include <algorithm>
#include <utility>

namespace ostinato::attention {

constexpr int kUnits = 16;                               // units of two elements in a row of a tile A
constexpr int kKeyVectors = kTile / amx::kTileColumns;  // tiles B side by side
constexpr int kLinesPerProduct = 4;                      // lines of four groups that are prefetched

struct TileLayout {
  using Element = BFloat16;
  struct Multiply {
    using Step = uint32_t;
    using Factor = uint32_t;
    static constexpr int elements = 2;
    static constexpr int kParts = 1;
  };
  using Unit = uint32_t;
  static constexpr bool kWidens = false;
  static constexpr bool kHasMatrixTiles = true;
  static constexpr int kRows = amx::kTileRows;  // rows of a block

  static void queries(const BFloat16* row, int head_dim, uint32_t* out) {
    std::memcpy(out, row, head_dim * sizeof(BFloat16));
  }

  OSTINATO_INLINE static void weights(const F32* p, uint32_t* out) {
    for (int i = 0; i < kTile / kWidth; ++i) store(reinterpret_cast<BFloat16*>(out) + i * kWidth, p[i]);
  }
};

// The tile registers of one worker. Registers 0 to 3 hold tiles C, 4 a tile A and 5 a tile B. The last dimensions of a
// score can be fewer than a tile holds. For them, 6 holds A and 7 holds B.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (rows_ > 0) amx::release();
  }

  // Sets the shapes of the registers for blocks of `rows` rows, and keys of `units` units of four bytes.
  void shape(int rows, int units) {
    if (rows == rows_) return;
    rows_ = rows;
    const int rest = units % kUnits;
    amx::TileShapes shapes;
    shapes.set(0, 5, rows, amx::kTileBytes);
    shapes.set(5, 6, kUnits, amx::kTileBytes);
    if (rest > 0) {
      shapes.set(6, 7, rows, rest * 4);
      shapes.set(7, 8, rest, amx::kTileBytes);
    }
    amx::configure(shapes);
  }

 private:
  int rows_ = 0;
};

// Calls run(index) with each constant below kCount.
template <int kCount, class Run>
OSTINATO_INLINE void for_tiles(const Run& run) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (run(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Calls run(count) with the constant `count`, 1 to 4.
template <class Run>
OSTINATO_INLINE void with_tiles(int count, const Run& run) {
  if (count == 1) run(std::integral_constant<int, 1>{});
  if (count == 2) run(std::integral_constant<int, 2>{});
  if (count == 3) run(std::integral_constant<int, 3>{});
  if (count == 4) run(std::integral_constant<int, 4>{});
}

// Prefetches the keys and the values of tiles in the order in which they are read, a line of each of four groups in turn:
// several streams of memory are faster than one. Matrix products and loops call it, because a core waits if it asks for
// many lines at once.
class GroupPrefetch {
 public:
  explicit GroupPrefetch(int groups_per_tile) : num_groups_(groups_per_tile) {}

  // Adds the keys or the values of a tile: pointers to groups of `bytes`, scales included. The pointers must live as long
  // as this object.
  template <class Unit>
  void add(const Unit* const* groups, int64_t bytes) {
    for (int i = 0; i < num_groups_; i += 4) {
      streams_[num_streams_++] = {groups + i, bytes};
    }
  }

  // Prefetches the next `count` lines of four groups each, if there are some.
  OSTINATO_INLINE void lines(int count) {
    for (; count > 0 && stream_ < num_streams_; --count) {
      const Stream& stream = streams_[stream_];
      const char* groups[4];
      std::memcpy(groups, stream.groups, sizeof groups);  // the pointers have another type
      for (int i = 0; i < 4; ++i) __builtin_prefetch(groups[i] + offset_, 0, 2);
      offset_ += 64;
      if (offset_ >= stream.bytes) {
        offset_ = 0;
        ++stream_;
      }
    }
  }

 private:
  struct Stream {
    const void* groups;  // four pointers
    int64_t bytes;
  };
  Stream streams_[2 * kPartition / kMinGroup / 4];
  const int num_groups_;  // of a tile
  int num_streams_ = 0;
  int stream_ = 0;
  int64_t offset_ = 0;
};

// scores [rows][kTile] = queries [rows][units] times kVectors tiles of 16 keys, [units][16] each.
template <int kVectors>
void score_tiles(const uint32_t* queries, int units, const uint32_t* const* keys, float* scores,
                 GroupPrefetch& prefetch) {
  const int64_t row_bytes = units * 4;
  for_tiles<kVectors>([](auto v) { amx::zero<v>(); });
  int unit = 0;
  for (; unit + kUnits <= units; unit += kUnits) {
    amx::load<4>(queries + unit, row_bytes);
    for_tiles<kVectors>([&](auto v) {
      prefetch.lines(kLinesPerProduct);
      amx::load<5>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
      amx::multiply_bfloat16<v, 4, 5>();
    });
  }
  if (unit < units) {
    amx::load<6>(queries + unit, row_bytes);
    for_tiles<kVectors>([&](auto v) {
      amx::load<7>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
      amx::multiply_bfloat16<v, 6, 7>();
    });
  }
  for_tiles<kVectors>([&](auto v) { amx::store<v>(scores + v * amx::kTileColumns, kTile * 4); });
}

// out [rows][stride] += weights [rows][kTile / 2] times kColumns tiles of 16 dimensions of values [kTile / 2][stride].
template <int kColumns>
void add_value_tiles(const uint32_t* weights, const uint32_t* values, int stride, float* out, GroupPrefetch& prefetch) {
  const int64_t row_bytes = stride * 4;
  for_tiles<kColumns>([&](auto c) { amx::load<c>(out + c * amx::kTileColumns, row_bytes); });
  for (int pair = 0; pair < kTile / 2; pair += kUnits) {
    amx::load<4>(weights + pair, kTile * 2);
    for_tiles<kColumns>([&](auto c) {
      prefetch.lines(kLinesPerProduct);
      amx::load<5>(values + pair * stride + c * amx::kTileColumns, row_bytes);
      amx::multiply_bfloat16<c, 4, 5>();
    });
  }
  for_tiles<kColumns>([&](auto c) { amx::store<c>(out + c * amx::kTileColumns, row_bytes); });
}

// A group has 8 or 16 tokens. A division would take longer than the copy of a value.
OSTINATO_INLINE int group_of(int token, int tokens) { return token >> (tokens == kMaxGroup ? 4 : 3); }
OSTINATO_INLINE bool is_first_of_group(int token, int tokens) { return (token & (tokens - 1)) == 0; }

// The values of a tile's first `count` tokens, side by side: out [kTile / 2][stride], zero elsewhere.
inline void copy_values(const TileGroups<uint32_t>& groups, int tokens, int count, int value_dim, int stride, uint32_t* out) {
  const uint32_t* from = groups.values[0];
  for (int token = 0; token < kTile; token += 2, from += value_dim, out += stride) {
    if (token >= count) {
      std::memset(out, 0, stride * 4);
      continue;
    }
    if (is_first_of_group(token, tokens)) from = groups.values[group_of(token, tokens)];
    if (token + 1 < count) {
      int d = 0;
      for (; d + kWidth <= value_dim; d += kWidth) {
        store(reinterpret_cast<float*>(out + d), load(reinterpret_cast<const float*>(from + d)));
      }
      if (d < value_dim) std::memcpy(out + d, from + d, (value_dim - d) * 4);
    } else {
      for (int d = 0; d < value_dim; ++d) out[d] = from[d] & 0xffff;
    }
    if (value_dim < stride) std::memset(out + value_dim, 0, (stride - value_dim) * 4);
  }
}

// The keys of a tile if groups have 8 tokens: out [kKeyVectors][units][16].
template <class Unit>
void join_keys(const TileGroups<Unit>& groups, int units, uint32_t* out) {
  for (int vector = 0; vector < kKeyVectors; ++vector) {
    for (int unit = 0; unit < units; ++unit, out += 2 * kMinGroup) {
      for (int half = 0; half < 2; ++half) {
        const auto* keys = reinterpret_cast<const uint32_t*>(groups.keys[2 * vector + half]);
        std::memcpy(out + half * kMinGroup, keys + unit * kMinGroup, kMinGroup * 4);
      }
    }
  }
}

// Rows [rows][stride] times their factors.
inline void rescale_rows(int rows, const float* factors, int stride, float* out) {
  for (int r = 0; r < rows; ++r, out += stride) {
    if (factors[r] == 1.0f) continue;
    const F32 factor = broadcast(factors[r]);
    for (int d = 0; d < stride; d += kWidth) store(out + d, load(out + d) * factor);
  }
}

}  // namespace ostinato::attention
