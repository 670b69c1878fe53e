// What attention by matrix tiles (core/amx.h) shares: up to 256 keys and values, a partition, against a block of query rows.
// amx_pairs.h multiplies bfloat16, amx_bytes.h 8-bit numbers.
#pragma once

#include "attention/query_tiles.h"
#include "core/amx.h"

#include <algorithm>
#include <utility>

namespace ostinato::attention {

constexpr int kUnits = 16;                               // units of two elements in a row of a tile A
constexpr int kKeyVectors = kTile / amx::kTileColumns;  // tiles B side by side
constexpr int kTilesOfPartition = kPartition / kTile;

// The groups of the keys and values of a partition that some row sees.
template <class Unit>
struct PartitionGroups {
  TileGroups<Unit> tiles[kTilesOfPartition];
  int count = 0;     // tiles
  int num_keys = 0;  // of the context
};

// Query rows of one kv head against a partition. Places of keys are relative to the partition's first tile.
template <class Factor>
struct RowBlock {
  int first;                  // row of the tile
  int count;
  bool is_only;               // no other block of rows follows
  const Factor* queries;      // [count][factors of a query]
  const float* query_scales;  // [count], if queries are digits
  const Visible* visible;     // [count]
  const Alibi* alibi;         // [count] or null
  Visible seen;               // from the first key that a row sees to the last one
  float* maximum;             // [count] out
  float* total;               // [count] out
  float* accumulator;         // [count][padded_dim] out
};

// The tile registers of one worker. For one part of rows, registers 0 to 3 hold tiles C, 4 a tile A and 5 a tile B. The last
// dimensions of a score can be fewer than a tile holds. For them, 6 holds A and 7 holds B. For two parts, 0 and 1 hold
// tiles C of the first part and 2 and 3 those of the second, 4 and 5 hold a tile A of each, and 6 and 7 tiles B.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (rows_ > 0) amx::release();
  }

  // Sets the shapes of the registers for a part of `rows` rows, and keys of `units` units of four bytes.
  void shape(int rows, int units) {
    if (!change(rows, 0)) return;
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

  // The same for two parts of rows, 16 and `second`.
  void shape_two(int second) {
    if (!change(amx::kTileRows, second)) return;
    amx::TileShapes shapes;
    shapes.set(0, 8, amx::kTileRows, amx::kTileBytes);
    shapes.set(2, 4, second, amx::kTileBytes);
    shapes.set(5, 6, second, amx::kTileBytes);
    amx::configure(shapes);
  }

 private:
  // Whether the shapes are others than the present ones.
  bool change(int rows, int second) {
    if (rows == rows_ && second == second_) return false;
    rows_ = rows;
    second_ = second;
    return true;
  }

  int rows_ = 0;
  int second_ = 0;
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

// A group has 8 or 16 tokens. A division would take longer than the copy of a value.
OSTINATO_INLINE int group_of(int token, int tokens) { return token >> (tokens == kMaxGroup ? 4 : 3); }
OSTINATO_INLINE bool is_first_of_group(int token, int tokens) { return (token & (tokens - 1)) == 0; }

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

}  // namespace ostinato::attention
