// One tile of bfloat16 attention by matrix tiles (core/amx.h): up to 64 keys and values against blocks of 16 query rows.
//
// A group of the cache holds the keys of 16 tokens as tiles B (core/amx.h): 16 steps of two dimensions are 1 KiB. A
// group of values also has 16 tokens, as 8 rows of pairs. A tile B of values needs 32 tokens, that is two groups, which
// can lie in two blocks. So the values are first copied side by side. Values past the end of the context become zeros.
//
// In a cache of 8 bits, each tile of keys and values is first widened to bfloat16, once for all rows. This is exact: a
// bfloat16 has 8 significant bits. The scales multiply scores and weights in float32 (softmax.h).
//
// Order of sums: a score is summed over the dimensions, an output over the tile's 64 keys. Both are summed in parts of 32,
// as amx_linear.h describes. The sums of a row contain no other row.
#pragma once

#include "attention/tile.h"
#include "core/amx.h"

#include <algorithm>
#include <utility>

namespace ostinato::attention {

constexpr int kUnits = 16;                               // units of two elements in a row of a tile A
constexpr int kKeyVectors = kTile / amx::kTileColumns;  // tiles B side by side

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

// Keys and values in 8 bits, widened to the order of TileLayout.
struct ByteTileLayout : TileLayout {
  using Unit = int8_t;
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

  // Sets the shapes of the registers for blocks of `rows` rows.
  void shape(int rows, int head_dim) {
    if (rows == rows_) return;
    rows_ = rows;
    const int rest = head_dim / 2 % kUnits;
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

// Prefetches the keys, values and scales of a tile, a line of each group in turn: several streams of memory are faster than
// one. Matrix products prefetch most lines, and loops that widen bytes the others, because a core waits if it asks for many
// lines at once.
template <class Unit>
class TilePrefetch {
 public:
  // A group of keys has `key_bytes`, one of values `value_bytes`, scales included. If `tile` is null, nothing is prefetched.
  // It must live as long as this object.
  TilePrefetch(const TileGroups<Unit>* tile, int num_groups, int64_t key_bytes, int64_t value_bytes)
      : num_groups_(num_groups), group_(num_groups) {
    if (tile == nullptr) return;
    constexpr int kKeys = sizeof(Unit) == 1 ? 0 : 1;  // bytes are widened keys first; 16-bit values are copied first
    sides_[kKeys] = tile->keys;
    sides_[1 - kKeys] = tile->values;
    bytes_[kKeys] = key_bytes;
    bytes_[1 - kKeys] = value_bytes;
    side_ = 0;
    group_ = 0;
  }

  // Prefetches the next line, if there is one.
  OSTINATO_INLINE void line() { lines(1); }

  // Prefetches the share of one product of tiles.
  OSTINATO_INLINE void share() { lines(sizeof(Unit) == 1 ? 7 : 16); }

 private:
  OSTINATO_INLINE void lines(int count) {
    for (; count > 0 && (group_ < num_groups_ || begin_line()); --count, ++group_) {
      __builtin_prefetch(reinterpret_cast<const char*>(sides_[side_][group_]) + offset_, 0, 2);
    }
  }

  // Goes on to the next line of all groups of keys or of all groups of values.
  bool begin_line() {
    if (side_ == 2) return false;
    offset_ += 64;
    if (offset_ >= bytes_[side_]) {
      offset_ = 0;
      if (++side_ == 2) return false;
    }
    group_ = 0;
    return true;
  }

  const Unit* const* sides_[2];  // in the order in which a tile is read
  int64_t bytes_[2];
  const int num_groups_;
  int side_ = 2;
  int group_;
  int64_t offset_ = 0;
};

// scores [rows][kTile] = queries [rows][units] times kVectors tiles of 16 keys, [units][16] each.
template <int kVectors, class Prefetch>
void score_tiles(const uint32_t* queries, int units, const uint32_t* const* keys, float* scores, Prefetch& prefetch) {
  const int64_t row_bytes = units * 4;
  for_tiles<kVectors>([](auto v) { amx::zero<v>(); });
  int unit = 0;
  for (; unit + kUnits <= units; unit += kUnits) {
    amx::load<4>(queries + unit, row_bytes);
    for_tiles<kVectors>([&](auto v) {
      prefetch.share();
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
template <int kColumns, class Prefetch>
void add_value_tiles(const uint32_t* weights, const uint32_t* values, int stride, float* out, Prefetch& prefetch) {
  const int64_t row_bytes = stride * 4;
  for_tiles<kColumns>([&](auto c) { amx::load<c>(out + c * amx::kTileColumns, row_bytes); });
  for (int pair = 0; pair < kTile / 2; pair += kUnits) {
    amx::load<4>(weights + pair, kTile * 2);
    for_tiles<kColumns>([&](auto c) {
      prefetch.share();
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
inline void join_keys(const TileGroups<uint32_t>& groups, int units, uint32_t* out) {
  for (int vector = 0; vector < kKeyVectors; ++vector) {
    for (int unit = 0; unit < units; ++unit, out += 2 * kMinGroup) {
      for (int half = 0; half < 2; ++half) {
        std::memcpy(out + half * kMinGroup, groups.keys[2 * vector + half] + unit * kMinGroup, kMinGroup * 4);
      }
    }
  }
}

// Two vectors of bytes as pairs of bfloat16. The float of a byte is zero below its 16 high bits, which are its bfloat16.
OSTINATO_INLINE void store_pairs(uint32_t* out, F32 low, F32 high) {
  store(reinterpret_cast<float*>(out), pair_up(low, high));
}

// The 16 keys of a vector of a tile of 8 bits as bfloat16: out [units][16].
template <class S>
void widen_keys(const KeyColumns<int8_t>& keys, int vector, int tokens, int units, TilePrefetch<int8_t>& prefetch,
                uint32_t* out) {
  const auto widen = [&](const auto& load_row, uint32_t* column) __attribute__((always_inline)) {
    for (int unit = 0; unit < units; ++unit, column += amx::kTileColumns) {
      if (unit % 8 == 0) prefetch.line();
      store_pairs(column, load_row(2 * unit * tokens), load_row((2 * unit + 1) * tokens));
    }
  };
  if constexpr (kWidth > kMinGroup) {
    if (tokens < kWidth) {
      const int8_t* const* halves = keys.columns + 2 * vector;
      return widen([&](int at) { return S::template load_halves<0>(halves[0] + at, halves[1] + at); }, out);
    }
  }
  for (int token = 0; token < amx::kTileColumns; token += kWidth) {
    const int8_t* column = keys.columns[(vector * amx::kTileColumns + token) / kWidth];
    widen([&](int at) { return S::template load<0>(column + at); }, out + token);
  }
}

// The values of 8 bits of a tile's first `count` tokens as bfloat16, zero elsewhere: the columns [first, last) of
// out [kTile / 2][stride]. `first` and `last` are multiples of 16.
inline void widen_values(const TileGroups<int8_t>& groups, int tokens, int count, int value_dim, int first, int last,
                         int stride, TilePrefetch<int8_t>& prefetch, uint32_t* out) {
  static constexpr int8_t kZeros[kMaxHeadDim] = {};
  const int end = std::min(last, value_dim);
  const int8_t* even = groups.values[0];
  for (int token = 0; token < kTile; token += 2, even += 2 * value_dim, out += stride) {
    if (token >= count) {
      std::memset(out + first, 0, (last - first) * 4);
      continue;
    }
    if (is_first_of_group(token, tokens)) even = groups.values[group_of(token, tokens)];
    const int8_t* odd = token + 1 < count ? even + value_dim : kZeros;
    int d = first;
    for (; d + kWidth <= end; d += kWidth) {
      if (d % 128 == 0) prefetch.line();
      store_pairs(out + d, load(even + d), load(odd + d));
    }
    if (d < end) {
      store_pairs(out + d, load_8(even + d), load_8(odd + d));
    } else if (d < last) {
      std::memset(out + d, 0, (last - d) * 4);
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
