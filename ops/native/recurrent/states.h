// What the recurrent kernels share: the sequences of a step with their slots, checks of arguments, and work items.
//
// ops/recurrent/states.py says what slots are. A work item is one sequence and some of its heads or channels. It takes
// the tokens one after the other and each sum in one fixed order. So the bits of a sequence do not depend on the steps
// that its tokens are divided into, on other sequences, or on threads.
#pragma once

#include "linear/tasks.h"
#include "rows/each_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ostinato::recurrent {

constexpr int64_t kMaxWidth = 16;  // of a convolution

// The tokens of one sequence in a step, and its slots.
struct Sequence {
  int64_t begin;  // first row of the step
  int64_t count;  // tokens
  int64_t read;   // 0 = the sequence begins
  int64_t write;
  int64_t checkpoint;         // 0 = none
  int64_t checkpoint_tokens;  // tokens before the checkpoint
};

// The sequences of a step that have tokens.
struct Step {
  const Sequence* sequences;
  int64_t count;
  int64_t num_rows;  // rows after these are padding
};

// Calls body(first token, token after the last, slot to write after them) for the tokens before a checkpoint, if there
// is one, and for those after it.
template <class Body>
OSTINATO_INLINE void for_parts(const Sequence& sequence, const Body& body) {
  int64_t first = 0;
  if (sequence.checkpoint != 0) {
    first = sequence.checkpoint_tokens;
    body(int64_t{0}, first, sequence.checkpoint);
  }
  body(first, sequence.count, sequence.write);
}

// ---- checks ----------------------------------------------------------------------------------------------

// Checks of one op's arguments. Errors name the op and the argument.
struct Checks {
  const char* op;
  DType dtype;  // of the op's input

  void rows(const char* name, const Tensor& x, int64_t columns) const {
    OSTINATO_CHECK(dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16, op, ": ", name,
                   " must be float32, bfloat16 or float16");
    OSTINATO_CHECK(x.dtype == dtype && x.dim == 2 && x.sizes[1] == columns && is_contiguous(x, 1), op, ": ", name,
                   " must be [T, ", columns, "] in the input's dtype with contiguous rows");
  }
  // A parameter in the dtype of the input or float32.
  void parameter(const char* name, const Tensor& x, int64_t count) const {
    OSTINATO_CHECK((x.dtype == dtype || x.dtype == DType::float32) && x.dim == 1 && x.sizes[0] == count &&
                       is_contiguous(x),
                   op, ": ", name, " must be a contiguous vector of ", count, " elements, float32 or in the input's dtype");
  }
  void floats(const char* name, const Tensor& x, int64_t count) const {
    OSTINATO_CHECK(x.dtype == DType::float32 && x.dim == 1 && x.sizes[0] == count && is_contiguous(x), op, ": ", name,
                   " must be a contiguous vector of ", count, " float32");
  }
  void convolution(const Tensor& weight, const Tensor& bias, int64_t channels) const {
    OSTINATO_CHECK((weight.dtype == dtype || weight.dtype == DType::float32) && weight.dim == 2 &&
                       weight.sizes[0] == channels && is_contiguous(weight),
                   op, ": conv_weight must be contiguous [", channels, ", W], float32 or in the input's dtype");
    OSTINATO_CHECK(weight.sizes[1] >= 1 && weight.sizes[1] <= kMaxWidth, op, ": the width of conv_weight = ",
                   weight.sizes[1], " must be in [1, ", kMaxWidth, "]");
    if (bias.exists()) parameter("conv_bias", bias, channels);
  }
  void states(const Tensor& conv_state, int64_t channels, int64_t width) const {
    OSTINATO_CHECK(conv_state.dtype == dtype && conv_state.dim == 3 && conv_state.sizes[0] >= 1 &&
                       conv_state.sizes[1] == width - 1 && conv_state.sizes[2] == channels &&
                       is_contiguous(conv_state, 1),
                   op, ": conv_state must be [slots, ", width - 1, ", ", channels,
                   "] in the input's dtype with contiguous slots");
  }
  void state(const Tensor& state, const Tensor& conv_state) const {
    OSTINATO_CHECK(state.dtype == DType::float32 && state.dim == 4 && state.num_elements() > 0 &&
                       state.sizes[0] == conv_state.sizes[0] && is_contiguous(state, 1),
                   op, ": state must be float32 with four dimensions, contiguous slots and as many of them as conv_state");
  }
};

inline void check_slot(const char* op, int64_t sequence, int64_t column, int64_t slot, int64_t num_slots) {
  OSTINATO_CHECK(slot >= 0 && slot < num_slots, op, ": state_slots[", sequence, ", ", column, "] = ", slot,
                 " must be in [0, ", num_slots, ")");
}

// Checks that no slot but 0 is written by two sequences, or read by one and written by another.
inline void check_owners(Call& call, const char* op, const Step& step, int64_t num_slots) {
  int32_t* writer = call.workspace<int32_t>(num_slots);
  std::fill(writer, writer + num_slots, -1);
  for (int32_t s = 0; s < step.count; ++s) {
    for (const int64_t slot : {step.sequences[s].write, step.sequences[s].checkpoint}) {
      OSTINATO_CHECK(slot == 0 || writer[slot] < 0, op, ": slot ", slot, " is written twice in a step");
      writer[slot] = s;
    }
  }
  for (int32_t s = 0; s < step.count; ++s) {
    const int64_t slot = step.sequences[s].read;
    OSTINATO_CHECK(slot == 0 || writer[slot] < 0 || writer[slot] == s, op, ": slot ", slot,
                   " is read by one sequence and written by another in a step");
  }
}

// The sequences with tokens of the arguments `query_start_loc` and `state_slots`.
inline Step read_step(Call& call, const char* op, const Tensor& starts, const Tensor& slots, int64_t num_rows,
                      int64_t num_slots) {
  OSTINATO_CHECK(slots.dtype == DType::int32 && slots.dim == 2 && slots.sizes[1] == 4 && is_contiguous(slots), op,
                 ": state_slots must be contiguous int32 [S, 4]");
  const int64_t num_seqs = slots.sizes[0];
  OSTINATO_CHECK(starts.dtype == DType::int32 && starts.dim == 1 && starts.sizes[0] == num_seqs + 1 &&
                     is_contiguous(starts),
                 op, ": query_start_loc must be a contiguous vector of ", num_seqs + 1, " int32");
  const int32_t* start = starts.as<int32_t>();
  OSTINATO_CHECK(start[0] == 0, op, ": query_start_loc[0] = ", start[0], " must be 0");
  Sequence* sequences = call.workspace<Sequence>(num_seqs);
  Step step{sequences, 0, start[num_seqs]};
  for (int64_t s = 0; s < num_seqs; ++s) {
    OSTINATO_CHECK(start[s + 1] >= start[s] && start[s + 1] <= num_rows, op, ": query_start_loc[", s + 1,
                   "] = ", start[s + 1], " must be in [", start[s], ", ", num_rows, "]");
    if (start[s + 1] == start[s]) continue;
    const int32_t* row = slots.as<int32_t>() + 4 * s;
    const Sequence sequence{start[s], start[s + 1] - start[s], row[0], row[1], row[2], row[3]};
    for (int64_t column = 0; column < 3; ++column) check_slot(op, s, column, row[column], num_slots);
    OSTINATO_CHECK(row[2] == 0 || (row[3] >= 1 && row[3] < sequence.count), op, ": state_slots[", s, ", 3] = ", row[3],
                   " must be in [1, ", sequence.count, ")");
    sequences[step.count++] = sequence;
  }
  check_owners(call, op, step, num_slots);
  return step;
}

// ---- memory ----------------------------------------------------------------------------------------------

// `count` floats of a tensor of any of the three dtypes, from element `first` on.
inline void widen(const Tensor& x, int64_t first, int64_t count, float* out) {
  with_element(x.dtype, [&]<class T>(T) {
    const T* from = x.as<T>() + first;
    columns(
        count, [&](int64_t c) { store(out + c, load(from + c)); }, [&](int64_t c) { out[c] = to_float(from[c]); });
  });
}

// A vector of which memory has only the first `count` elements if that is less than the width. The others are 0.
template <class T>
OSTINATO_INLINE F32 load_some(const T* from, int64_t count) {
  if (count >= F32::width) return load(from);
  T part[F32::width] = {};
  if (count > 0) std::memcpy(part, from, count * sizeof(T));
  return load(part);
}
template <class T>
OSTINATO_INLINE void store_some(T* to, F32 x, int64_t count) {
  if (count >= F32::width) return store(to, x);
  T part[F32::width];
  store(part, x);
  if (count > 0) std::memcpy(to, part, count * sizeof(T));
}

inline void zero_rows(const Tensor& out, int64_t first) {
  const int64_t row_bytes = out.sizes[1] * element_size(out.dtype);
  if (first < out.sizes[0]) std::memset(out.as<char>() + first * row_bytes, 0, (out.sizes[0] - first) * row_bytes);
}

// ---- work ------------------------------------------------------------------------------------------------

constexpr int64_t kMovedBytesPerWorker = 64 << 10;  // bytes of states and rows for which waking one more thread pays

// Asks for memory that is read soon. The processor's own prefetches find too little of a state: a pass reads several
// rows at once, and the next state lies elsewhere. With these, decodes are twice as fast.
OSTINATO_INLINE void prefetch(const float* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t byte = 0; byte < count * 4; byte += 64) __builtin_prefetch(line + byte, 0, 2);
}

// ---- functions -------------------------------------------------------------------------------------------

OSTINATO_INLINE F32 silu(F32 x) {
  const F32 exponent = min(x * broadcast(-1.442695041f), broadcast(120.0f));  // the largest argument of exp2
  return x / (broadcast(1.0f) + exp2(exponent));
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The sum of the squares of `count` floats.
OSTINATO_INLINE float sum_squares(const float* x, int64_t count) {
  F32 sum = broadcast(0.0f);
  for (int64_t c = 0; c < count; c += F32::width) {
    const F32 part = load_some(x + c, count - c);
    sum = fma(part, part, sum);
  }
  return reduce_sum(sum);
}

}  // namespace ostinato::recurrent
