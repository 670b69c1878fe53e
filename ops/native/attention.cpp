// CPU kernel of ostinato::paged_attention: writes the step's keys and values, then attends.
//
// A row's arithmetic is fixed by its own context alone: tiles of 64 keys and partitions of 256 lie at absolute
// positions, each partition runs its own online softmax, and partitions are merged in order, whether one
// item walked them all or many threads shared them. Keys that a row does not see leave its state untouched.
// So a row's result is the same bits in any batch, chunk, tile or number of threads.
//
// Method: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
// "FlashAttention" (2022); the partition over keys as in "Flash-Decoding" (2023).
#include "attention_plan.h"
#include "attention_tile.h"
#include "binding.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace ostinato::attention {
namespace {

constexpr int64_t kParallelWriteBytes = 1 << 18;
constexpr int64_t kMaxWindow = 1 << 30;  // longer than any context: no window at all

// One allocation that grows and is kept by its thread.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t begin = used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_.get() + begin);
  }
  // Runs `layout` twice: once to measure what it takes, once on enough memory.
  template <class Layout>
  void lay_out(Layout&& layout) {
    auto kept = std::move(memory_);
    used_ = 0;
    layout();
    if (used_ > size_) {
      size_ = used_;
      kept.reset(static_cast<char*>(std::aligned_alloc(64, size_)));
      if (kept == nullptr) throw std::bad_alloc();
    }
    memory_ = std::move(kept);
    used_ = 0;
    layout();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
  size_t used_ = 0;
};

// Softmax state of rows over some keys: the output is accumulator / total.
struct State {
  float* maximum;      // [rows]
  float* total;        // [rows]
  float* accumulator;  // [rows][padded_dim]
};

size_t state_floats(int rows, int padded_dim) { return static_cast<size_t>(rows) * (padded_dim + 2); }

State state_at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }

void clear(State state, int rows, int padded_dim) {
  for (int r = 0; r < rows; ++r) state.maximum[r] = kLowest;
  std::memset(state.total, 0, rows * sizeof(float));
  std::memset(state.accumulator, 0, static_cast<size_t>(rows) * padded_dim * sizeof(float));
}

// Adds the keys of `part` to `state`.
void merge(State state, State part, int rows, int padded_dim) {
  for (int r = 0; r < rows; ++r) {
    const float highest =
        state.maximum[r] > part.maximum[r] ? state.maximum[r] : part.maximum[r];
    alignas(64) float factors[kWidth] = {state.maximum[r] - highest, part.maximum[r] - highest};
    store(factors, exp2(load(factors)));
    const F32 keep = broadcast(factors[0]);
    const F32 add = broadcast(factors[1]);
    state.maximum[r] = highest;
    state.total[r] = state.total[r] * factors[0] + part.total[r] * factors[1];
    float* into = state.accumulator + static_cast<size_t>(r) * padded_dim;
    const float* from = part.accumulator + static_cast<size_t>(r) * padded_dim;
    for (int d = 0; d < padded_dim; d += kWidth) {
      store(into + d, fma(load(from + d), add, load(into + d) * keep));
    }
  }
}

// ---- one worker ------------------------------------------------------------------------------------------

template <class Layout>
class Worker {
  using T = typename Layout::Element;
  using Multiply = typename Layout::Multiply;
  using Step = typename Layout::Step;
  using Unit = typename Layout::Unit;

 public:
  Worker(const Problem& problem, Scratch& scratch, int max_rows)
      : p_(problem),
        tokens_(group_tokens(problem.block_size)),
        padded_dim_(padded_dim(problem.head_dim)),
        num_steps_(problem.head_dim / Multiply::elements) {
    scratch.lay_out([&] {
      queries_ = scratch.take<Step>(static_cast<size_t>(max_rows) * num_steps_);
      scores_ = scratch.take<float>(kRowBlock * kTile);
      weights_ = scratch.take<Step>(kRowBlock * kTile);
      totals_ = scratch.take<float>(static_cast<size_t>(max_rows) * kWidth);
      local_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      whole_ = scratch.take<float>(state_floats(max_rows, padded_dim_));
      if (Layout::kWidens) {
        keys_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.head_dim);
        values_ = scratch.take<float>(static_cast<size_t>(kTile) * problem.head_dim);
      }
    });
  }

  // What this worker will probably do next: its first keys are fetched during the last ones of a tile.
  void expect(const QueryTile* tile) { upcoming_ = tile; }

  // All partitions of a tile, start to finish.
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

  // Some partitions, each into its own state; `states` holds those of all the tile's partitions.
  void run_part(const QueryTile& tile, int first_partition, int last_partition, float* states) {
    load_queries(tile);
    for (int partition = first_partition; partition < last_partition; ++partition) {
      run_partition(tile, partition, state_of(states, tile, partition));
    }
  }

  // What run_whole does after its partitions, in the same order.
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
    Step* out = queries_;
    for (int t = 0; t < tile.num_tokens; ++t) {
      for (int g = 0; g < p_.group; ++g, out += num_steps_) {
        const int64_t head = static_cast<int64_t>(tile.kv_head) * p_.group + g;
        const int64_t offset = (tile.first_token + t) * p_.q.token_stride + head * p_.q.head_stride;
        Layout::queries(reinterpret_cast<const T*>(p_.q.data) + offset, p_.head_dim, out);
      }
    }
  }

  // Keys of the tile at first_key that are in context.
  static int count_keys(const QueryTile& tile, int first_key) {
    return tile.last_key - first_key < kTile ? tile.last_key - first_key : kTile;
  }

  TileGroups<Unit> locate(const QueryTile& tile, int first_key) const {
    TileGroups<Unit> groups;
    const int32_t* blocks = p_.block_table + tile.seq * p_.block_table_stride;
    const int count = count_keys(tile, first_key);
    for (int i = 0; i < kTile / tokens_; ++i) {
      const int position = i * tokens_ < count ? first_key + i * tokens_ : first_key;
      const int64_t block = blocks[position / p_.block_size];
      const int64_t offset = static_cast<int64_t>(position % p_.block_size) * p_.head_dim;
      groups.keys[i] = group_at(p_.k_cache, block, tile.kv_head, offset);
      groups.values[i] = group_at(p_.v_cache, block, tile.kv_head, offset);
    }
    return groups;
  }

  static const Unit* group_at(const Cache& cache, int64_t block, int head, int64_t offset) {
    return reinterpret_cast<const Unit*>(reinterpret_cast<const T*>(cache.data) + block * cache.block_stride +
                                         head * cache.head_stride + offset);
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

  // All rows against one tile of keys; `next` is fetched meanwhile, if there is one.
  void run_tile(const QueryTile& tile, int first_key, const TileGroups<Unit>& groups, const TileGroups<Unit>* next,
                int rows, State state) {
    if constexpr (Layout::kWidens) {
      TileGroups<float> widened;
      Layout::widen_tile(groups, next, tokens_, count_keys(tile, first_key), p_.head_dim, keys_, values_, widened);
      run_blocks(tile, first_key, widened, nullptr, rows, state);
    } else {
      run_blocks(tile, first_key, groups, next, rows, state);
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

  // Which keys of the tile at first_key each of `count` rows sees. Returns one past the last that any sees, 0 when
  // there is none.
  int look(const QueryTile& tile, int first_key, int row, int count, Visible* visible) const {
    int last_seen = 0;
    int first_seen = kTile;
    for (int r = 0; r < count; ++r) {
      const int position = tile.first_position + (row + r) / p_.group;
      const int last = position + 1 - first_key;
      const int first = p_.window > 0 ? last - p_.window : 0;
      visible[r] = {first > 0 ? first : 0, last < kTile ? last : kTile};
      last_seen = visible[r].last > last_seen ? visible[r].last : last_seen;
      first_seen = visible[r].first < first_seen ? visible[r].first : first_seen;
    }
    return first_seen >= kTile ? 0 : last_seen;
  }

  // A block of rows against the tile that starts at first_key. Scores of keys that nobody sees are not computed; what
  // is in their place is masked.
  void run_rows(const QueryTile& tile, int first_key, int row, int count, State state, const Step* const* keys,
                const Step* const* values, const Step* const* next_keys, const Step* const* next_values) {
    Visible visible[kRowBlock];
    const int last_seen = look(tile, first_key, row, count, visible);
    if (last_seen <= 0) return;
    const int num_vectors = (last_seen + kWidth - 1) / kWidth;
    alignas(64) float rescale[16];
    score_keys<Multiply>(count, num_vectors, queries_ + static_cast<size_t>(row) * num_steps_, num_steps_, keys,
                         next_keys, tokens_, scores_);
    softmax_block<Layout>(count, visible, p_.scaling, scores_, weights_, state.maximum + row,
                          totals_ + row * kWidth, rescale);
    const ValueRows<Step> rows{weights_, values, next_values, tokens_, last_seen, p_.head_dim};
    add_all_values<Multiply>(count, rows, state.accumulator + static_cast<size_t>(row) * padded_dim_, padded_dim_,
                             rescale);
  }

  void write_output(const QueryTile& tile, State state) const {
    for (int r = 0; r < tile.num_tokens * p_.group; ++r) {
      const int64_t head = static_cast<int64_t>(tile.kv_head) * p_.group + r % p_.group;
      const int64_t offset = ((tile.first_token + r / p_.group) * p_.num_heads + head) * p_.head_dim;
      const float factor = state.total[r] > 0.0f ? 1.0f / state.total[r] : 0.0f;
      Layout::output(state.accumulator + static_cast<size_t>(r) * padded_dim_, factor, p_.head_dim,
                     reinterpret_cast<T*>(p_.out) + offset);
    }
  }

  const Problem& p_;
  const int tokens_;  // of a group
  const int padded_dim_;
  const int num_steps_;
  Step* queries_;            // [rows][num_steps]
  float* scores_;            // [kRowBlock][kTile]
  Step* weights_;            // [kRowBlock][kTile / elements]
  float* totals_;            // [rows][kWidth]
  float* local_;             // State
  float* whole_;             // State
  float* keys_ = nullptr;    // [groups][head_dim][tokens], widened
  float* values_ = nullptr;  // [groups][tokens][head_dim], widened
  const QueryTile* upcoming_ = nullptr;
};

// ---- all workers -----------------------------------------------------------------------------------------

// Split tiles' partial states, and how many of their items are still to finish.
struct SplitState {
  std::vector<size_t> offsets;  // per tile, into states; unused for whole tiles
  std::unique_ptr<std::atomic<int>[]> remaining;
  std::vector<float> states;
};

template <class Layout>
void attend(const Problem& p) {
  thread_local Plan plan;
  make_plan(p, num_threads(), plan);
  int max_rows = p.group;
  for (const QueryTile& tile : plan.tiles) {
    max_rows = tile.num_tokens * p.group > max_rows ? tile.num_tokens * p.group : max_rows;
  }
  thread_local SplitState split;
  if (plan.items.size() > plan.tiles.size()) {
    split.offsets.assign(plan.tiles.size(), 0);
    split.remaining.reset(new std::atomic<int>[plan.tiles.size()]);
    for (size_t i = 0; i < plan.tiles.size(); ++i) split.remaining[i] = 0;
    size_t floats = 0;
    for (const Item& item : plan.items) {
      const QueryTile& tile = plan.tiles[item.tile];
      if (split.remaining[item.tile]++ == 0) {
        split.offsets[item.tile] = floats;
      }
      floats += (item.last_partition - item.first_partition) *
                state_floats(tile.num_tokens * p.group, padded_dim(p.head_dim));
    }
    if (split.states.size() < floats) split.states.resize(floats);
  }
  const Plan& work = plan;
  SplitState& parts = split;
  std::atomic<size_t> next{0};
  on_workers(work.num_workers, [&](int) {
    thread_local Scratch scratch;
    Worker<Layout> worker(p, scratch, max_rows);
    for (size_t i = next.fetch_add(1); i < work.items.size(); i = next.fetch_add(1)) {
      const Item& item = work.items[i];
      const QueryTile& tile = work.tiles[item.tile];
      const size_t following = next.load(std::memory_order_relaxed);
      worker.expect(following < work.items.size() ? &work.tiles[work.items[following].tile] : nullptr);
      if (item.last_partition - item.first_partition == tile.last_partition - tile.first_partition) {
        worker.run_whole(tile);
        continue;
      }
      float* states = parts.states.data() + parts.offsets[item.tile];
      worker.run_part(tile, item.first_partition, item.last_partition, states);
      if (parts.remaining[item.tile].fetch_sub(1) == 1) worker.combine(tile, states);
    }
  });
}

// ---- the op ----------------------------------------------------------------------------------------------

// Consecutive tokens of a step that lie side by side in one group of the cache.
struct Run {
  int64_t first;  // row of k and v
  int count;
  int place;      // in the group
};

// Keys become columns of the group, in units of four bytes; whole vectors of columns are transposed in registers.
void write_keys(const uint32_t* rows, int64_t row_stride, const Run& run, int tokens, int num_units, uint32_t* group) {
  for (int i = 0; i < run.count;) {
    const int place = run.place + i;
    const uint32_t* row = rows + i * row_stride;
    int unit = 0;
    const bool is_vector = place % kWidth == 0 && run.count - i >= kWidth;
    for (; is_vector && unit + kWidth <= num_units; unit += kWidth) {
      F32 square[kWidth];
      for (int t = 0; t < kWidth; ++t) square[t] = load(reinterpret_cast<const float*>(row + t * row_stride + unit));
      transpose(square);
      float* into = reinterpret_cast<float*>(group + unit * tokens + place);
      for (int u = 0; u < kWidth; ++u) store(into + u * tokens, square[u]);
    }
    const int columns = is_vector ? kWidth : 1;
    for (int t = 0; t < columns; ++t) {
      for (int u = unit; u < num_units; ++u) group[u * tokens + place + t] = row[t * row_stride + u];
    }
    i += columns;
  }
}

// 16-bit values become every other element of a group's row; two tokens that share a row are written as one.
void write_pairs(const uint16_t* rows, int64_t row_stride, const Run& run, int head_dim, uint16_t* group) {
  for (int i = 0; i < run.count;) {
    const int place = run.place + i;
    const uint16_t* row = rows + i * row_stride;
    uint16_t* into = group + place / 2 * 2 * head_dim + place % 2;
    if (place % 2 != 0 || i + 1 == run.count) {
      for (int d = 0; d < head_dim; ++d) into[2 * d] = row[d];
      ++i;
      continue;
    }
    const uint16_t* odd = row + row_stride;
    int d = 0;
    for (; d + kWidth <= head_dim; d += kWidth) {  // any 16 bits: BFloat16 names the load that leaves them as they are
      const F32 pairs = pair_up(load(reinterpret_cast<const BFloat16*>(row + d)),
                                load(reinterpret_cast<const BFloat16*>(odd + d)));
      store(reinterpret_cast<float*>(into + 2 * d), pairs);
    }
    for (; d < head_dim; ++d) {
      into[2 * d] = row[d];
      into[2 * d + 1] = odd[d];
    }
    i += 2;
  }
}

void write_run(const Problem& p, const Run& run, int64_t block, int64_t offset) {
  const int tokens = group_tokens(p.block_size);
  const auto row_of = [&](const Rows& rows, int head) {
    return rows.data + (run.first * rows.token_stride + head * rows.head_stride) * p.element_bytes;
  };
  const auto group_of = [&](const Cache& cache, int head) {
    return cache.data + (block * cache.block_stride + head * cache.head_stride + offset * p.head_dim) * p.element_bytes;
  };
  const int units = 4 / p.element_bytes;  // elements of one
  for (int head = 0; head < p.num_kv_heads; ++head) {
    write_keys(reinterpret_cast<const uint32_t*>(row_of(p.k, head)), p.k.token_stride / units, run, tokens,
               p.head_dim / units, reinterpret_cast<uint32_t*>(group_of(p.k_cache, head)));
    char* values = group_of(p.v_cache, head);
    if (p.element_bytes == 2) {
      write_pairs(reinterpret_cast<const uint16_t*>(row_of(p.v, head)), p.v.token_stride, run, p.head_dim,
                  reinterpret_cast<uint16_t*>(values));
      continue;
    }
    const size_t row_bytes = static_cast<size_t>(p.head_dim) * p.element_bytes;
    for (int i = 0; i < run.count; ++i) {
      std::memcpy(values + (run.place + i) * row_bytes, row_of(p.v, head) + i * p.v.token_stride * p.element_bytes,
                  row_bytes);
    }
  }
}

void write_tokens(const Problem& p, int64_t begin, int64_t end) {
  const int tokens = group_tokens(p.block_size);
  for (int64_t token = begin; token < end;) {
    const int64_t slot = p.slot_mapping[token];
    const int64_t offset = slot % p.block_size;
    Run run{token, 1, static_cast<int>(offset % tokens)};
    while (token + run.count < end && run.place + run.count < tokens &&
           p.slot_mapping[token + run.count] == slot + run.count) {
      ++run.count;
    }
    write_run(p, run, slot / p.block_size, offset - run.place);
    token += run.count;
  }
}

void write_cache(const Problem& p) {
  const int64_t bytes = 2 * p.num_tokens * p.num_kv_heads * p.head_dim * p.element_bytes;
  const int workers = bytes < kParallelWriteBytes ? 1 : num_threads();
  on_workers(workers, [&](int worker) {
    const int64_t begin = p.num_tokens * worker / workers;
    const int64_t end = p.num_tokens * (worker + 1) / workers;
    write_tokens(p, begin, end);
  });
}

void check_metadata(const Problem& p, int64_t table_width) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    OSTINATO_CHECK(p.slot_mapping[token] >= 0 && p.slot_mapping[token] < p.num_blocks * p.block_size,
                   "paged_attention: slot_mapping[" + std::to_string(token) + "] = " +
                       std::to_string(p.slot_mapping[token]) + " is outside of the cache's " +
                       std::to_string(p.num_blocks * p.block_size) + " slots");
  }
  OSTINATO_CHECK(p.query_start_loc[0] == 0, "paged_attention: query_start_loc must begin with 0");
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    const int64_t length = p.seq_lens[seq];
    OSTINATO_CHECK(queries >= 0 && p.query_start_loc[seq + 1] <= p.num_tokens,
                   "paged_attention: query_start_loc must rise and stay within " +
                       std::to_string(p.num_tokens) + " tokens, sequence " + std::to_string(seq));
    if (queries == 0) continue;
    OSTINATO_CHECK(queries <= length && length <= table_width * p.block_size,
                   "paged_attention: seq_lens[" + std::to_string(seq) + "] = " + std::to_string(length) +
                       " must be in [" + std::to_string(queries) + ", " +
                       std::to_string(table_width * p.block_size) + "]");
    for (int64_t i = 0; i * p.block_size < length; ++i) {
      const int64_t block = p.block_table[seq * p.block_table_stride + i];
      OSTINATO_CHECK(block >= 0 && block < p.num_blocks,
                     "paged_attention: block_table[" + std::to_string(seq) + ", " + std::to_string(i) +
                         "] = " + std::to_string(block) + " is outside of the cache's " +
                         std::to_string(p.num_blocks) + " blocks");
    }
  }
}

Rows rows_of(const Tensor& x) { return {x.as<char>(), x.strides[0], x.strides[1]}; }

Cache cache_of(const Tensor& x) { return {x.as<char>(), x.strides[0], x.strides[1]}; }

void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                   const Tensor& v_cache) {
  OSTINATO_CHECK(q.dim == 3 && k.dim == 3 && v.dim == 3 && k_cache.dim == 4 && v_cache.dim == 4,
                 "paged_attention: q, k, v must be [T, H, D] and the caches [num_blocks, Hkv, block_size, D]");
  OSTINATO_CHECK(q.dtype == k.dtype && q.dtype == v.dtype && q.dtype == k_cache.dtype &&
                     q.dtype == v_cache.dtype,
                 "paged_attention: q, k, v and the caches must have one dtype");
  const int64_t head_dim = q.sizes[2];
  OSTINATO_CHECK(head_dim % 8 == 0 && head_dim >= 8 && head_dim <= kMaxHeadDim,
                 "paged_attention: head_dim must be a multiple of 8 up to 256, got " +
                     std::to_string(head_dim));
  OSTINATO_CHECK(k_cache.sizes[2] % kMinGroup == 0, "paged_attention: block_size must be a multiple of 8, got " +
                                                     std::to_string(k_cache.sizes[2]));
  for (const Tensor* x : {&k, &v}) {
    OSTINATO_CHECK(x->sizes[0] == q.sizes[0] && x->sizes[1] == k_cache.sizes[1] && x->sizes[2] == head_dim,
                   "paged_attention: k and v must be [T, Hkv, D] with q's T and D and the cache's Hkv");
  }
  for (int i = 0; i < 4; ++i) {
    OSTINATO_CHECK(k_cache.sizes[i] == v_cache.sizes[i], "paged_attention: the caches differ in shape");
  }
  OSTINATO_CHECK(k_cache.sizes[3] == head_dim && q.sizes[1] % k.sizes[1] == 0,
                 "paged_attention: the caches need q's head_dim, and q's heads a multiple of k's");
  for (const Tensor* x : {&q, &k, &v, &k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[x->dim - 1] == 1, "paged_attention: the last dimension must be contiguous");
  }
  for (const Tensor* x : {&k, &v}) {
    for (int i = 0; i < 2; ++i) {
      OSTINATO_CHECK(x->sizes[i] <= 1 || x->strides[i] % 2 == 0, "paged_attention: strides of k and v must be even");
    }
  }
  for (const Tensor* x : {&k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[2] == head_dim, "paged_attention: a head's part of a block must be contiguous");
  }
}

Problem describe_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                         const Tensor& v_cache) {
  Problem p{};
  p.num_tokens = q.sizes[0];
  p.num_blocks = k_cache.sizes[0];
  p.num_heads = static_cast<int>(q.sizes[1]);
  p.num_kv_heads = static_cast<int>(k.sizes[1]);
  p.group = p.num_heads / p.num_kv_heads;
  p.head_dim = static_cast<int>(q.sizes[2]);
  p.block_size = static_cast<int>(k_cache.sizes[2]);
  p.element_bytes = q.dtype == DType::float32 ? 4 : 2;
  p.q = rows_of(q);
  p.k = rows_of(k);
  p.v = rows_of(v);
  p.k_cache = cache_of(k_cache);
  p.v_cache = cache_of(v_cache);
  return p;
}

LogitScaling scaling_of(double scale, double soft_cap) {
  constexpr double log2_e = 1.4426950408889634;
  if (soft_cap == 0.0) return {static_cast<float>(scale * log2_e), 0.0f};
  return {static_cast<float>(scale / soft_cap), static_cast<float>(soft_cap * log2_e)};
}

void zero_padding(const Problem& p) {
  const int64_t row_bytes = static_cast<int64_t>(p.num_heads) * p.head_dim * p.element_bytes;
  const int64_t used = p.query_start_loc[p.num_seqs];
  std::memset(p.out + used * row_bytes, 0, (p.num_tokens - used) * row_bytes);
}

// The schema ends with `str backend`; another one than this is handed to the Python kernel.
constexpr int kBackendArgument = 13;

bool is_for_this_backend(StableIValue argument) {
  const char* name;
  torch_string_c_str(reinterpret_cast<StringHandle>(argument), &name);
  return std::strcmp(name, "cpu") == 0;
}

void paged_attention(Call& call) {
  const Tensor q = call.tensor(), k = call.tensor(), v = call.tensor();
  const Tensor k_cache = call.tensor(), v_cache = call.tensor();
  const Tensor query_start_loc = call.tensor(), seq_lens = call.tensor(), block_table = call.tensor();
  const Tensor slot_mapping = call.tensor();
  call.tensor();  // plan: this kernel has none
  const double scale = call.number();
  const int64_t window = call.integer();
  const double soft_cap = call.number();
  call.text();

  check_tensors(q, k, v, k_cache, v_cache);
  OSTINATO_CHECK(query_start_loc.dtype == DType::int32 && seq_lens.dtype == DType::int32 &&
                     block_table.dtype == DType::int32 && slot_mapping.dtype == DType::int64,
                 "paged_attention: query_start_loc, seq_lens, block_table must be int32, slot_mapping int64");
  OSTINATO_CHECK(block_table.dim == 2 && block_table.strides[1] == 1 && query_start_loc.strides[0] == 1 &&
                     seq_lens.strides[0] == 1 && slot_mapping.strides[0] == 1 &&
                     query_start_loc.sizes[0] == seq_lens.sizes[0] + 1 &&
                     block_table.sizes[0] == seq_lens.sizes[0] && slot_mapping.sizes[0] == q.sizes[0],
                 "paged_attention: metadata must be query_start_loc [S+1], seq_lens [S], block_table [S, B], "
                 "slot_mapping [T], contiguous");
  Problem p = describe_problem(q, k, v, k_cache, v_cache);
  p.num_seqs = seq_lens.sizes[0];
  p.query_start_loc = query_start_loc.as<int32_t>();
  p.seq_lens = seq_lens.as<int32_t>();
  p.block_table = block_table.as<int32_t>();
  p.block_table_stride = block_table.strides[0];
  p.slot_mapping = slot_mapping.as<int64_t>();
  p.scaling = scaling_of(scale, soft_cap);
  OSTINATO_CHECK(window >= 0, "paged_attention: sliding_window must be at least 0, got " + std::to_string(window));
  p.window = window > kMaxWindow ? 0 : static_cast<int>(window);
  check_metadata(p, block_table.sizes[1]);
  const Tensor out = call.empty(q.sizes, 3, q.dtype);
  p.out = out.as<char>();

  write_cache(p);
  zero_padding(p);
  if (q.dtype == DType::float32) {
    attend<FloatLayout<float>>(p);
  } else if (q.dtype == DType::float16) {
    attend<FloatLayout<Float16>>(p);
  } else {
    OSTINATO_CHECK(q.dtype == DType::bfloat16, "paged_attention: dtype must be float32, bfloat16 or float16");
#if OSTINATO_ISA >= 3
    attend<PairLayout>(p);
#else
    attend<FloatLayout<BFloat16>>(p);
#endif
  }
  call.give(out);
}

void boxed_paged_attention(StableIValue* stack, uint64_t, uint64_t) {
  if (!is_for_this_backend(stack[kBackendArgument])) {
    require_ok(torch_call_dispatcher("ostinato::paged_attention_in_python", "", stack, TORCH_ABI_VERSION),
               "run the chosen attention backend");
    return;
  }
  Call call(stack);
  paged_attention(call);
}

}  // namespace
}  // namespace ostinato::attention

OSTINATO_BOXED_KERNEL(paged_attention, ostinato::attention::boxed_paged_attention,
                      ostinato::attention::paged_attention);
