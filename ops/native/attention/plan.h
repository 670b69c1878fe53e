// How one call of paged attention is cut into items for the threads.
//
// An item is a sequence, one or more kv heads, a tile of its query tokens (with all query heads of the group, so that
// keys and values are read once), and a range of KV partitions. Sequences with a common prefix share the items of its
// partitions. The division into items depends on the batch and on the number of threads. The results do not
// (see attention.cpp).
#pragma once

#include "attention/query_tiles.h"
#include "attention/shared_keys.h"

namespace ostinato::attention {

// Calls run(tile) for each tile to whose rows the item contributes.
template <class Run>
void for_tiles_of(const Plan& plan, const Item& item, const Run& run) {
  const QueryTile& tile = plan.tiles[item.tile];
  if (!tile.is_joined()) return run(item.tile);
  for (int i = 0; i < tile.num_members; ++i) run(plan.members[tile.first_member + i]);
}

inline void make_plan(const Problem& p, int threads, Plan& plan) {
  plan.tiles.clear();
  plan.members.clear();
  plan.items.clear();
  const int heads = most_heads(p, threads);
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    if (p.query_start_loc[seq + 1] > p.query_start_loc[seq]) add_tiles(p, seq, heads, plan);
  }
  TileJoiner(p, plan).run();
  double total = 0.0;
  for (const QueryTile& tile : plan.tiles) total += cost_of(p, tile);
  const double workers = total * (p.head_dim + p.value_dim) / 2 / kWorkerCost;
  plan.num_workers = workers < 1.0 ? 1 : workers < threads ? static_cast<int>(workers) : threads;
  const double limit = plan.num_workers == 1 ? total : total / (plan.num_workers * kItemsPerWorker);
  for (int i = 0; i < static_cast<int>(plan.tiles.size()); ++i) {
    const QueryTile& tile = plan.tiles[i];
    const int first = tile.own_partition, partitions = tile.last_partition - first;
    if (partitions == 0) continue;
    int pieces = static_cast<int>(cost_of(p, tile) / limit + 0.99);
    pieces = pieces < 1 ? 1 : pieces > partitions ? partitions : pieces;
    for (int piece = 0; piece < pieces; ++piece) {
      plan.items.push_back({i, first + partitions * piece / pieces, first + partitions * (piece + 1) / pieces});
    }
  }
  for (const Item& item : plan.items) {
    for_tiles_of(plan, item, [&](int tile) { ++plan.tiles[tile].num_items; });
  }
}

}  // namespace ostinato::attention
