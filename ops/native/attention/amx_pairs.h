// Attention of bfloat16 by matrix tiles (core/amx.h): up to 32 query rows against a partition of 256 keys.
//
// A group of the cache holds the keys of 16 tokens as tiles B (core/amx.h): 16 steps of two dimensions are 1 KiB. A
// group of values also has 16 tokens, as 8 rows of pairs. A tile B of values needs 32 tokens, that is two groups, which
// can lie in two blocks. So the values are first copied side by side. Values past the end of the context become zeros.
//
// All scores of a block of rows come first, then the softmax, then the sums of values. So sums of values stay in registers,
// and few tiles are multiplied right after the vectors that made them are stored. 16 or 32 rows give the same bits.
//
// Order of sums: a score is summed over the dimensions, an output over the keys of the partition. Both are summed in parts
// of 32, as amx_linear.h describes. The sums of a row contain no other row. Parts of 32 keys that no row of a block sees
// are left out. A row that does not see a part has weights of zero there, which do not change its sums.
#pragma once

#include "attention/amx_tile.h"
#include "attention/scratch.h"

#include <algorithm>

namespace ostinato::attention {

struct PairTileLayout {
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
  static constexpr int kRows = 2 * amx::kTileRows;  // rows of a block

  static void queries(const BFloat16* row, int head_dim, uint32_t* out) {
    std::memcpy(out, row, head_dim * sizeof(BFloat16));
  }
};

// The matrix tiles of one worker.
class PairTiles {
  using Groups = TileGroups<uint32_t>;
  using Block = RowBlock<uint32_t>;

 public:
  PairTiles(const Problem& p, int padded_dim)
      : p_(p), tokens_(group_tokens(p.block_size)), units_(p.head_dim / 2), padded_dim_(padded_dim) {}

  void lay_out(Scratch& scratch) {
    constexpr int kRows = std::max(PairTileLayout::kRows, kRowsTogether);
    scores_ = scratch.take<float>(kRows * kScoreStride);
    weights_ = scratch.take<uint32_t>(kRows * kWeightStride);
    values_ = scratch.take<uint32_t>(static_cast<size_t>(kPartition) / 2 * padded_dim_);
    if (tokens_ == kMinGroup) keys_ = scratch.take<uint32_t>(static_cast<size_t>(kTile) * units_);
  }

  // Begins a partition of one kv head.
  void begin(const PartitionGroups<uint32_t>& groups) {
    groups_ = &groups;
    has_values_ = false;
  }

  // Computes a block of rows against the partition.
  void run(const Block& rows, GroupPrefetch& prefetch) {
    const Keys keys = keys_of(rows);
    const bool has_two = rows.count > amx::kTileRows && units_ % kUnits == 0;
    if (has_two) registers_.shape_two(rows.count - amx::kTileRows);
    for (int t = keys.first / kTile; t * kTile < keys.last; ++t) {
      const Keys part = keys.of_tile(t);
      const TileKeys tiles = join(groups_->tiles[t]);
      if (has_two) {
        for (int key = part.first; key < part.last; key += kPart) score_two(rows.queries, tiles, key, prefetch);
      } else {
        score(rows, tiles, part, prefetch);
      }
    }
    weigh(rows, keys, prefetch);
    if (!has_values_) {
      for (int t = 0; t < groups_->count; ++t) join_values(groups_->tiles[t], groups_->num_keys - t * kTile, t);
      has_values_ = true;
    }
    if (has_two) {
      for (int column = 0; column < padded_dim_; column += 2 * amx::kTileColumns) {
        float* out = rows.accumulator + column;
        const bool is_single = column + amx::kTileColumns == padded_dim_;
        is_single ? sum_two<1>(keys, column, out, prefetch) : sum_two<2>(keys, column, out, prefetch);
      }
    } else {
      add_values(rows, keys, true, prefetch);
    }
  }

  // Computes a block of up to 16 rows of each of several kv heads, which see the same keys of a partition. Heads are the
  // inner loop: in a block of the cache, they lie one after the other. `groups` are those of the first head. Meanwhile the
  // next keys or values are prefetched, at the end the keys of `following`, unless it is null.
  void run_heads(const PartitionGroups<uint32_t>& groups, const Block* heads, int num_heads, const Groups* following) {
    const Keys keys = keys_of(heads[0]);
    const int first = keys.first / kTile, last = (keys.last + kTile - 1) / kTile;
    // Calls run(tile, rows, groups of the tile, those after them or null).
    const auto for_each = [&](const auto& run) {
      for (int t = first; t < last; ++t) {
        Groups present = groups.tiles[t];
        for (int i = 0; i < num_heads; ++i) {
          const bool is_end = i + 1 == num_heads && t + 1 == last;
          const Groups next = is_end ? present : i + 1 == num_heads ? groups.tiles[t + 1] : next_head(p_, present, tokens_);
          run(t, heads[i], present, is_end ? nullptr : &next);
          present = next;
        }
      }
    };
    for_each([&](int t, const Block& rows, const Groups& present, const Groups* next) {
      GroupPrefetch prefetch(kTile / tokens_);
      if (next != nullptr) {
        prefetch.add(next->keys, static_cast<int64_t>(tokens_) * p_.key_bytes);
      } else {
        prefetch.add(groups.tiles[first].values, static_cast<int64_t>(tokens_) * p_.value_bytes);
      }
      score(rows, join(present), keys.of_tile(t), prefetch);
    });
    GroupPrefetch none(kTile / tokens_);
    for (int i = 0; i < num_heads; ++i) weigh(heads[i], keys, none);
    for_each([&](int t, const Block& rows, const Groups& present, const Groups* next) {
      GroupPrefetch prefetch(kTile / tokens_);
      if (next != nullptr) {
        prefetch.add(next->values, static_cast<int64_t>(tokens_) * p_.value_bytes);
      } else if (following != nullptr) {
        prefetch.add(following->keys, static_cast<int64_t>(tokens_) * p_.key_bytes);
      }
      join_values(present, groups.num_keys - t * kTile, 0);
      Keys part = keys.of_tile(t);
      part.origin = t * kTile;
      add_values(rows, part, t == first, prefetch);
    });
  }

 private:
  static constexpr int kPart = 2 * kUnits;  // keys of a tile A of weights
  // The distance of rows is not a multiple of 1 KiB, which would give many lines the same place in the first level cache.
  static constexpr int kScoreStride = kPartition + kUnits;
  static constexpr int kWeightStride = kPartition / 2 + kUnits;
  static constexpr int kLinesPerProduct = 4;  // lines of four groups that are prefetched

  // Keys that are multiplied, in parts of 32.
  struct Keys {
    int first, last;
    int origin;  // the key of the first row of values_

    Keys of_tile(int t) const { return {std::max(first, t * kTile), std::min(last, (t + 1) * kTile), origin}; }
  };

  static Keys keys_of(const Block& rows) {
    return {rows.seen.first / kPart * kPart, (rows.seen.last + kPart - 1) / kPart * kPart, 0};
  }

  // Tiles B of the keys of a tile, from unit 0 on.
  struct TileKeys {
    const uint32_t* vectors[kKeyVectors];
    const uint32_t* at(int key) const { return vectors[key % kTile / amx::kTileColumns]; }
  };

  TileKeys join(const Groups& groups) {
    TileKeys keys;
    if (tokens_ == kMinGroup) {
      join_keys(groups, units_, keys_);
      for (int v = 0; v < kKeyVectors; ++v) keys.vectors[v] = keys_ + v * units_ * amx::kTileColumns;
    } else {
      std::copy(groups.keys, groups.keys + kKeyVectors, keys.vectors);
    }
    return keys;
  }

  // Scores of rows, 16 at a time, with keys of one tile.
  void score(const Block& rows, const TileKeys& tiles, const Keys& keys, GroupPrefetch& prefetch) {
    for (int row = 0; row < rows.count; row += amx::kTileRows) {
      registers_.shape(std::min(amx::kTileRows, rows.count - row), units_);
      const uint32_t* queries = rows.queries + static_cast<size_t>(row) * units_;
      float* scores = scores_ + (rows.first + row) * kScoreStride + keys.first;
      with_tiles((keys.last - keys.first) / amx::kTileColumns, [&]<int kVectors>(std::integral_constant<int, kVectors>) {
        score_tiles<kVectors>(queries, tiles, keys.first, scores, prefetch);
      });
    }
  }

  template <int kVectors>
  void score_tiles(const uint32_t* queries, const TileKeys& tiles, int key, float* scores, GroupPrefetch& prefetch) {
    const uint32_t* keys[kVectors];
    for (int v = 0; v < kVectors; ++v) keys[v] = tiles.at(key + v * amx::kTileColumns);
    for_tiles<kVectors>([](auto v) { amx::zero<v>(); });
    int unit = 0;
    for (; unit + kUnits <= units_; unit += kUnits) {
      amx::load<4>(queries + unit, units_ * 4);
      for_tiles<kVectors>([&](auto v) {
        prefetch.lines(kLinesPerProduct);
        amx::load<5>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
        amx::multiply_bfloat16<v, 4, 5>();
      });
    }
    if (unit < units_) {
      amx::load<6>(queries + unit, units_ * 4);
      for_tiles<kVectors>([&](auto v) {
        amx::load<7>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
        amx::multiply_bfloat16<v, 6, 7>();
      });
    }
    for_tiles<kVectors>([&](auto v) { amx::store<v>(scores + v * amx::kTileColumns, kScoreStride * 4); });
  }

  // Scores of two parts of rows with 32 keys.
  void score_two(const uint32_t* queries, const TileKeys& tiles, int key, GroupPrefetch& prefetch) {
    const uint32_t* others = queries + static_cast<size_t>(amx::kTileRows) * units_;
    for_tiles<4>([](auto c) { amx::zero<c>(); });
    for (int unit = 0; unit < units_; unit += kUnits) {
      prefetch.lines(kLinesPerProduct);
      amx::load<6>(tiles.at(key) + unit * amx::kTileColumns, amx::kTileBytes);
      amx::load<4>(queries + unit, units_ * 4);
      amx::load<5>(others + unit, units_ * 4);
      amx::load<7>(tiles.at(key + amx::kTileColumns) + unit * amx::kTileColumns, amx::kTileBytes);
      multiply_two<2>();
    }
    store_two<2>(scores_ + key, kScoreStride);
  }

  // Products of two tiles A, 4 and 5, and kColumns tiles B, 6 and 7.
  template <int kColumns>
  static void multiply_two() {
    amx::multiply_bfloat16<0, 4, 6>();
    amx::multiply_bfloat16<2, 5, 6>();
    if constexpr (kColumns == 1) return;
    amx::multiply_bfloat16<1, 4, 7>();
    amx::multiply_bfloat16<3, 5, 7>();
  }

  template <int kColumns>
  static void store_two(float* out, int stride) {
    float* others = out + static_cast<size_t>(amx::kTileRows) * stride;
    amx::store<0>(out, stride * 4);
    amx::store<2>(others, stride * 4);
    if constexpr (kColumns == 1) return;
    amx::store<1>(out + amx::kTileColumns, stride * 4);
    amx::store<3>(others + amx::kTileColumns, stride * 4);
  }

  // Turns the scores of all rows into weights. The maxima of all rows come first, so that a row does not wait for its own.
  void weigh(const Block& rows, const Keys& keys, GroupPrefetch& prefetch) {
    // A logit is a score times a factor. The largest score has the largest logit, if nothing else changes a score.
    const bool changes = rows.alibi != nullptr || p_.scaling.soft_cap != 0.0f || p_.scaling.factor < 0.0f;
    const float factor = changes ? 1.0f : p_.scaling.factor;
    for (int r = 0; r < rows.count; ++r) {
      const Visible& visible = rows.visible[r];
      const bool is_partial = visible.first > keys.first || visible.last < keys.last;
      const float found =
          changes || is_partial ? change_scores(rows, r, keys, changes) : largest_score(rows.first + r, keys);
      rows.maximum[r] = found * factor > kLowest ? found * factor : kLowest;  // also if a score is NaN
    }
    for (int r = 0; r < rows.count; ++r) {
      const float* scores = scores_ + (rows.first + r) * kScoreStride;
      auto* weights = reinterpret_cast<BFloat16*>(weights_ + (rows.first + r) * kWeightStride);
      const F32 scale = broadcast(factor), subtract = broadcast(-rows.maximum[r]);
      F32 sums[2] = {broadcast(0.0f), broadcast(0.0f)};
      for (int i = keys.first; i < keys.last; i += kPart) {
        prefetch.lines(1);
        F32 p[kPart / kWidth];
        for (int j = 0; j < kPart / kWidth; ++j) {
          p[j] = exp2(fma(load(scores + i + j * kWidth), scale, subtract));
          sums[j % 2] = sums[j % 2] + p[j];
        }
        store_weights(p, weights + i);
      }
      rows.total[r] = reduce_sum(sums[0] + sums[1]);
    }
  }

  float largest_score(int row, const Keys& keys) const {
    const float* scores = scores_ + row * kScoreStride;
    F32 highest[2] = {broadcast(kLowest), broadcast(kLowest)};
    for (int i = keys.first; i < keys.last; i += 2 * kWidth) {
      for (int j = 0; j < 2; ++j) highest[j] = max(highest[j], load(scores + i + j * kWidth));
    }
    return reduce_max(max(highest[0], highest[1]));
  }

  // Masks the scores of a row. If it `changes` them, they become logits. Returns the largest one.
  float change_scores(const Block& rows, int r, const Keys& keys, bool changes) {
    float* scores = scores_ + (rows.first + r) * kScoreStride;
    const Visible& visible = rows.visible[r];
    const Alibi* alibi = rows.alibi == nullptr ? nullptr : rows.alibi + r;
    F32 highest = broadcast(kLowest);
    for (int i = keys.first; i < keys.last; i += kWidth) {
      F32 score = load(scores + i);
      if (changes) score = change_logit(score * broadcast(p_.scaling.factor), i, p_.scaling.soft_cap, alibi, false, visible);
      score = keep_range(score, visible.first - i, visible.last - i, broadcast(kMinusInfinity));
      store(scores + i, score);
      highest = max(highest, score);
    }
    return reduce_max(highest);
  }

  // One store of a line, because a tile that is loaded soon cannot get a line from two stores.
  static void store_weights(const F32* p, BFloat16* out) {
#if OSTINATO_ISA >= 3
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(p[1].v, p[0].v));
#else
    for (int j = 0; j < kPart / kWidth; ++j) store(out + j * kWidth, p[j]);
#endif
  }

  // The values of a tile's first `count` tokens side by side, zero elsewhere: [kTile / 2][padded_dim], from row
  // `slot` * kTile / 2 of values_ on.
  void join_values(const Groups& groups, int count, int slot) {
    const int value_dim = p_.value_dim;
    uint32_t* out = values_ + static_cast<size_t>(slot) * kTile / 2 * padded_dim_;
    const uint32_t* from = groups.values[0];
    for (int token = 0; token < kTile; token += 2, from += value_dim, out += padded_dim_) {
      if (token >= count) {
        std::memset(out, 0, padded_dim_ * 4);
        continue;
      }
      if (is_first_of_group(token, tokens_)) from = groups.values[group_of(token, tokens_)];
      if (token + 1 < count) {
        int d = 0;
        for (; d + kWidth <= value_dim; d += kWidth) {
          store(reinterpret_cast<float*>(out + d), load(reinterpret_cast<const float*>(from + d)));
        }
        if (d < value_dim) std::memcpy(out + d, from + d, (value_dim - d) * 4);
      } else {
        for (int d = 0; d < value_dim; ++d) out[d] = from[d] & 0xffff;
      }
      if (value_dim < padded_dim_) std::memset(out + value_dim, 0, (padded_dim_ - value_dim) * 4);
    }
  }

  // Adds the values of keys to the sums of rows, 16 at a time. Sums begin at zero if `is_first`.
  void add_values(const Block& rows, const Keys& keys, bool is_first, GroupPrefetch& prefetch) {
    for (int row = 0; row < rows.count; row += amx::kTileRows) {
      registers_.shape(std::min(amx::kTileRows, rows.count - row), units_);
      for (int column = 0; column < padded_dim_; column += 4 * amx::kTileColumns) {
        float* out = rows.accumulator + static_cast<size_t>(row) * padded_dim_ + column;
        with_tiles(std::min(4, (padded_dim_ - column) / amx::kTileColumns),
                   [&]<int kColumns>(std::integral_constant<int, kColumns>) {
                     add_tiles<kColumns>(keys, rows.first + row, column, is_first, out, prefetch);
                   });
      }
    }
  }

  // out [rows][padded_dim] += weights times kColumns tiles of 16 dimensions of values.
  template <int kColumns>
  void add_tiles(const Keys& keys, int row, int column, bool is_first, float* out, GroupPrefetch& prefetch) {
    const int64_t row_bytes = padded_dim_ * 4;
    for_tiles<kColumns>([&](auto c) { is_first ? amx::zero<c>() : amx::load<c>(out + c * amx::kTileColumns, row_bytes); });
    for (int key = keys.first; key < keys.last; key += kPart) {
      const uint32_t* values = values_ + static_cast<size_t>(key - keys.origin) / 2 * padded_dim_ + column;
      amx::load<4>(weights_ + row * kWeightStride + key / 2, kWeightStride * 4);
      for_tiles<kColumns>([&](auto c) {
        prefetch.lines(kLinesPerProduct);
        amx::load<5>(values + c * amx::kTileColumns, row_bytes);
        amx::multiply_bfloat16<c, 4, 5>();
      });
    }
    for_tiles<kColumns>([&](auto c) { amx::store<c>(out + c * amx::kTileColumns, row_bytes); });
  }

  // Sums of two parts of rows and of one or two tiles of values.
  template <int kColumns>
  void sum_two(const Keys& keys, int column, float* out, GroupPrefetch& prefetch) {
    const int64_t row_bytes = padded_dim_ * 4;
    for_tiles<4>([](auto c) { amx::zero<c>(); });
    for (int key = keys.first; key < keys.last; key += kPart) {
      const uint32_t* values = values_ + static_cast<size_t>(key) / 2 * padded_dim_ + column;
      const uint32_t* weights = weights_ + key / 2;
      prefetch.lines(kLinesPerProduct);
      amx::load<6>(values, row_bytes);
      amx::load<4>(weights, kWeightStride * 4);
      amx::load<5>(weights + amx::kTileRows * kWeightStride, kWeightStride * 4);
      if constexpr (kColumns == 2) amx::load<7>(values + amx::kTileColumns, row_bytes);
      multiply_two<kColumns>();
    }
    store_two<kColumns>(out, padded_dim_);
  }

  const Problem& p_;
  const int tokens_;  // tokens of a group
  const int units_;   // units of four bytes in a key
  const int padded_dim_;
  const PartitionGroups<uint32_t>* groups_ = nullptr;
  bool has_values_ = false;  // whether all values of the partition are in values_
  TileRegisters registers_;
  float* scores_ = nullptr;      // [rows][kScoreStride]
  uint32_t* weights_ = nullptr;  // [rows][kWeightStride]
  uint32_t* values_ = nullptr;   // [keys / 2][padded_dim]
  uint32_t* keys_ = nullptr;     // [kKeyVectors][units][16], if groups have 8 tokens
};

}  // namespace ostinato::attention
