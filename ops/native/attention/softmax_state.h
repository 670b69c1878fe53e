// The state of an online softmax: what rows have summed over some keys, and how two such states are merged.
#pragma once

#include "attention/tile.h"

#include <cstring>

namespace ostinato::attention {

// Softmax state of rows over some keys: the output is accumulator / total.
struct State {
  float* maximum;      // [rows]
  float* total;        // [rows]
  float* accumulator;  // [rows][padded_dim]
};

inline size_t state_floats(int rows, int padded_dim) { return static_cast<size_t>(rows) * (padded_dim + 2); }

inline State state_at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }

// The rows from `row` on.
inline State rows_from(State state, int row, int padded_dim) {
  return {state.maximum + row, state.total + row, state.accumulator + static_cast<size_t>(row) * padded_dim};
}

inline void clear(State state, int rows, int padded_dim) {
  for (int r = 0; r < rows; ++r) state.maximum[r] = kLowest;
  std::memset(state.total, 0, rows * sizeof(float));
  std::memset(state.accumulator, 0, static_cast<size_t>(rows) * padded_dim * sizeof(float));
}

// Adds the keys of `part` to `state`.
inline void merge(State state, State part, int rows, int padded_dim) {
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

inline void copy_rows(State from, int rows, int padded_dim, State to) {
  std::memcpy(to.maximum, from.maximum, rows * sizeof(float));
  std::memcpy(to.total, from.total, rows * sizeof(float));
  std::memcpy(to.accumulator, from.accumulator, static_cast<size_t>(rows) * padded_dim * sizeof(float));
}

}  // namespace ostinato::attention
