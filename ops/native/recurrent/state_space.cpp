// The op state_space (ops/recurrent/state_space.py).
//
// It has three passes over a step. The first convolves B and C, which the heads of a group share. In the second a work
// item is one sequence and one head; its state is taken in blocks of rows, which stay in the first level cache while
// they run over the tokens of a chunk. The third takes the norms, which are over all heads of a group.
#include "recurrent/convolution.h"

namespace ostinato::recurrent::state_space {
namespace {

constexpr int64_t kTokens = 64;          // of a chunk
constexpr int64_t kRowsAtOnce = 4;       // rows of a state that share the loads of B and C
constexpr int64_t kRowsAhead = 16;       // rows between those that are read from memory and those that are asked for
constexpr int64_t kBlockFloats = 4096;   // of a block of rows

struct Problem {
  Channels channels;
  Tensor projected, skip, norm_weight, state, out;
  Step step;
  const float* rates;  // exp(A)
  const float* dt_bias;
  int64_t num_heads, head_dim, state_size, num_groups;
  int64_t head_padded, state_padded;  // to whole vectors
  float norm_eps, least_step, largest_step;
  float* shared;  // B of all groups, then C of all groups, after the convolution: [T, 2 G, state_padded]
  float* gated;   // y * silu(z), [T, I]

  int64_t inner() const { return num_heads * head_dim; }
  int64_t shared_stride() const { return 2 * num_groups * state_padded; }
  float* state_of(int64_t slot, int64_t head) const {
    return state.as<float>() + slot * state.strides[0] + head * head_dim * state_size;
  }
};

// What a token does to a state.
struct TokenStep {
  float kept;        // the factor on the state
  const float* b;    // [N]
  const float* c;    // [N]
  const float* x;    // [P]: d x
  float* y;          // [P]
};

// state = kept * state + x^T b, y = state c, for kRows rows of n elements, whole vectors.
template <int kRows>
OSTINATO_INLINE void step_rows(const float* from, float* to, int64_t n, const TokenStep& token, int64_t row) {
  const F32 kept = broadcast(token.kept);
  F32 x[kRows], sum[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    x[r] = broadcast(token.x[row + r]);
    sum[r] = broadcast(0.0f);
  }
  for (int64_t c = 0; c < n; c += F32::width) {
    const F32 b = load(token.b + c), factor = load(token.c + c);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 state = fma(x[r], b, load(from + r * n + c) * kept);
      store(to + r * n + c, state);
      sum[r] = fma(state, factor, sum[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) token.y[row + r] = reduce_sum(sum[r]);
}

template <class T>
class Worker {
 public:
  explicit Worker(const Problem& problem) : p_(problem) {
    block_rows_ = std::max(kBlockFloats / p_.state_padded / kRowsAtOnce * kRowsAtOnce, kRowsAtOnce);
    const int64_t of_rows = p_.channels.width() + 1 + 3 * kTokens;
    taps_ = linear::scratch(of_rows * p_.head_padded + 2 * kTokens + block_rows_ * p_.state_padded);
    x_ = taps_ + (p_.channels.width() + 1) * p_.head_padded;
    scaled_ = x_ + kTokens * p_.head_padded;
    y_ = scaled_ + kTokens * p_.head_padded;
    steps_ = y_ + kTokens * p_.head_padded;
    kept_ = steps_ + kTokens;
    block_ = kept_ + kTokens;
  }

  // Items are in the order of heads, so that a worker loads the weights of a head's convolution once.
  void operator()(int64_t item) {
    const int64_t head = item / p_.step.count;
    if (head != head_) {
      load_taps(p_.channels.weight, p_.channels.bias, head * p_.head_dim, p_.head_dim, p_.head_padded, taps_);
    }
    head_ = head;
    const Sequence& sequence = p_.step.sequences[item % p_.step.count];
    const Inputs<T> inputs = p_.channels.inputs_of<T>(sequence);
    const float* from = source_of(item);
    next_ = source_of(item + 1);
    for_parts(sequence, [&](int64_t first, int64_t last, int64_t slot) {
      float* to = p_.state_of(slot, head);
      for (int64_t begin = first; begin < last; begin += kTokens, from = to) {
        run_chunk(inputs, sequence.begin, begin, std::min(begin + kTokens, last), from, to);
      }
    });
  }

 private:
  // The state that an item reads; null = zeros, or there is no such item.
  const float* source_of(int64_t item) const {
    if (item >= p_.num_heads * p_.step.count) return nullptr;
    const int64_t slot = p_.step.sequences[item % p_.step.count].read;
    return slot == 0 ? nullptr : p_.state_of(slot, item / p_.step.count);
  }

  // Tokens [begin, end) of the sequence with the first row `first_row`.
  void run_chunk(const Inputs<T>& inputs, int64_t first_row, int64_t begin, int64_t end, const float* from, float* to) {
    const int64_t count = end - begin, row = first_row + begin, padded = p_.head_padded;
    convolve(inputs, taps_, head_ * p_.head_dim, p_.head_dim, padded, begin, end, x_, padded);
    for (int64_t t = 0; t < count; ++t) {
      const T* steps = p_.projected.as<T>() + (row + t) * p_.projected.strides[0] + p_.inner() + p_.channels.count();
      const float step = softplus(to_float(steps[head_]) + p_.dt_bias[head_]);
      steps_[t] = std::min(std::max(step, p_.least_step), p_.largest_step);
      kept_[t] = std::exp(-p_.rates[head_] * steps_[t]);
      for (int64_t c = 0; c < padded; c += F32::width) {
        store(scaled_ + t * padded + c, load(x_ + t * padded + c) * broadcast(steps_[t]));
      }
    }
    for (int64_t r = 0; r < p_.head_dim; r += block_rows_) {
      advance_block(from, to, r, std::min(block_rows_, p_.head_dim - r), row, count);
    }
    for (int64_t t = 0; t < count; ++t) write_row(row + t, t);
  }

  // `count` tokens from row `token_row` of the step on, for rows [row, row + rows) of the head's state.
  void advance_block(const float* from, float* to, int64_t row, int64_t rows, int64_t token_row, int64_t count) {
    const int64_t n = p_.state_size, padded = p_.state_padded;
    float* target = to + row * n;
    const float* source = from == nullptr ? nullptr : from + row * n;
    const bool in_place = n == padded;
    float* state = in_place ? target : block_;
    if (source == nullptr) {
      std::memset(state, 0, rows * padded * sizeof(float));
      source = state;
    } else if (!in_place) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < padded; c += F32::width) {
          store(state + r * padded + c, load_some(source + r * n + c, n - c));
        }
      }
      source = state;
    }
    const int64_t group = head_ * p_.num_groups / p_.num_heads;
    for (int64_t t = 0; t < count; ++t, source = state) {
      const float* b = p_.shared + (token_row + t) * p_.shared_stride() + group * padded;
      const int64_t place = t * p_.head_padded + row;
      const TokenStep token{kept_[t], b, b + p_.num_groups * padded, scaled_ + place, y_ + place};
      int64_t r = 0;
      for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) {
        if (t == 0) prefetch_rows(from, row + r + kRowsAhead);
        step_rows<kRowsAtOnce>(source + r * padded, state + r * padded, padded, token, r);
      }
      for (; r < rows; ++r) step_rows<1>(source + r * padded, state + r * padded, padded, token, r);
    }
    if (in_place) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < n; c += F32::width) store_some(target + r * n + c, load(state + r * padded + c), n - c);
    }
  }

  // Asks for kRowsAtOnce rows of the head's state, or if it has fewer, of the next item's.
  OSTINATO_INLINE void prefetch_rows(const float* state, int64_t row) const {
    if (row >= p_.head_dim) {
      state = next_;
      row -= p_.head_dim;
    }
    if (state != nullptr) prefetch(state + row * p_.state_size, kRowsAtOnce * p_.state_size);
  }

  // (y + D x) * silu(z) of a token.
  void write_row(int64_t row, int64_t token) const {
    const T* z = p_.projected.as<T>() + row * p_.projected.strides[0] + head_ * p_.head_dim;
    const F32 skip = broadcast(p_.skip.as<float>()[head_]);
    float* out = p_.gated + row * p_.inner() + head_ * p_.head_dim;
    for (int64_t c = 0; c < p_.head_dim; c += F32::width) {
      const int64_t place = token * p_.head_padded + c, rest = p_.head_dim - c;
      const F32 y = fma(skip, load(x_ + place), load(y_ + place));
      store_some(out + c, y * silu(load_some(z + c, rest)), rest);
    }
  }

  const Problem& p_;
  float* taps_;                    // of the head's channels, see `load_taps`
  float *x_, *scaled_, *y_;        // of a chunk, [kTokens, head_padded]: x, d x, and state C
  float *steps_, *kept_, *block_;  // d and the factors on the state, of a chunk; a copy of a block of rows
  const float* next_ = nullptr;    // the state that the next item reads
  int64_t head_ = -1, block_rows_;
};

// The convolution of B and C, of all tokens.
template <class T>
void convolve_shared(Call& call, const Problem& p) {
  const int64_t width = p.channels.width(), taps_floats = (width + 1) * p.state_padded;
  float* taps = call.workspace<float>(taps_floats * 2 * p.num_groups);
  const auto channel_of = [&](int64_t part) { return p.inner() + part * p.state_size; };
  for (int64_t part = 0; part < 2 * p.num_groups; ++part) {
    load_taps(p.channels.weight, p.channels.bias, channel_of(part), p.state_size, p.state_padded,
              taps + part * taps_floats);
  }
  // Sequences are cut into runs of tokens, so that one long sequence is shared by all threads.
  const int64_t max_runs = p.step.num_rows / kTokens + p.step.count;
  int64_t* runs = call.workspace<int64_t>(2 * max_runs);  // index of the sequence, first token
  int64_t num_runs = 0;
  for (int64_t s = 0; s < p.step.count; ++s) {
    for (int64_t begin = 0; begin < p.step.sequences[s].count; begin += kTokens, ++num_runs) {
      runs[2 * num_runs] = s;
      runs[2 * num_runs + 1] = begin;
    }
  }
  for_each_row(call.threads(), NumParts{num_runs}, p.step.num_rows * p.shared_stride() * 8, [&](int64_t run) {
    const Sequence& sequence = p.step.sequences[runs[2 * run]];
    const int64_t begin = runs[2 * run + 1], end = std::min(begin + kTokens, sequence.count);
    const Inputs<T> inputs = p.channels.inputs_of<T>(sequence);
    float* out = p.shared + (sequence.begin + begin) * p.shared_stride();
    for (int64_t part = 0; part < 2 * p.num_groups; ++part) {
      convolve(inputs, taps + part * taps_floats, channel_of(part), p.state_size, p.state_padded, begin, end,
               out + part * p.state_padded, p.shared_stride());
    }
  });
}

// norm(gated) * norm_weight, over the values of each group.
template <class T>
void write_norms(Call& call, const Problem& p) {
  const int64_t inner = p.inner(), size = inner / p.num_groups;
  float* weight = call.workspace<float>(inner);
  widen(p.norm_weight, 0, inner, weight);
  for_each_row(call.threads(), NumParts{p.step.num_rows}, p.step.num_rows * inner * 6, [&](int64_t row) {
    for (int64_t group = 0; group < p.num_groups; ++group) {
      const float *from = p.gated + row * inner + group * size, *factor = weight + group * size;
      T* out = p.out.as<T>() + row * inner + group * size;
      const float mean = sum_squares(from, size) / static_cast<float>(size);
      const F32 scale = broadcast(1.0f / std::sqrt(mean + p.norm_eps));
      for (int64_t c = 0; c < size; c += F32::width) {
        store_some(out + c, load_some(from + c, size - c) * scale * load_some(factor + c, size - c), size - c);
      }
    }
  });
}

template <class T>
void run(Call& call, const Problem& p) {
  convolve_shared<T>(call, p);
  const int64_t items = p.num_heads * p.step.count, bytes = items * p.head_dim * p.state_size * 8;
  const Division division = divide<kMovedBytesPerWorker>(call.threads(), NumParts{items}, bytes);
  linear::for_each_task(division, [&] { return Worker<T>(p); });
  write_norms<T>(call, p);
}

// The arguments that the shapes of others follow from.
void read_sizes(const char* op, int64_t num_groups, Problem& p) {
  OSTINATO_CHECK(p.state.dim == 4, op, ": state must be [slots, H, P, N]");
  p.num_heads = p.state.sizes[1];
  p.head_dim = p.state.sizes[2];
  p.state_size = p.state.sizes[3];
  p.num_groups = num_groups;
  OSTINATO_CHECK(num_groups >= 1 && p.num_heads % num_groups == 0, op, ": num_groups = ", num_groups,
                 " must divide the ", p.num_heads, " heads of state");
  p.head_padded = round_up(p.head_dim, F32::width);
  p.state_padded = round_up(p.state_size, F32::width);
}

// state_space(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor a_log, Tensor dt_bias, Tensor skip,
//             Tensor norm_weight, Tensor(a!) conv_state, Tensor(b!) state, Tensor query_start_loc, Tensor state_slots,
//             int num_groups, float norm_eps, float least_step, float largest_step) -> Tensor
void state_space(Call& call) {
  constexpr const char* kOp = "state_space";
  Problem p{};
  p.projected = call.tensor();
  const Tensor conv_weight = call.tensor(), conv_bias = call.optional_tensor();
  const Tensor a_log = call.tensor(), dt_bias = call.tensor();
  p.skip = call.tensor();
  p.norm_weight = call.tensor();
  const Tensor conv_state = call.tensor();
  p.state = call.tensor();
  const Tensor starts = call.tensor(), slots = call.tensor();
  const int64_t num_groups = call.integer();
  p.norm_eps = static_cast<float>(call.number());
  p.least_step = static_cast<float>(call.number());
  p.largest_step = static_cast<float>(call.number());
  read_sizes(kOp, num_groups, p);
  const int64_t channels = p.inner() + 2 * num_groups * p.state_size;
  const Checks checks{kOp, p.projected.dtype};
  checks.rows("projected", p.projected, p.inner() + channels + p.num_heads);
  checks.convolution(conv_weight, conv_bias, channels);
  checks.floats("a_log", a_log, p.num_heads);
  checks.floats("dt_bias", dt_bias, p.num_heads);
  checks.floats("skip", p.skip, p.num_heads);
  checks.parameter("norm_weight", p.norm_weight, p.inner());
  checks.states(conv_state, channels, conv_weight.sizes[1]);
  checks.state(p.state, conv_state);
  const int64_t num_rows = p.projected.sizes[0];
  p.step = read_step(call, kOp, starts, slots, num_rows, conv_state.sizes[0]);
  p.channels = make_channels(call, conv_weight, conv_bias, conv_state,
                             p.projected.as<char>() + p.inner() * element_size(p.projected.dtype),
                             p.projected.strides[0]);
  float* rates = call.workspace<float>(p.num_heads);
  for (int64_t head = 0; head < p.num_heads; ++head) rates[head] = std::exp(a_log.as<float>()[head]);
  p.rates = rates;
  p.dt_bias = dt_bias.as<float>();
  p.shared = call.workspace<float>(p.step.num_rows * p.shared_stride());
  p.gated = call.workspace<float>(p.step.num_rows * p.inner());
  const int64_t sizes[] = {num_rows, p.inner()};
  p.out = call.empty(sizes, 2, p.projected.dtype);
  zero_rows(p.out, p.step.num_rows);
  if (p.step.count > 0) {
    with_element(p.projected.dtype, [&]<class T>(T) { run<T>(call, p); });
    keep_all_inputs(call.threads(), p.channels, p.step);
  }
  call.give(p.out);
}

}  // namespace

OSTINATO_KERNEL(state_space, state_space);

}  // namespace ostinato::recurrent::state_space
