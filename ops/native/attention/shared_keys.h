// Finds sequences whose block tables name the same blocks, and computes their rows together.
//
// Requests with a common prefix read the same keys and values of the prefix cache. In a decode step each sequence has one
// row, so reading takes most of the time. A joined tile reads the keys and values of a shared partition once for the rows of
// all members. Every row has the same partitions and the same order of sums as alone, so its bits do not change.
//
// Similar: Juravsky et al., "Hydragen" (2024); Ye et al., "Cascade Inference" (FlashInfer, 2024). Both merge the states of
// a prefix and a suffix. Here the partitions of all rows are merged in order, whether they are shared or not.
#pragma once

#include "attention/query_tiles.h"

#include <algorithm>
#include <vector>

namespace ostinato::attention {

constexpr int kMaxJoinedRows = 32;  // a tile with more rows has enough work for each key that it reads

// A sequence whose tiles (one for each kv head) can become members of joined tiles.
struct Candidate {
  int seq;
  int first_tile;      // of kv head 0; the tiles of the other heads follow
  int num_partitions;  // leading partitions whose keys are all seen by all rows
};

class TileJoiner {
 public:
  TileJoiner(const Problem& p, Plan& plan) : p_(p), plan_(plan) {}

  void run() {
    if (p_.num_seqs < 2 || p_.window != 0 || p_.is_bidirectional) return;
    const int num_tiles = static_cast<int>(plan_.tiles.size());
    for (int i = 0, next; i < num_tiles; i = next) {
      const QueryTile& tile = plan_.tiles[i];
      for (next = i + 1; next < num_tiles && plan_.tiles[next].seq == tile.seq;) ++next;
      const int partitions = (tile.first_position + 1) / kPartition;
      const bool has_one_tile = (next - i) * tile.num_kv_heads == p_.num_kv_heads;  // for each kv head
      if (has_one_tile && partitions > 0 && tile.rows_of_head(p_.group) <= kMaxJoinedRows) {
        candidates_.push_back({tile.seq, i, partitions});
      }
    }
    join_range(0, static_cast<int>(candidates_.size()), 0);
  }

 private:
  // The first and the last block of a partition in a block table.
  int first_block(int partition) const { return partition * kPartition / p_.block_size; }
  int last_block(int partition) const { return ((partition + 1) * kPartition - 1) / p_.block_size; }

  int compare(const Candidate& a, const Candidate& b, int partition) const {
    const int32_t* first = p_.block_table + a.seq * p_.block_table_stride;
    const int32_t* second = p_.block_table + b.seq * p_.block_table_stride;
    for (int i = first_block(partition); i <= last_block(partition); ++i) {
      if (first[i] != second[i]) return first[i] < second[i] ? -1 : 1;
    }
    return 0;
  }

  // Joins candidates of a range from `partition` on, where their block tables agree.
  void join_range(int begin, int end, int partition) {
    const auto first = candidates_.begin();
    end = static_cast<int>(std::partition(first + begin, first + end, [&](const Candidate& one) {
                             return one.num_partitions > partition;
                           }) - first);
    if (end - begin < 2) return;
    std::sort(first + begin, first + end, [&](const Candidate& a, const Candidate& b) {
      return compare(a, b, partition) < 0;
    });
    for (int i = begin, next; i < end; i = next) {
      next = i + 1;
      while (next < end && compare(candidates_[i], candidates_[next], partition) == 0) ++next;
      if (next - i < 2) continue;
      int last = partition + 1;
      while (agree(i, next, last)) ++last;
      join(i, next, partition, last);
      join_range(i, next, last);
    }
  }

  // Whether all candidates of the range have this partition, in the same blocks.
  bool agree(int begin, int end, int partition) const {
    for (int i = begin; i < end; ++i) {
      if (candidates_[i].num_partitions <= partition || compare(candidates_[begin], candidates_[i], partition) != 0) {
        return false;
      }
    }
    return true;
  }

  // Adds joined tiles for partitions [first, last) of these candidates: for each kv head as many as their rows need.
  void join(int begin, int end, int first, int last) {
    int tokens = 0;
    for (int i = begin; i < end; ++i) tokens += plan_.tiles[candidates_[i].first_tile].num_tokens;
    const int count = end - begin;
    const int pieces = std::min((tokens * p_.group + kRowsPerItem - 1) / kRowsPerItem, count / 2);
    for (int piece = 0; piece < pieces; ++piece) {
      for (int kv_head = 0; kv_head < p_.num_kv_heads; ++kv_head) {
        add(begin + count * piece / pieces, begin + count * (piece + 1) / pieces, kv_head, first, last);
      }
    }
  }

  void add(int begin, int end, int kv_head, int first, int last) {
    QueryTile joined = plan_.tiles[tile_of(candidates_[begin], kv_head)];
    joined.kv_head = kv_head;
    joined.num_kv_heads = 1;
    joined.num_tokens = 0;
    joined.first_key = first * kPartition;
    joined.last_key = last * kPartition;
    joined.first_partition = joined.own_partition = first;
    joined.last_partition = last;
    joined.first_member = static_cast<int>(plan_.members.size());
    joined.num_members = end - begin;
    for (int i = begin; i < end; ++i) {
      const int index = tile_of(candidates_[i], kv_head);
      plan_.members.push_back(index);
      plan_.tiles[index].own_partition = last;
      joined.num_tokens += plan_.tiles[index].num_tokens;
    }
    plan_.tiles.push_back(joined);
  }

  int tile_of(const Candidate& candidate, int kv_head) const {
    return candidate.first_tile + kv_head / plan_.tiles[candidate.first_tile].num_kv_heads;
  }

  const Problem& p_;
  Plan& plan_;
  std::vector<Candidate> candidates_;
};

}  // namespace ostinato::attention
