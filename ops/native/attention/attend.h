// Attention over keys and values that lie in a cache, for every dtype that the kernels take.
#pragma once

#include "attention/worker.h"
#include "core/elements.h"

#include <atomic>
#include <vector>

namespace ostinato::attention {

// The states of tiles whose partitions are computed apart, and the number of items that have not finished.
struct SplitState {
  std::vector<size_t> offsets;  // per tile, into states; unused for other tiles
  std::vector<std::atomic<int>> remaining;
  std::vector<float> states;

  void prepare(const Problem& p, const Plan& plan) {
    size_t floats = 0;
    for (size_t i = 0; i < plan.tiles.size(); ++i) {
      const QueryTile& tile = plan.tiles[i];
      if (!tile.has_parts()) continue;
      if (floats == 0) {
        offsets.assign(plan.tiles.size(), 0);
        remaining = std::vector<std::atomic<int>>(plan.tiles.size());
      }
      remaining[i] = tile.num_items;
      offsets[i] = floats;
      floats += (tile.last_partition - tile.first_partition) *
                state_floats(tile.num_rows(p.group), padded_dim(p.value_dim));
    }
    if (states.size() < floats) states.resize(floats);
  }

  float* of(int tile) { return states.data() + offsets[tile]; }
};

template <class Layout>
void attend(const Problem& p) {
  thread_local Plan plan;
  make_plan(p, p.threads.count(), plan);
  int max_rows = p.group;
  for (const QueryTile& tile : plan.tiles) max_rows = std::max(max_rows, tile.num_rows(p.group));
  thread_local SplitState split;
  split.prepare(p, plan);
  const Plan& work = plan;
  SplitState& parts = split;
  std::atomic<size_t> next{0};
  p.threads.run(work.num_workers, [&](int) {
    thread_local Scratch scratch;
    Worker<Layout> worker(p, work, scratch, max_rows);
    for (size_t i = next.fetch_add(1); i < work.items.size(); i = next.fetch_add(1)) {
      const Item& item = work.items[i];
      const QueryTile& tile = work.tiles[item.tile];
      const size_t following = next.load(std::memory_order_relaxed);
      worker.expect(following < work.items.size() ? &work.tiles[work.items[following].tile] : nullptr);
      if (!tile.is_joined() && !tile.has_parts()) {
        worker.run_whole(tile);
        continue;
      }
      worker.run_part(item, [&](int part) { return parts.of(part); });
      for_tiles_of(work, item, [&](int part) {
        if (parts.remaining[part].fetch_sub(1) == 1) worker.combine(work.tiles[part], parts.of(part));
      });
    }
  });
}

// Runs `attend` with the layout for `dtype` (float32, float16 or bfloat16) and for the cache.
inline void attend_in(DType dtype, const Problem& p) {
#if OSTINATO_HAS(OSTINATO_FLOAT32)
  if (dtype == DType::float32 && !p.has_byte_cache) return attend<FloatLayout<float>>(p);
#endif
#if OSTINATO_HAS(OSTINATO_FLOAT16)
  if (dtype == DType::float16 && !p.has_byte_cache) return attend<FloatLayout<Float16>>(p);
#endif
#if OSTINATO_HAS(OSTINATO_BFLOAT16)
#if OSTINATO_AMX
  using Pairs = PairTileLayout;
#elif OSTINATO_ISA >= 3
  using Pairs = PairLayout;
#else
  using Pairs = WideningLayout;
#endif
  if (dtype == DType::bfloat16 && !p.has_byte_cache) return attend<Pairs>(p);
#endif
#if OSTINATO_HAS(OSTINATO_FLOAT32 | OSTINATO_BYTE_CACHE)
  if (dtype == DType::float32) return attend<ByteLayout<float>>(p);
#endif
#if OSTINATO_HAS(OSTINATO_FLOAT16 | OSTINATO_BYTE_CACHE)
  if (dtype == DType::float16) return attend<ByteLayout<Float16>>(p);
#endif
#if OSTINATO_HAS(OSTINATO_BFLOAT16 | OSTINATO_BYTE_CACHE)
#if OSTINATO_AMX
  using Bytes = ByteTileLayout;
#else
  using Bytes = ByteLayout<BFloat16>;
#endif
  if (dtype == DType::bfloat16) return attend<Bytes>(p);
#endif
  throw_not_compiled();
}

// Zeros for the rows past the last sequence.
inline void zero_padding(const Problem& p) {
  const int64_t row_bytes = static_cast<int64_t>(p.num_heads) * p.value_dim * p.element_bytes;
  const int64_t used = p.query_start_loc[p.num_seqs];
  std::memset(p.out + used * row_bytes, 0, (p.num_tokens - used) * row_bytes);
}

inline Rows rows_of(const Tensor& x) { return {x.as<char>(), x.strides[0], x.strides[1]}; }

}  // namespace ostinato::attention
