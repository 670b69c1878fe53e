// One worker of an attention call: it runs items of the plan, each a tile of query rows against a range of keys.
//
// Method: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
// "FlashAttention" (2022); the partition over keys as in "Flash-Decoding" (2023).
#pragma once

#include "attention/plan.h"
#include "attention/softmax.h"
#include "attention/softmax_state.h"
#include "attention/tile.h"
#include "core/aligned_memory.h"

#if OSTINATO_AMX
#include "attention/amx_tile.h"
#endif

#include <type_traits>

namespace ostinato::attention {

// One allocation that grows and is kept by its thread.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t begin = used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return is_measuring_ ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory_.data()) + begin);
  }
  // Runs `layout` twice: first to measure how many bytes it takes, then with that memory. A loop, so that `layout` is
  // compiled once.
  template <class Layout>
  void lay_out(Layout&& layout) {
    for (is_measuring_ = true;; is_measuring_ = false) {
      used_ = 0;
      layout();
      if (!is_measuring_) return;
      if (used_ <= size_) continue;
      size_ = 0;  // if the allocation fails, the next call tries again
      memory_.allocate(64, used_);
      size_ = used_;
    }
  }

 private:
  AlignedMemory memory_;
  size_t size_ = 0;
  size_t used_ = 0;
  bool is_measuring_ = false;
};

// ---- one worker ------------------------------------------------------------------------------------------

template <class Layout>
class Worker {
  using T = typename Layout::Element;
  using Multiply = typename Layout::Multiply;
  using Step = typename Multiply::Step;
  using Factor = typename Multiply::Factor;
  using Unit = typename Layout::Unit;
  static constexpr bool kHasScales = std::is_same_v<Unit, int8_t>;

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
      positions_ = scratch.take<int>(max_rows);
      scores_ = scratch.take<float>(Layout::kRows * kTile);
      weights_ = scratch.take<Factor>(Layout::kRows * kTile);
      totals_ = scratch.take<float>(static_cast<size_t>(max_rows) * kWidth);
      local_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      whole_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      if (Layout::kWidens) {
        keys_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.head_dim);
        values_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.value_dim);
      }
#if OSTINATO_AMX
      if (Layout::kHasMatrixTiles) {
        joined_keys_ = scratch.take<uint32_t>(static_cast<size_t>(kTile) / 2 * std::max(2 * num_steps_, padded_dim_));
        joined_values_ = scratch.take<uint32_t>(static_cast<size_t>(kTile) / 2 * padded_dim_);
      }
#endif
    });
  }

  // The item that this worker probably runs next. Its first keys are prefetched during the last keys of a tile.
  void expect(const QueryTile* tile) { upcoming_ = tile; }

  // Runs all partitions of a tile, and writes the output.
  void run_whole(const QueryTile& tile) {
    const int rows = tile.num_tokens * p_.group;
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
    const State local = state_at(local_, tile.num_tokens * p_.group);
    for (int partition = item.first_partition; partition < item.last_partition; ++partition) {
      if (!tile.is_joined()) {
        run_partition(tile, partition, state_of(states_of(item.tile), tile, partition));
        continue;
      }
      run_partition(tile, partition, local);
      int row = 0;
      for_tiles_of(plan_, item, [&](int index) {
        const QueryTile& member = plan_.tiles[index];
        const int rows = member.num_tokens * p_.group;
        copy_rows(local, row, rows, padded_dim_, state_of(states_of(index), member, partition));
        row += rows;
      });
    }
  }

  // Merges the states of a tile's partitions in the order of run_whole, and writes the output.
  void combine(const QueryTile& tile, float* states) {
    const State whole = state_of(states, tile, tile.first_partition);
    for (int partition = tile.first_partition + 1; partition < tile.last_partition; ++partition) {
      merge(whole, state_of(states, tile, partition), tile.num_tokens * p_.group, padded_dim_);
    }
    write_output(tile, whole);
  }

 private:
  State state_of(float* states, const QueryTile& tile, int partition) const {
    const int rows = tile.num_tokens * p_.group;
    return state_at(states + (partition - tile.first_partition) * state_floats(rows, padded_dim_), rows);
  }

  void load_queries(const QueryTile& tile) {
    int token = 0;
    if (!tile.is_joined()) return append_queries(tile, token);
    for (int i = 0; i < tile.num_members; ++i) {
      append_queries(plan_.tiles[plan_.members[tile.first_member + i]], token);
    }
  }

  // Loads the queries of a tile after those of `token` tokens.
  void append_queries(const QueryTile& tile, int& token) {
    Factor* out = queries_ + static_cast<size_t>(token) * p_.group * num_factors_;
    for (int t = 0; t < tile.num_tokens; ++t) {
      positions_[token++] = tile.first_position + t;
      for (int g = 0; g < p_.group; ++g, out += num_factors_) {
        const int64_t head = static_cast<int64_t>(tile.kv_head) * p_.group + g;
        const int64_t offset = (tile.first_token + t) * p_.q.token_stride + head * p_.q.head_stride;
        Layout::queries(reinterpret_cast<const T*>(p_.q.data) + offset, p_.head_dim, out);
      }
    }
  }

  // How many keys of the tile of keys that starts at first_key are in the context.
  static int count_keys(const QueryTile& tile, int first_key) {
    return tile.last_key - first_key < kTile ? tile.last_key - first_key : kTile;
  }

  // Not inlined: run_partition calls it three times.
  [[gnu::noinline]] TileGroups<Unit> locate(const QueryTile& tile, int first_key) const {
    TileGroups<Unit> groups;
    const int32_t* blocks = p_.block_table + tile.seq * p_.block_table_stride;
    const int count = count_keys(tile, first_key);
    for (int i = 0; i < kTile / tokens_; ++i) {
      const int position = i * tokens_ < count ? first_key + i * tokens_ : first_key;
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

  void run_partition(const QueryTile& tile, int partition, State state) {
    const int rows = tile.num_tokens * p_.group;
    clear(state, rows, padded_dim_);
    std::memset(totals_, 0, static_cast<size_t>(rows) * kWidth * sizeof(float));
    const int begin = partition * kPartition;
    const int end = begin + kPartition < tile.last_key ? begin + kPartition : tile.last_key;
    const int from = begin > tile.first_key ? begin : tile.first_key / kTile * kTile;
    for (int first_key = from; first_key < end; first_key += kTile) {
      const TileGroups<Unit> groups = locate(tile, first_key);
      if (first_key + kTile < tile.last_key) {
        const TileGroups<Unit> next = locate(tile, first_key + kTile);
        run_tile(tile, first_key, groups, &next, rows, state);
      } else if (upcoming_ != nullptr) {
        const TileGroups<Unit> next = locate(*upcoming_, upcoming_->first_key / kTile * kTile);
        run_tile(tile, first_key, groups, &next, rows, state);
      } else {
        run_tile(tile, first_key, groups, nullptr, rows, state);
      }
    }
    for (int r = 0; r < rows; ++r) state.total[r] = reduce_sum(load(totals_ + r * kWidth));
  }

  // Computes all rows against one tile of keys. Meanwhile the tile `next` is prefetched, unless it is null.
  void run_tile(const QueryTile& tile, int first_key, const TileGroups<Unit>& groups, const TileGroups<Unit>* next,
                int rows, State state) {
    if constexpr (Layout::kHasMatrixTiles) {
      this->run_matrix_blocks(tile, first_key, groups, next, rows, state);
    } else if constexpr (Layout::kWidens) {
      TileGroups<float> widened;
      Layout::widen_tile(groups, next, tokens_, count_keys(tile, first_key), p_.head_dim, p_.value_dim, keys_, values_,
                         widened);
      run_blocks(tile, first_key, widened, nullptr, rows, state);
    } else {
      if constexpr (kHasScales) collect_scales(groups, next);
      run_blocks(tile, first_key, groups, next, rows, state);
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

  void run_blocks(const QueryTile& tile, int first_key, const TileGroups<Step>& groups, const TileGroups<Step>* next,
                  int rows, State state) {
    const KeyColumns<Step> keys(groups, tokens_);
    const KeyColumns<Step> next_keys(next == nullptr ? groups : *next, tokens_);
    for (int row = 0, count; row < rows; row += count) {
      count = rows_per_block(rows - row);
      const bool fetches = next != nullptr && row == 0;
      run_rows(tile, first_key, row, count, state, keys.columns, groups.values,
               fetches ? next_keys.columns : nullptr, fetches ? next->values : nullptr);
    }
  }

#if OSTINATO_AMX
  // Does what run_blocks does, by matrix tiles.
  void run_matrix_blocks(const QueryTile& tile, int first_key, const TileGroups<Unit>& groups,
                         const TileGroups<Unit>* next, int rows, State state) {
    const int num_keys = count_keys(tile, first_key);
    TilePrefetch<Unit> prefetch(next, kTile / tokens_, static_cast<int64_t>(tokens_) * p_.key_bytes,
                                static_cast<int64_t>(tokens_) * p_.value_bytes);
    // For a single block of rows, a part of the tile is widened and then multiplied, while the processor already widens the
    // next part. Keys and values take turns in one memory, so that they stay in the first cache.
    const bool takes_turns = kHasScales && rows <= Layout::kRows;
    uint32_t* values = takes_turns ? joined_keys_ : joined_values_;
    const uint32_t* keys[kKeyVectors];
    for (int v = 0; v < kKeyVectors; ++v) keys[v] = joined_keys_ + v * num_steps_ * amx::kTileColumns;
    const KeyColumns<Unit> key_columns(groups, tokens_);
    if constexpr (kHasScales) {
      collect_scales(groups, nullptr);
      // The scales past the end can be NaN, and a weight of zero would not hide them.
      std::fill(scales_.values + num_keys, scales_.values + kTile, 0.0f);
      if (!takes_turns) widen_vectors(key_columns, 0, kKeyVectors, prefetch);
    } else if (tokens_ == kMinGroup) {
      join_keys(groups, num_steps_, joined_keys_);
    } else {
      std::copy(groups.keys, groups.keys + kKeyVectors, keys);
    }
    if (!takes_turns) join_values(groups, num_keys, 0, padded_dim_, prefetch, values);
    for (int row = 0; row < rows; row += Layout::kRows) {
      const int count = std::min(Layout::kRows, rows - row);
      Visible visible[Layout::kRows];
      Alibi alibi[Layout::kRows];
      const int last_seen = look(tile, first_key, row, count, visible, alibi);
      if (last_seen <= 0) continue;
      registers_.shape(count, p_.head_dim);
      const int num_vectors = (last_seen + amx::kTileColumns - 1) / amx::kTileColumns;
      const Factor* queries = queries_ + static_cast<size_t>(row) * num_factors_;
      if (takes_turns) {
        for (int v = 0; v < num_vectors; ++v) {
          widen_vectors(key_columns, v, v + 1, prefetch);
          score_tiles<1>(queries, num_steps_, keys + v, scores_ + v * amx::kTileColumns, prefetch);
        }
      } else {
        with_tiles(num_vectors, [&]<int kVectors>(std::integral_constant<int, kVectors>) {
          score_tiles<kVectors>(queries, num_steps_, keys, scores_, prefetch);
        });
      }
      alignas(64) float rescale[Layout::kRows];
      softmax_block<Layout>(count, visible, p_.alibi_slopes == nullptr ? nullptr : alibi, p_.scaling,
                            kHasScales ? &scales_ : nullptr, scores_, weights_, state.maximum + row,
                            totals_ + row * kWidth, rescale);
      float* out = state.accumulator + static_cast<size_t>(row) * padded_dim_;
      rescale_rows(count, rescale, padded_dim_, out);
      for (int column = 0; column < padded_dim_; column += 4 * amx::kTileColumns) {
        const int columns = std::min(4, (padded_dim_ - column) / amx::kTileColumns);
        const int last = column + columns * amx::kTileColumns;
        if (takes_turns) join_values(groups, num_keys, column, last, prefetch, values);
        with_tiles(columns, [&]<int kColumns>(std::integral_constant<int, kColumns>) {
          add_value_tiles<kColumns>(weights_, values + column, padded_dim_, out + column, prefetch);
        });
      }
    }
  }

  // Widens vectors [first, last) of a tile's keys into joined_keys_, if they are bytes.
  void widen_vectors(const KeyColumns<Unit>& keys, int first, int last, TilePrefetch<Unit>& prefetch) {
    if constexpr (kHasScales) {
      for (int v = first; v < last; ++v) {
        widen_keys<ByteStep>(keys, v, tokens_, num_steps_, prefetch, joined_keys_ + v * num_steps_ * amx::kTileColumns);
      }
    }
  }

  // The columns [first, last) of a tile's values, as matrix tiles take them.
  void join_values(const TileGroups<Unit>& groups, int num_keys, int first, int last, TilePrefetch<Unit>& prefetch,
                   uint32_t* values) {
    if constexpr (kHasScales) {
      widen_values(groups, tokens_, num_keys, p_.value_dim, first, last, padded_dim_, prefetch, values);
    } else {
      copy_values(groups, tokens_, num_keys, p_.value_dim, padded_dim_, values);
    }
  }

  TileRegisters registers_;
  // [kKeyVectors][num_steps][16], or values, see run_matrix_blocks
  uint32_t* joined_keys_ = nullptr;
  uint32_t* joined_values_ = nullptr;  // [kTile / 2][padded_dim]
#endif

  // For each of `count` rows: the keys of the tile at first_key that it sees, and its ALiBi if the model has ALiBi.
  // Returns one past the last key that a row sees, or 0 if no row sees a key.
  int look(const QueryTile& tile, int first_key, int row, int count, Visible* visible, Alibi* alibi) const {
    int last_seen = 0;
    int first_seen = kTile;
    for (int r = 0; r < count; ++r) {
      const int position = positions_[(row + r) / p_.group];
      const int last = (p_.is_bidirectional ? tile.last_key : position + 1) - first_key;
      const int first = first_seen_from(p_, position) - first_key;
      visible[r] = {first > 0 ? first : 0, last < kTile ? last : kTile};
      if (p_.alibi_slopes != nullptr) {
        const int head = tile.kv_head * p_.group + (row + r) % p_.group;
        alibi[r] = {p_.alibi_slopes[head] * kLog2E, static_cast<float>(first_key - position)};
      }
      last_seen = visible[r].last > last_seen ? visible[r].last : last_seen;
      first_seen = visible[r].first < first_seen ? visible[r].first : first_seen;
    }
    return first_seen >= kTile ? 0 : last_seen;
  }

  // Computes a block of rows against the tile that starts at first_key. Vectors of scores past the last key that a row
  // sees are not computed.
  void run_rows(const QueryTile& tile, int first_key, int row, int count, State state, const Step* const* keys,
                const Step* const* values, const Step* const* next_keys, const Step* const* next_values) {
    Visible visible[kRowBlock];
    Alibi alibi[kRowBlock];
    const int last_seen = look(tile, first_key, row, count, visible, alibi);
    if (last_seen <= 0) return;
    const int num_vectors = (last_seen + kWidth - 1) / kWidth;
    alignas(64) float rescale[16];
    score_keys<Multiply>(count, num_vectors, queries_ + static_cast<size_t>(row) * num_factors_, num_steps_, keys,
                         next_keys, tokens_, scores_);
    softmax_block<Layout>(count, visible, p_.alibi_slopes == nullptr ? nullptr : alibi, p_.scaling,
                          kHasScales ? &scales_ : nullptr, scores_, weights_, state.maximum + row,
                          totals_ + row * kWidth, rescale);
    const ValueRows<Multiply> rows{weights_, values, next_values, tokens_, last_seen, p_.value_dim};
    add_all_values<Multiply>(count, rows, state.accumulator + static_cast<size_t>(row) * padded_dim_, padded_dim_,
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
    for (int r = 0; r < tile.num_tokens * p_.group; ++r) {
      const int64_t head = static_cast<int64_t>(tile.kv_head) * p_.group + r % p_.group;
      const int64_t offset = ((tile.first_token + r / p_.group) * p_.num_heads + head) * p_.value_dim;
      const float factor = p_.sinks != nullptr         ? factor_with_sink(p_.sinks[head], state.maximum[r], state.total[r])
                           : state.total[r] > 0.0f ? 1.0f / state.total[r]
                                                   : 0.0f;
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
  int* positions_;           // of the query tokens in their sequences
  float* scores_;            // [kRows][kTile]
  Factor* weights_;          // [kRows][num_factors(kTile)]
  float* totals_;            // [rows][kWidth]
  float* local_;             // State
  float* whole_;             // State
  float* keys_ = nullptr;    // [groups][head_dim][tokens], widened
  float* values_ = nullptr;  // [groups][tokens][value_dim], widened
  TileScales scales_;        // scales of the present tile, if the cache has scales
  const QueryTile* upcoming_ = nullptr;
};

}  // namespace ostinato::attention
