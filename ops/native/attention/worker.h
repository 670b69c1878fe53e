// One worker of an attention call: it runs items of the plan, each a tile of query rows against a range of keys.
//
// Method: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
// "FlashAttention" (2022); the partition over keys as in "Flash-Decoding" (2023).
#pragma once

#include "attention/plan.h"
#include "attention/scratch.h"
#include "attention/softmax.h"
#include "attention/softmax_state.h"
#include "attention/tile.h"

#if OSTINATO_AMX
#include "attention/amx_bytes.h"
#include "attention/amx_pairs.h"
#endif

#include <type_traits>

namespace ostinato::attention {

template <class Layout>
class Worker {
  using T = typename Layout::Element;
  using Multiply = typename Layout::Multiply;
  using Step = typename Multiply::Step;
  using Factor = typename Multiply::Factor;
  using Unit = typename Layout::Unit;
  static constexpr bool kHasScales = std::is_same_v<Unit, int8_t>;
  static constexpr bool kHasByteTiles = kHasScales && Layout::kHasMatrixTiles;
  static constexpr int kTokensAhead = kHasByteTiles ? 1 : 8;  // whose queries are prefetched
#if OSTINATO_AMX
  using Tiles = std::conditional_t<kHasScales, ByteTiles, PairTiles>;
#endif

 public:
  Worker(const Problem& problem, const Plan& plan, Scratch& scratch, int max_rows)
      : p_(problem),
        plan_(plan),
        tokens_(group_tokens(problem.block_size)),
        padded_dim_(padded_dim(problem.value_dim)),
        num_steps_(problem.head_dim / Multiply::elements),
        num_factors_(num_factors<Multiply>(problem.head_dim)) {
    scratch.lay_out([&] {
      queries_ = scratch.take<Factor>(static_cast<size_t>(max_rows) * num_factors_);
      places_ = scratch.take<Place>(max_rows);
      if (!Layout::kHasMatrixTiles) {
        scores_ = scratch.take<float>(Layout::kRows * kTile);
        weights_ = scratch.take<Factor>(Layout::kRows * kTile);
        totals_ = scratch.take<float>(static_cast<size_t>(max_rows) * kWidth);
      }
      local_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      whole_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      if (Layout::kWidens) {
        keys_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.head_dim);
        values_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.value_dim);
      }
#if OSTINATO_AMX
      if constexpr (kHasByteTiles) query_scales_ = scratch.take<float>(max_rows);
      if constexpr (Layout::kHasMatrixTiles) tiles_.lay_out(scratch);
#endif
    });
  }

  // The item that this worker probably runs next. Its first keys are prefetched during the last keys of a tile.
  void expect(const QueryTile* tile) { upcoming_ = tile; }

  // Runs all partitions of a tile, and writes the output.
  void run_whole(const QueryTile& tile) {
    const int rows = tile.num_rows(p_.group);
    load_queries(tile);
    const State whole = state_at(whole_, rows);
    const State local = state_at(local_, rows);
    run_partition(tile, tile.first_partition, whole);
    for (int partition = tile.first_partition + 1; partition < tile.last_partition; ++partition) {
      run_partition(tile, partition, local);
      merge(whole, local, rows, padded_dim_);
    }
    write_output(tile, whole);
  }

  // Runs the partitions of an item, each into a state of its own. `states_of(tile)` has a state for each partition of a
  // tile. The states of a joined tile go to its members.
  template <class States>
  void run_part(const Item& item, const States& states_of) {
    const QueryTile& tile = plan_.tiles[item.tile];
    load_queries(tile);
    const State local = state_at(local_, tile.num_rows(p_.group));
    for (int partition = item.first_partition; partition < item.last_partition; ++partition) {
      if (!tile.is_joined()) {
        run_partition(tile, partition, state_of(states_of(item.tile), tile, partition));
        continue;
      }
      run_partition(tile, partition, local);
      int row = 0;
      for_tiles_of(plan_, item, [&](int index) {
        const QueryTile& member = plan_.tiles[index];
        const int rows = member.rows_of_head(p_.group);
        const State to = state_of(states_of(index), member, partition);
        copy_rows(rows_from(local, row, padded_dim_), rows, padded_dim_,
                  rows_from(to, (tile.kv_head - member.kv_head) * rows, padded_dim_));
        row += rows;
      });
    }
  }

  // Merges the states of a tile's partitions in the order of run_whole, and writes the output.
  void combine(const QueryTile& tile, float* states) {
    const State whole = state_of(states, tile, tile.first_partition);
    for (int partition = tile.first_partition + 1; partition < tile.last_partition; ++partition) {
      merge(whole, state_of(states, tile, partition), tile.num_rows(p_.group), padded_dim_);
    }
    write_output(tile, whole);
  }

 private:
  State state_of(float* states, const QueryTile& tile, int partition) const {
    const int rows = tile.num_rows(p_.group);
    return state_at(states + (partition - tile.first_partition) * state_floats(rows, padded_dim_), rows);
  }

  void load_queries(const QueryTile& tile) {
    if (!tile.is_joined()) {
      for (int i = 0; i < tile.num_kv_heads; ++i) {
        load_head(tile, tile.kv_head + i, places_, i * tile.rows_of_head(p_.group));
      }
      return;
    }
    int token = 0;
    for (int i = 0; i < tile.num_members; ++i) {
      const QueryTile& member = plan_.tiles[plan_.members[tile.first_member + i]];
      load_head(member, tile.kv_head, places_ + token, token * p_.group);
      token += member.num_tokens;
    }
  }

  // Loads the queries of a kv head of a tile into the rows from `first_row` on, and the places of their tokens.
  void load_head(const QueryTile& tile, int kv_head, Place* places, int first_row) {
    Factor* out = queries_ + static_cast<size_t>(first_row) * num_factors_;
    for (int t = 0; t < tile.num_tokens; ++t) {
      places[t] = place_of(p_, tile, t);
      for (int g = 0; g < p_.group; ++g, out += num_factors_) {
        const int64_t head = static_cast<int64_t>(kv_head) * p_.group + g;
        const int64_t offset = (tile.first_token + t) * p_.q.token_stride + head * p_.q.head_stride;
        const T* row = reinterpret_cast<const T*>(p_.q.data) + offset;
        if constexpr (Layout::kHasMatrixTiles) {
          // Rows of one head are too far apart for the hardware to prefetch them.
          for (int d = 0; d < p_.head_dim; d += 32) __builtin_prefetch(row + kTokensAhead * p_.q.token_stride + d);
        }
        if constexpr (kHasByteTiles) {
          query_scales_[(out - queries_) / num_factors_] = Layout::queries(row, p_.head_dim, out);
        } else {
          Layout::queries(row, p_.head_dim, out);
        }
      }
    }
  }

  // How many keys of the tile of keys that starts at first_key are in the context.
  static int count_keys(const QueryTile& tile, int first_key) {
    return tile.last_key - first_key < kTile ? tile.last_key - first_key : kTile;
  }

  // The groups of the tile of keys that starts at first_key, of the tile's first kv head. Groups before the window are
  // zeros: their blocks can be those of other sequences, and a weight of 0 times NaN is NaN.
  // Not inlined: run_partition calls it three times.
  [[gnu::noinline]] TileGroups<Unit> locate(const QueryTile& tile, int first_key) const {
    TileGroups<Unit> groups;
    const int32_t* blocks = p_.block_table + tile.seq * p_.block_table_stride;
    const int count = count_keys(tile, first_key);
    for (int i = 0; i < kTile / tokens_; ++i) {
      const int position = i * tokens_ < count ? first_key + i * tokens_ : first_key;
      if (position + tokens_ <= tile.first_key) {
        groups.keys[i] = groups.values[i] = reinterpret_cast<const Unit*>(kZeroGroup);
        continue;
      }
      const int64_t block = blocks[position / p_.block_size];
      const int64_t offset = position % p_.block_size;
      groups.keys[i] = group_at(p_.k_cache, block, tile.kv_head, offset * p_.key_bytes);
      groups.values[i] = group_at(p_.v_cache, block, tile.kv_head, offset * p_.value_bytes);
    }
    return groups;
  }

  static const Unit* group_at(const Cache& cache, int64_t block, int head, int64_t offset) {
    return reinterpret_cast<const Unit*>(cache.data + block * cache.block_stride + head * cache.head_stride + offset);
  }

  // The rows of one kv head of a tile.
  struct HeadRows {
    int kv_head;
    int first;  // row of the tile
    int count;
    State state;  // of these rows
  };

  HeadRows rows_of_head(const QueryTile& tile, int index, State state) const {
    const int count = tile.rows_of_head(p_.group), first = index * count;
    return {tile.kv_head + index, first, count, rows_from(state, first, padded_dim_)};
  }

  void run_partition(const QueryTile& tile, int partition, State state) {
    clear(state, tile.num_rows(p_.group), padded_dim_);
    const int begin = partition * kPartition;
    const int end = begin + kPartition < tile.last_key ? begin + kPartition : tile.last_key;
    const int from = begin > tile.first_key ? begin : tile.first_key / kTile * kTile;
    if constexpr (!Layout::kHasMatrixTiles) {
      run_tiles(tile, from, end, state);
    } else {
      if constexpr (!kHasByteTiles) {
        if (tile.rows_of_head(p_.group) <= kRowsOfFew) return this->run_few_rows(tile, from, end, state);
      }
      for (int i = 0; i < tile.num_kv_heads; ++i) this->run_matrix_tiles(tile, i, from, end, state);
    }
  }

  // Computes all rows against the keys [from, end) of a partition.
  void run_tiles(const QueryTile& tile, int from, int end, State state) {
    const int rows = tile.num_rows(p_.group), last_head = tile.num_kv_heads - 1;
    std::memset(totals_, 0, static_cast<size_t>(rows) * kWidth * sizeof(float));
    for (int first_key = from; first_key < end; first_key += kTile) {
      TileGroups<Unit> groups = locate(tile, first_key);
      for (int i = 0; i < last_head; ++i) {
        const TileGroups<Unit> next = next_head(p_, groups, tokens_);
        run_tile(tile, i, first_key, groups, &next, state);
        groups = next;
      }
      if (first_key + kTile < tile.last_key) {
        const TileGroups<Unit> next = locate(tile, first_key + kTile);
        run_tile(tile, last_head, first_key, groups, &next, state);
      } else if (upcoming_ != nullptr) {
        const TileGroups<Unit> next = locate(*upcoming_, upcoming_->first_key / kTile * kTile);
        run_tile(tile, last_head, first_key, groups, &next, state);
      } else {
        run_tile(tile, last_head, first_key, groups, nullptr, state);
      }
    }
    for (int r = 0; r < rows; ++r) state.total[r] = reduce_sum(load(totals_ + r * kWidth));
  }

  // Computes the rows of a tile's kv head `index` against one tile of keys. Meanwhile the tile `next` is prefetched, unless
  // it is null.
  void run_tile(const QueryTile& tile, int index, int first_key, const TileGroups<Unit>& groups,
                const TileGroups<Unit>* next, State state) {
    const HeadRows rows = rows_of_head(tile, index, state);
    const int num_keys = count_keys(tile, first_key);
    if constexpr (Layout::kWidens) {
      TileGroups<float> widened;
      Layout::widen_tile(groups, next, tokens_, num_keys, p_.head_dim, p_.value_dim, keys_, values_, widened);
      run_blocks(rows, first_key, widened, nullptr);
    } else {
      if constexpr (kHasScales) collect_scales(groups, next);
      run_blocks(rows, first_key, groups, next);
    }
  }

  // Reads the scales of a tile, and prefetches those of the next one.
  void collect_scales(const TileGroups<Unit>& groups, const TileGroups<Unit>* next) {
    const int64_t key_size = static_cast<int64_t>(tokens_) * p_.head_dim;
    const int64_t value_size = static_cast<int64_t>(tokens_) * p_.value_dim;
    for (int i = 0; i < kTile / tokens_; ++i) {
      std::memcpy(scales_.keys + i * tokens_, groups.keys[i] + key_size, tokens_ * sizeof(float));
      std::memcpy(scales_.values + i * tokens_, groups.values[i] + value_size, tokens_ * sizeof(float));
      if (next == nullptr) continue;
      __builtin_prefetch(next->keys[i] + key_size, 0, 3);
      __builtin_prefetch(next->values[i] + value_size, 0, 3);
    }
  }

  void run_blocks(const HeadRows& rows, int first_key, const TileGroups<Step>& groups, const TileGroups<Step>* next) {
    const KeyColumns<Step> keys(groups, tokens_);
    const KeyColumns<Step> next_keys(next == nullptr ? groups : *next, tokens_);
    for (int row = 0, count; row < rows.count; row += count) {
      count = rows_per_block(rows.count - row);
      const bool fetches = next != nullptr && row == 0;
      run_rows(rows, first_key, row, count, keys.columns, groups.values, fetches ? next_keys.columns : nullptr,
               fetches ? next->values : nullptr);
    }
  }

#if OSTINATO_AMX
  // Computes the rows of a tile's kv head `index` against the keys [from, end) of a partition, by matrix tiles. Meanwhile
  // the next partition is prefetched.
  void run_matrix_tiles(const QueryTile& tile, int index, int from, int end, State state) {
    const HeadRows rows = rows_of_head(tile, index, state);
    PartitionGroups<Unit> groups, next;
    locate_all(tile, index, from, end, groups);
    if (index + 1 < tile.num_kv_heads) {
      locate_all(tile, index + 1, from, end, next);
    } else if (end < tile.last_key) {
      locate_all(tile, 0, end, std::min(end + kPartition, tile.last_key), next);
    } else if (upcoming_ != nullptr) {
      const int first_key = upcoming_->first_key / kTile * kTile;
      locate_all(*upcoming_, 0, first_key, std::min((first_key / kPartition + 1) * kPartition, upcoming_->last_key), next);
    }
    GroupPrefetch prefetch(kTile / tokens_);
    for (int t = 0; t < next.count; ++t) prefetch.add(next.tiles[t].keys, static_cast<int64_t>(tokens_) * p_.key_bytes);
    for (int t = 0; t < next.count; ++t) {
      prefetch.add(next.tiles[t].values, static_cast<int64_t>(tokens_) * p_.value_bytes);
    }
    tiles_.begin(groups);
    for (int row = 0; row < rows.count; row += Layout::kRows) {
      const int count = std::min(Layout::kRows, rows.count - row);
      Visible visible[Layout::kRows];
      Alibi alibi[Layout::kRows];
      RowBlock<Factor> block = block_of(rows, row, count, visible, alibi);
      block.seen = look(p_, rows.kv_head, places_, from, end - from, row, count, visible, alibi);
      if (block.seen.last > 0) tiles_.run(block, prefetch);
    }
  }

  // The same for all kv heads of a tile of few rows.
  void run_few_rows(const QueryTile& tile, int from, int end, State state) {
    PartitionGroups<Unit> groups;
    locate_all(tile, 0, from, end, groups);
    RowBlock<Factor> blocks[kRowsTogether];
    Visible visible[kRowsTogether];
    Alibi alibi[kRowsTogether];
    for (int i = 0; i < tile.num_kv_heads; ++i) {
      const HeadRows rows = rows_of_head(tile, i, state);
      Visible* own = visible + rows.first;
      blocks[i] = block_of(rows, 0, rows.count, own, alibi + rows.first);
      blocks[i].first = rows.first;
      blocks[i].seen = look(p_, rows.kv_head, places_, from, end - from, 0, rows.count, own, alibi + rows.first);
      if (blocks[i].seen.last <= 0) return;
    }
    TileGroups<Unit> following;
    const bool is_last = end == tile.last_key;
    if (!is_last) following = locate(tile, end);
    if (is_last && upcoming_ != nullptr) following = locate(*upcoming_, upcoming_->first_key / kTile * kTile);
    tiles_.run_heads(groups, blocks, tile.num_kv_heads, is_last && upcoming_ == nullptr ? nullptr : &following);
  }

  // The rows [row, row + count) of a head, without the keys that they see.
  RowBlock<Factor> block_of(const HeadRows& rows, int row, int count, const Visible* visible, const Alibi* alibi) const {
    return {0,
            count,
            rows.count <= Layout::kRows,
            queries_ + static_cast<size_t>(rows.first + row) * num_factors_,
            query_scales_ == nullptr ? nullptr : query_scales_ + rows.first + row,
            visible,
            p_.alibi_slopes == nullptr ? nullptr : alibi,
            {},
            rows.state.maximum + row,
            rows.state.total + row,
            rows.state.accumulator + static_cast<size_t>(row) * padded_dim_};
  }

  // The groups of the tiles of keys in [from, end), of the kv head `index` of the tile.
  void locate_all(const QueryTile& tile, int index, int from, int end, PartitionGroups<Unit>& groups) const {
    groups.num_keys = end - from;
    for (int key = from; key < end; key += kTile) {
      TileGroups<Unit> found = locate(tile, key);
      for (int i = 0; i < index; ++i) found = next_head(p_, found, tokens_);
      groups.tiles[groups.count++] = found;
    }
  }
#endif

  // Computes a block of rows against the tile that starts at first_key. Vectors of scores past the last key that a row
  // sees are not computed.
  void run_rows(const HeadRows& rows, int first_key, int row, int count, const Step* const* keys,
                const Step* const* values, const Step* const* next_keys, const Step* const* next_values) {
    Visible visible[kRowBlock];
    Alibi alibi[kRowBlock];
    const int last_seen = look(p_, rows.kv_head, places_, first_key, kTile, row, count, visible, alibi).last;
    if (last_seen <= 0) return;
    const int num_vectors = (last_seen + kWidth - 1) / kWidth;
    alignas(64) float rescale[16];
    score_keys<Multiply>(count, num_vectors, queries_ + static_cast<size_t>(rows.first + row) * num_factors_, num_steps_,
                         keys, next_keys, tokens_, scores_);
    softmax_block<Layout>(count, visible, p_.alibi_slopes == nullptr ? nullptr : alibi, p_.scaling,
                          kHasScales ? &scales_ : nullptr, scores_, weights_, rows.state.maximum + row,
                          totals_ + (rows.first + row) * kWidth, rescale);
    const ValueRows<Multiply> seen{weights_, values, next_values, tokens_, last_seen, p_.value_dim};
    add_all_values<Multiply>(count, seen, rows.state.accumulator + static_cast<size_t>(row) * padded_dim_, padded_dim_,
                             rescale);
  }

  // The factor on an output if the logit `sink` takes part in the softmax over the keys.
  static float factor_with_sink(float sink, float maximum, float total) {
    const float logit = sink * kLog2E;
    const float highest = maximum > logit ? maximum : logit;
    alignas(64) float weights[kWidth] = {maximum - highest, logit - highest};
    store(weights, exp2(load(weights)));
    return weights[0] / (total * weights[0] + weights[1]);
  }

  void write_output(const QueryTile& tile, State state) const {
    const int rows_of_head = tile.rows_of_head(p_.group);
    for (int r = 0; r < tile.num_rows(p_.group); ++r) {
      const int64_t kv_head = tile.kv_head + r / rows_of_head, token = tile.first_token + r % rows_of_head / p_.group;
      const int64_t head = kv_head * p_.group + r % p_.group;
      const int64_t offset = (token * p_.num_heads + head) * p_.value_dim;
      const float factor = p_.sinks != nullptr         ? factor_with_sink(p_.sinks[head], state.maximum[r], state.total[r])
                           : state.total[r] == 0.0f ? 0.0f  // no key is seen
                                                    : 1.0f / state.total[r];
      write_output_row(state.accumulator + static_cast<size_t>(r) * padded_dim_, factor, p_.value_dim,
                       reinterpret_cast<T*>(p_.out) + offset);
    }
  }

  const Problem& p_;
  const Plan& plan_;
  const int tokens_;  // tokens of a group
  const int padded_dim_;
  const int num_steps_;
  const int num_factors_;
  Factor* queries_;          // [rows][num_factors]
  Place* places_;            // of the query tokens
  float* query_scales_ = nullptr;  // [rows], if queries are digits
  float* scores_ = nullptr;    // [kRows][kTile]; the three arrays are for kernels without matrix tiles
  Factor* weights_ = nullptr;  // [kRows][num_factors(kTile)]
  float* totals_ = nullptr;    // [rows][kWidth]
  float* local_;             // State
  float* whole_;             // State
  float* keys_ = nullptr;    // [groups][head_dim][tokens], widened
  float* values_ = nullptr;  // [groups][tokens][value_dim], widened
  TileScales scales_;        // scales of the present tile, if the cache has scales
  const QueryTile* upcoming_ = nullptr;
#if OSTINATO_AMX
  Tiles tiles_{p_, padded_dim_};
#endif
};

}  // namespace ostinato::attention
