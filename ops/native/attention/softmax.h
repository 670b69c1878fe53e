// The online softmax of a block of query rows over one tile of keys. It applies the scale, the soft cap, ALiBi and
// masks to the logits.
#pragma once

#include "attention/tile.h"

namespace ostinato::attention {

struct LogitScaling {
  float factor;    // turns a score into a base-2 logit, or into a multiple of the soft cap
  float soft_cap;  // in base-2 logits; 0 = none
};

constexpr float kLog2E = 1.4426950408889634f;

// ALiBi of one row: for the key with index i from the tile's first key on, `slope * (i + distance)` is added to the row's
// base-2 logit.
struct Alibi {
  float slope;
  float distance;  // from the query to the tile's first key
};

struct Places {
  constexpr Places() {
    for (int i = 0; i < kWidth; ++i) at[i] = static_cast<float>(i);
  }
  alignas(64) float at[kWidth] = {};
};
constexpr Places kPlaces;

// The scales of a tile's keys and values in a cache of 8 bits.
struct TileScales {
  alignas(64) float keys[kTile];
  alignas(64) float values[kTile];
};

// The keys of a tile that one row sees.
struct Visible {
  int first;
  int last;  // exclusive
};

// Applies the soft cap, ALiBi and the mask to the logits of a row and of the keys from index `place` on. If not
// `is_partial`, the row sees all keys.
OSTINATO_INLINE F32 change_logit(F32 logit, int place, float soft_cap, const Alibi* alibi, bool is_partial,
                                 const Visible& visible) {
  if (soft_cap != 0.0f) logit = tanh(logit) * broadcast(soft_cap);
  if (alibi != nullptr) {
    const F32 distance = load(kPlaces.at) + broadcast(alibi->distance + static_cast<float>(place));
    logit = fma(broadcast(alibi->slope), distance, logit);
  }
  if (is_partial) logit = keep_range(logit, visible.first - place, visible.last - place, broadcast(kMinusInfinity));
  return logit;
}

// Turns a block's scores into weights against the running maximum.
//   alibi [num_rows] or null; scores [num_rows][kTile] in and scratch; weights [num_rows][factors of kTile keys] out;
//   maximum [num_rows], total [num_rows][kWidth] updated; rescale [num_rows] out: what the accumulators
//   must be multiplied by.
//   scales: of a cache of 8 bits, else null
template <class Layout>
void softmax_block(int num_rows, const Visible* visible, const Alibi* alibi, LogitScaling scaling,
                   const TileScales* scales, float* scores, typename Layout::Multiply::Factor* weights, float* maximum,
                   float* total, float* rescale) {
  constexpr int kVectors = kTile / kWidth;
  constexpr int kWeightStride = num_factors<typename Layout::Multiply>(kTile);
  alignas(64) float difference[16] = {};
  for (int r = 0; r < num_rows; ++r) {
    float* row = scores + r * kTile;
    const bool partial = visible[r].first > 0 || visible[r].last < kTile;
    F32 highest = broadcast(kLowest);
    for (int i = 0; i < kVectors; ++i) {
      F32 logit = load(row + i * kWidth) * broadcast(scaling.factor);
      if (scales != nullptr) logit = logit * load(scales->keys + i * kWidth);
      const Alibi* own = alibi == nullptr ? nullptr : alibi + r;
      logit = change_logit(logit, i * kWidth, scaling.soft_cap, own, partial, visible[r]);
      store(row + i * kWidth, logit);
      highest = max(highest, logit);
    }
    const float previous = maximum[r];
    const float current = reduce_max(highest);
    maximum[r] = current > previous ? current : previous;
    difference[r] = previous - maximum[r];
  }
  for (int r = 0; r < num_rows; r += kWidth) store(rescale + r, exp2(load(difference + r)));
  for (int r = 0; r < num_rows; ++r) {
    F32 p[kVectors];
    F32 sum = load(total + r * kWidth) * broadcast(rescale[r]);
    for (int i = 0; i < kVectors; ++i) {
      p[i] = exp2(load(scores + r * kTile + i * kWidth) - broadcast(maximum[r]));
      sum = sum + p[i];
      if (scales != nullptr) p[i] = p[i] * load(scales->values + i * kWidth);
    }
    store(total + r * kWidth, sum);
    Layout::weights(p, weights + r * kWeightStride);
  }
}

}  // namespace ostinato::attention
