// The arguments of one call of paged attention, and the tiles of query rows that it computes.
#pragma once

#include "attention/softmax.h"
#include "attention/tile.h"
#include "core/threads.h"

#include <algorithm>
#include <vector>

namespace ostinato::attention {

constexpr int kPartition = 256;      // keys per partition, a multiple of kTile
constexpr int kRowsPerItem = 128;    // query rows that share a tile in cache
constexpr double kTileCost = 2.0;    // fetching a key and a value costs as much as computing this many rows with them
constexpr double kWorkerCost = 5e4;  // multiply-adds for which waking a thread pays
constexpr int kScaleBytes = 4;       // the scale of a token in a cache of 8 bits
// Tiles are cut into items of at most 1 / kItemsPerWorker of a worker's part, but not below one partition.
constexpr int kItemsPerWorker = 4;
// Tiles of few rows have several kv heads: with up to this many rows of a head, reading its keys and values takes most of the
// time. All rows of a tile together stay in the second level cache. There are enough tiles for each thread.
constexpr int kRowsOfFew = 16;
constexpr int kRowsTogether = 64;
constexpr int kTilesPerThread = 8;

struct Cache {  // within a head's part of a block: groups, see tile.h
  char* data;
  int64_t block_stride, head_stride;  // bytes
};

struct Rows {
  const char* data;
  int64_t token_stride, head_stride;  // elements
};

struct Problem {
  int64_t num_tokens, num_seqs, num_blocks;
  int num_heads, num_kv_heads;
  int group;  // query heads for each kv head
  int block_size, element_bytes;
  int head_dim;         // elements of a head of queries and keys
  int value_dim;        // elements of a head of values and of the output
  bool has_byte_cache;  // keys and values of 8 bits with scales
  int key_bytes, value_bytes;  // of a token's key, and of its value, of one head in the cache
  Rows q, k, v;
  Cache k_cache, v_cache;
  char* out;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int64_t* slot_mapping;
  LogitScaling scaling;
  bool is_bidirectional;  // every row sees all keys of its sequence; then there is no window
  const int32_t* visible_ends;  // [num_tokens] or null: each row sees the keys before this index too; 0 = no more
  int window;  // keys that a row sees, its own included; -C = keys of its own chunk of C tokens; 0 = all
  const float* alibi_slopes;  // [num_heads] or null
  const float* sinks;         // [num_heads] or null
  Threads threads;
};

// A tile of query tokens of one sequence and some kv heads, and the range of keys that its rows see. Rows are ordered by
// kv head, token and query head. Or a joined tile: the rows of one kv head of several such tiles, its members, against
// partitions of keys that the members share (shared_keys.h).
struct QueryTile {
  int seq;              // of a joined tile: the first member's
  int kv_head;          // the first one
  int num_kv_heads;
  int64_t first_token;  // row of q
  int num_tokens;
  int first_position;   // the position of first_token in its sequence
  int first_key, last_key;
  int first_partition, last_partition;
  int own_partition;    // partitions before it are computed by joined tiles
  int num_items;        // items that compute a part of this tile
  int first_member, num_members;  // in Plan::members; num_members is 0 except in a joined tile

  bool is_joined() const { return num_members > 0; }
  // Rows of a kv head, and of all.
  int rows_of_head(int group) const { return num_tokens * group; }
  int num_rows(int group) const { return num_kv_heads * num_tokens * group; }
  // Whether its partitions are computed apart, each into a state of its own.
  bool has_parts() const { return num_items > 1 || own_partition > first_partition; }
};

struct Item {
  int tile;
  int first_partition, last_partition;
};

struct Plan {
  std::vector<QueryTile> tiles;
  std::vector<int> members;  // tiles of each joined tile
  std::vector<Item> items;
  int num_workers = 1;
};

// The groups of the next kv head.
template <class Unit>
TileGroups<Unit> next_head(const Problem& p, TileGroups<Unit> groups, int tokens) {
  for (int i = 0; i < kTile / tokens; ++i) {
    if (groups.keys[i] == reinterpret_cast<const Unit*>(kZeroGroup)) continue;
    groups.keys[i] += p.k_cache.head_stride / static_cast<int64_t>(sizeof(Unit));
    groups.values[i] += p.v_cache.head_stride / static_cast<int64_t>(sizeof(Unit));
  }
  return groups;
}

// The first key that the row at `position` sees.
inline int first_seen_from(const Problem& p, int position) {
  if (p.window < 0) return position - position % -p.window;
  return p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
}

// The token of a query row in its sequence, and one past the last key that it sees.
struct Place {
  int position;
  int end;
};

// The place of token `t` of a tile that is not joined.
inline Place place_of(const Problem& p, const QueryTile& tile, int t) {
  const int position = tile.first_position + t;
  if (p.is_bidirectional) return {position, p.seq_lens[tile.seq]};
  if (p.visible_ends == nullptr) return {position, position + 1};
  return {position, std::max(position + 1, static_cast<int>(p.visible_ends[tile.first_token + t]))};
}

// For `count` rows of the kv head `kv_head` of a tile, from its row `row` on: the keys that each row sees among the
// `num_keys` keys from `first_key` on, and its ALiBi if the model has ALiBi. `places` has the place of each token of the
// tile. Returns the keys from the first to the last one that a row sees, with an end of 0 if no row sees a key.
inline Visible look(const Problem& p, int kv_head, const Place* places, int first_key, int num_keys, int row, int count,
                    Visible* visible, Alibi* alibi) {
  Visible seen{num_keys, 0};
  int token = row / p.group, head = row % p.group;
  for (int r = 0; r < count; ++r) {
    const auto [position, end] = places[token];
    const int last = end - first_key;
    const int first = first_seen_from(p, position) - first_key;
    visible[r] = {first > 0 ? first : 0, last < num_keys ? last : num_keys};
    if (p.alibi_slopes != nullptr) {
      alibi[r] = {p.alibi_slopes[kv_head * p.group + head] * kLog2E, static_cast<float>(first_key - position)};
    }
    seen.first = visible[r].first < seen.first ? visible[r].first : seen.first;
    seen.last = visible[r].last > seen.last ? visible[r].last : seen.last;
    if (++head == p.group) {
      head = 0;
      ++token;
    }
  }
  if (seen.first >= num_keys) seen.last = 0;
  return seen;
}

// The cost of the partitions that the tile's own items compute.
inline double cost_of(const Problem& p, const QueryTile& tile) {
  const int first_key = std::max(tile.first_key, tile.own_partition * kPartition);
  return tile.num_kv_heads * (tile.rows_of_head(p.group) + kTileCost) * (tile.last_key - first_key);
}

// The most kv heads of a tile that leave enough tiles for the threads. In a block, the keys of all heads lie one after the
// other. So a tile of several heads reads long pieces of memory, and the places of its keys are computed once.
inline int most_heads(const Problem& p, int threads) {
  if (threads == 1) return p.num_kv_heads;
  int64_t partitions = 0;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) partitions += (p.seq_lens[seq] + kPartition - 1) / kPartition;
  return static_cast<int>(partitions * p.num_kv_heads / (threads * kTilesPerThread));
}

// How many kv heads the tiles of a sequence have, with `rows` rows each: a divisor of the model's, at most `most`.
inline int heads_of_tile(const Problem& p, int rows, int most) {
  if (rows > kRowsOfFew) return 1;
  int heads = std::min({p.num_kv_heads, most, kRowsTogether / rows});
  while (heads > 1 && p.num_kv_heads % heads != 0) --heads;
  return std::max(heads, 1);
}

// KV heads are the outer loop, so that one head's keys and values stay in cache from tile to tile. The last tokens
// come first, because they see the most keys and the shortest items should run last.
inline void add_tiles(const Problem& p, int seq, int most, Plan& plan) {
  const int begin = p.query_start_loc[seq];
  const int num_queries = p.query_start_loc[seq + 1] - begin;
  const int length = p.seq_lens[seq];
  const int per_tile = p.group >= kRowsPerItem ? 1 : kRowsPerItem / p.group;
  const int heads = heads_of_tile(p, num_queries * p.group, most);
  for (int kv_head = 0; kv_head < p.num_kv_heads; kv_head += heads) {
    for (int first = (num_queries - 1) / per_tile * per_tile; first >= 0; first -= per_tile) {
      QueryTile tile{};
      tile.seq = seq;
      tile.kv_head = kv_head;
      tile.num_kv_heads = heads;
      tile.first_token = begin + first;
      tile.num_tokens = num_queries - first < per_tile ? num_queries - first : per_tile;
      tile.first_position = length - num_queries + first;
      for (int t = 0; t < tile.num_tokens; ++t) tile.last_key = std::max(tile.last_key, place_of(p, tile, t).end);
      tile.first_key = first_seen_from(p, tile.first_position);
      tile.first_partition = tile.first_key / kPartition;
      tile.last_partition = (tile.last_key + kPartition - 1) / kPartition;
      tile.own_partition = tile.first_partition;
      plan.tiles.push_back(tile);
    }
  }
}

}  // namespace ostinato::attention
