// The op gated_delta_rule (ops/recurrent/delta_rule.py).
//
// For many tokens, a head's state is taken in blocks of columns. A block stays in the first level cache while it runs
// over the tokens of a chunk, because the columns of a state do not depend on each other. For a single token, the state
// comes from memory, so it is read and written in the order in which it lies there.
#include "recurrent/convolution.h"

namespace ostinato::recurrent::delta_rule {
namespace {

constexpr int64_t kTokens = 64;  // of a chunk; its queries, keys and values fit into the second level cache
constexpr int kVectors = 2;      // of a block of columns
constexpr int kColumns = kVectors * F32::width;
constexpr int kWideVectors = 4;  // for a single token, if the values are a multiple of it
constexpr int64_t kRowsAtOnce = 16;     // rows of a state that lie side by side in memory
constexpr int64_t kItemsPerWorker = 4;  // as many and more let the workers end at the same time
constexpr float kUnitEps = 1e-6f;       // of the norms of queries and keys

struct Problem {
  Channels channels;
  Tensor qkvz, gates, state, norm_weight, out;
  Step step;
  const float* rates;  // exp(A)
  const float* dt_bias;
  int64_t num_k_heads, num_heads, k_dim, v_dim;
  int64_t k_padded, v_padded;  // to whole vectors of keys, and to whole blocks of values
  int64_t heads_per_item;      // value heads of one key head
  float norm_eps;

  int64_t head_size() const { return k_dim * v_dim; }
  float* state_of(int64_t slot, int64_t head) const {
    return state.as<float>() + slot * state.strides[0] + head * head_size();
  }
};

// What a pass over the rows of a state needs for one token.
struct TokenStep {
  float kept;           // the factor on the state
  const float* key;     // [K]
  const float* query;   // [K]
  const float* next;    // the next token's key
};

// sums[c] += the sum over rows of key[row] * state[row][c], for some vectors of columns.
template <int kVectors>
OSTINATO_INLINE void read_rows(const float* state, int64_t stride, const float* key, int64_t rows, float* sums) {
  F32 sum[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sum[v] = load(sums + v * F32::width);
  for (int64_t row = 0; row < rows; ++row, state += stride) {
    const F32 factor = broadcast(key[row]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = fma(factor, load(state + v * F32::width), sum[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sums + v * F32::width, sum[v]);
}

// state = kept * state + key^T delta, for some vectors of columns. `out` gets the product of the query with the new state.
// With `kReadsNext`, `sums` gets the product of the next key, so that the state is loaded once for each token.
template <int kVectors, bool kReadsNext>
OSTINATO_INLINE void step_rows(const float* from, float* to, int64_t stride, const TokenStep& token, int64_t rows,
                               const float* delta, float* out, float* sums) {
  const F32 kept = broadcast(token.kept);
  F32 change[kVectors], result[kVectors], sum[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    change[v] = load(delta + v * F32::width);
    result[v] = load(out + v * F32::width);
    if (kReadsNext) sum[v] = load(sums + v * F32::width);
  }
  for (int64_t row = 0; row < rows; ++row, from += stride, to += stride) {
    const F32 key = broadcast(token.key[row]), query = broadcast(token.query[row]);
    F32 next;
    if (kReadsNext) next = broadcast(token.next[row]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const F32 state = fma(key, change[v], load(from + v * F32::width) * kept);
      store(to + v * F32::width, state);
      result[v] = fma(query, state, result[v]);
      if (kReadsNext) sum[v] = fma(next, state, sum[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    store(out + v * F32::width, result[v]);
    if (kReadsNext) store(sums + v * F32::width, sum[v]);
  }
}

OSTINATO_INLINE void clear(float* x, int64_t count) {
  for (int64_t c = 0; c < count; c += F32::width) store(x + c, broadcast(0.0f));
}

template <class T>
class Worker {
 public:
  explicit Worker(const Problem& problem) : p_(problem) {
    const int64_t rows = p_.channels.width() + 1;
    const int64_t taps = rows * (2 * p_.k_padded + p_.heads_per_item * p_.v_padded);
    const int64_t of_chunk = kTokens * (2 * p_.k_padded + p_.v_padded + 2);
    scratch_ = linear::scratch(taps + of_chunk + p_.k_dim * kColumns + 3 * p_.v_padded);
    q_taps_ = take(rows * p_.k_padded);
    k_taps_ = take(rows * p_.k_padded);
    v_taps_ = take(rows * p_.heads_per_item * p_.v_padded);
    queries_ = take(kTokens * p_.k_padded);
    keys_ = take(kTokens * p_.k_padded);
    values_ = take(kTokens * p_.v_padded);
    betas_ = take(kTokens);
    kept_ = take(kTokens);
    block_ = take(p_.k_dim * kColumns);
    sums_ = take(p_.v_padded);
    deltas_ = take(p_.v_padded);
    norm_ = take(p_.v_padded);
    clear(norm_, p_.v_padded);
    widen(p_.norm_weight, 0, p_.v_dim, norm_);
  }

  // Items are in the order of heads, so that a worker loads the weights of a head's convolution once.
  void operator()(int64_t item) {
    const int64_t head = item / p_.step.count * p_.heads_per_item;
    load_head(head);
    const Sequence& sequence = p_.step.sequences[item % p_.step.count];
    const Inputs<T> inputs = p_.channels.inputs_of<T>(sequence);
    next_ = source_of(item + 1);
    int64_t from = sequence.read;
    for_parts(sequence, [&](int64_t first, int64_t last, int64_t slot) {
      for (int64_t begin = first; begin < last; begin += kTokens, from = slot) {
        run_chunk(inputs, sequence, begin, std::min(begin + kTokens, last), begin == 0 && sequence.read == 0 ? -1 : from, slot);
      }
    });
  }

 private:
  // The state that an item reads first; null = zeros, or there is no such item.
  const float* source_of(int64_t item) const {
    const int64_t head = item / p_.step.count * p_.heads_per_item;
    const int64_t slot = p_.step.sequences[item % p_.step.count].read;
    return head >= p_.num_heads || slot == 0 ? nullptr : p_.state_of(slot, head);
  }

  float* take(int64_t count) {
    float* part = scratch_;
    scratch_ += count;
    return part;
  }

  void load_head(int64_t head) {
    if (head == head_) return;
    head_ = head;
    const int64_t keys = p_.num_k_heads * p_.k_dim, rows = p_.channels.width() + 1;
    first_key_ = head * p_.num_k_heads / p_.num_heads * p_.k_dim;
    load_taps(p_.channels.weight, p_.channels.bias, first_key_, p_.k_dim, p_.k_padded, q_taps_);
    load_taps(p_.channels.weight, p_.channels.bias, keys + first_key_, p_.k_dim, p_.k_padded, k_taps_);
    for (int64_t h = 0; h < p_.heads_per_item; ++h) {
      load_taps(p_.channels.weight, p_.channels.bias, 2 * keys + (head + h) * p_.v_dim, p_.v_dim, p_.v_padded, v_taps_ + h * rows * p_.v_padded);
    }
  }

  // Tokens [begin, end) of a sequence for the item's heads. A slot `from` below 0 stands for zeros.
  void run_chunk(const Inputs<T>& inputs, const Sequence& sequence, int64_t begin, int64_t end, int64_t from, int64_t to) {
    const int64_t keys = p_.num_k_heads * p_.k_dim, rows = p_.channels.width() + 1, count = end - begin;
    convolve(inputs, q_taps_, first_key_, p_.k_dim, p_.k_padded, begin, end, queries_, p_.k_padded);
    convolve(inputs, k_taps_, keys + first_key_, p_.k_dim, p_.k_padded, begin, end, keys_, p_.k_padded);
    const float query_scale = 1.0f / std::sqrt(static_cast<float>(p_.k_dim));
    for (int64_t t = 0; t < count; ++t) {
      scale_to_unit(queries_ + t * p_.k_padded, query_scale);
      scale_to_unit(keys_ + t * p_.k_padded, 1.0f);
    }
    for (int64_t h = 0; h < p_.heads_per_item; ++h) {
      const int64_t head = head_ + h;
      convolve(inputs, v_taps_ + h * rows * p_.v_padded, 2 * keys + head * p_.v_dim, p_.v_dim, p_.v_padded, begin, end,
               values_, p_.v_padded);
      const int64_t row = sequence.begin + begin;
      for (int64_t t = 0; t < count; ++t) {
        const T* gates = p_.gates.as<T>() + (row + t) * p_.gates.strides[0] + head;
        betas_[t] = 1.0f / (1.0f + std::exp(-to_float(gates[0])));
        kept_[t] = std::exp(-p_.rates[head] * softplus(to_float(gates[p_.num_heads]) + p_.dt_bias[head]));
      }
      const float* source = from < 0 ? nullptr : p_.state_of(from, head);
      float* target = p_.state_of(to, head);
      if (count == 1 && source != nullptr && p_.v_dim % kColumns == 0) {
        const float* next = h + 1 < p_.heads_per_item ? p_.state_of(from, head + 1) : next_;
        if (p_.v_dim % (kWideVectors * F32::width) == 0) {
          advance_one<kWideVectors>(source, target, next);
        } else {
          advance_one<kVectors>(source, target, next);
        }
      } else {
        for (int64_t c = 0; c < p_.v_dim; c += kColumns) advance_block(source, target, c, count);
      }
      for (int64_t t = 0; t < count; ++t) write_row(row + t, head, values_ + t * p_.v_padded);
    }
  }

  void scale_to_unit(float* x, float factor) const {
    const F32 scale = broadcast(factor / std::sqrt(sum_squares(x, p_.k_padded) + kUnitEps));
    for (int64_t c = 0; c < p_.k_padded; c += F32::width) store(x + c, load(x + c) * scale);
  }

  // A token's delta, of one block of columns. `sums` is the product of its key with the state before. The product of
  // its query with the new state then replaces the token's values.
  OSTINATO_INLINE void make_delta(int64_t token, const float* sums, float* values, float* delta) const {
    const F32 kept = broadcast(kept_[token]), beta = broadcast(betas_[token]);
#pragma GCC unroll 8
    for (int v = 0; v < kColumns; v += F32::width) {
      store(delta + v, beta * (load(values + v) - kept * load(sums + v)));
      store(values + v, broadcast(0.0f));
    }
  }

  TokenStep token_step(int64_t token) const {
    const float* key = keys_ + token * p_.k_padded;
    return {kept_[token], key, queries_ + token * p_.k_padded, key + p_.k_padded};
  }

  // One token, for all columns, in blocks of some vectors. Memory is asked for the rows that follow and, all along, for
  // the state `next`, so that it is never idle.
  template <int kVectors>
  void advance_one(const float* from, float* to, const float* next) {
    constexpr int kColumns = kVectors * F32::width;
    const TokenStep token = token_step(0);
    clear(sums_, p_.v_dim);
    for (int64_t row = 0; row < p_.k_dim; row += kRowsAtOnce) {
      const int64_t rows = std::min(kRowsAtOnce, p_.k_dim - row);
      prefetch(from + (row + rows) * p_.v_dim, rows * p_.v_dim);
      prefetch_half(next, row);
      for (int64_t c = 0; c < p_.v_dim; c += kColumns) {
        read_rows<kVectors>(from + row * p_.v_dim + c, p_.v_dim, token.key + row, rows, sums_ + c);
      }
    }
    for (int64_t c = 0; c < p_.v_dim; c += delta_rule::kColumns) make_delta(0, sums_ + c, values_ + c, deltas_ + c);
    for (int64_t row = 0; row < p_.k_dim; row += kRowsAtOnce) {
      const int64_t rows = std::min(kRowsAtOnce, p_.k_dim - row), place = row * p_.v_dim;
      const TokenStep part{token.kept, token.key + row, token.query + row, nullptr};
      prefetch_half(next, p_.k_dim + row);
      for (int64_t c = 0; c < p_.v_dim; c += kColumns) {
        step_rows<kVectors, false>(from + place + c, to + place + c, p_.v_dim, part, rows, deltas_ + c, values_ + c,
                                   nullptr);
      }
    }
  }

  // Two passes over the rows ask for the rows of the next state; `row` counts those of both passes.
  OSTINATO_INLINE void prefetch_half(const float* next, int64_t row) const {
    if (next != nullptr) prefetch(next + row / 2 * p_.v_dim, kRowsAtOnce / 2 * p_.v_dim);
  }

  // `count` tokens, for the columns from `column` on.
  void advance_block(const float* from, float* to, int64_t column, int64_t count) {
    const int64_t width = p_.v_dim - column;
    for (int64_t row = 0; row < p_.k_dim; ++row) {
      for (int c = 0; c < kColumns; c += F32::width) {
        const F32 part = from == nullptr ? broadcast(0.0f) : load_some(from + row * p_.v_dim + column + c, width - c);
        store(block_ + row * kColumns + c, part);
      }
    }
    clear(sums_, kColumns);
    read_rows<kVectors>(block_, kColumns, keys_, p_.k_dim, sums_);
    for (int64_t t = 0; t < count; ++t) {
      float* values = values_ + t * p_.v_padded + column;
      const TokenStep token = token_step(t);
      make_delta(t, sums_, values, deltas_);
      if (t + 1 < count) {
        clear(sums_, kColumns);
        step_rows<kVectors, true>(block_, block_, kColumns, token, p_.k_dim, deltas_, values, sums_);
      } else {
        step_rows<kVectors, false>(block_, block_, kColumns, token, p_.k_dim, deltas_, values, nullptr);
      }
    }
    for (int64_t row = 0; row < p_.k_dim; ++row) {
      for (int c = 0; c < kColumns; c += F32::width) {
        store_some(to + row * p_.v_dim + column + c, load(block_ + row * kColumns + c), width - c);
      }
    }
  }

  // norm(values) * norm_weight * silu(z)
  void write_row(int64_t row, int64_t head, const float* values) const {
    const float mean = sum_squares(values, p_.v_padded) / static_cast<float>(p_.v_dim);
    const F32 scale = broadcast(1.0f / std::sqrt(mean + p_.norm_eps));
    const T* z = p_.qkvz.as<T>() + row * p_.qkvz.strides[0] + p_.channels.count() + head * p_.v_dim;
    T* out = p_.out.as<T>() + row * p_.out.strides[0] + head * p_.v_dim;
    for (int64_t c = 0; c < p_.v_dim; c += F32::width) {
      const F32 gate = silu(load_some(z + c, p_.v_dim - c));
      store_some(out + c, load(values + c) * scale * load(norm_ + c) * gate, p_.v_dim - c);
    }
  }

  const Problem& p_;
  float* scratch_;
  const float* next_ = nullptr;  // the state that the next item reads
  int64_t head_ = -1, first_key_ = 0;
  float *q_taps_, *k_taps_, *v_taps_;     // of the item's heads, see `load_taps`
  float *queries_, *keys_, *values_;      // of a chunk, [kTokens, padded]
  float *betas_, *kept_;                  // of a chunk and one head
  float *block_, *sums_, *deltas_;        // of a block of columns, or of all columns
  float* norm_;
};

template <class T>
void run(Call& call, const Problem& p) {
  const int64_t items = p.num_heads / p.heads_per_item * p.step.count;
  const int64_t bytes = p.step.count * p.num_heads * p.head_size() * 8;
  const Division division = divide<kMovedBytesPerWorker>(call.threads(), NumParts{items}, bytes);
  linear::for_each_task(division, [&] { return Worker<T>(p); });
}

// gated_delta_rule(Tensor qkvz, Tensor gates, Tensor conv_weight, Tensor a_log, Tensor dt_bias, Tensor norm_weight,
//                  Tensor(a!) conv_state, Tensor(b!) state, Tensor query_start_loc, Tensor state_slots,
//                  int num_k_heads, float norm_eps) -> Tensor
void gated_delta_rule(Call& call) {
  constexpr const char* kOp = "gated_delta_rule";
  const Tensor qkvz = call.tensor(), gates = call.tensor(), conv_weight = call.tensor(), a_log = call.tensor();
  const Tensor dt_bias = call.tensor(), norm_weight = call.tensor(), conv_state = call.tensor(), state = call.tensor();
  const Tensor starts = call.tensor(), slots = call.tensor();
  const int64_t num_k_heads = call.integer();
  const double norm_eps = call.number();
  const Checks checks{kOp, qkvz.dtype};
  OSTINATO_CHECK(state.dim == 4, kOp, ": state must be [slots, Hv, K, V]");
  const int64_t heads = state.sizes[1], k_dim = state.sizes[2], v_dim = state.sizes[3];
  OSTINATO_CHECK(num_k_heads >= 1 && heads % num_k_heads == 0, kOp, ": num_k_heads = ", num_k_heads,
                 " must divide the ", heads, " value heads of state");
  const int64_t channels = 2 * num_k_heads * k_dim + heads * v_dim;
  checks.rows("qkvz", qkvz, channels + heads * v_dim);
  checks.rows("gates", gates, 2 * heads);
  OSTINATO_CHECK(gates.sizes[0] == qkvz.sizes[0], kOp, ": gates has ", gates.sizes[0], " rows and qkvz has ",
                 qkvz.sizes[0]);
  checks.convolution(conv_weight, Tensor{}, channels);
  checks.floats("a_log", a_log, heads);
  checks.floats("dt_bias", dt_bias, heads);
  checks.parameter("norm_weight", norm_weight, v_dim);
  checks.states(conv_state, channels, conv_weight.sizes[1]);
  checks.state(state, conv_state);
  Problem p{};
  p.step = read_step(call, kOp, starts, slots, qkvz.sizes[0], conv_state.sizes[0]);
  p.channels = make_channels(call, conv_weight, Tensor{}, conv_state, qkvz.data, qkvz.strides[0]);
  p.qkvz = qkvz;
  p.gates = gates;
  p.state = state;
  p.norm_weight = norm_weight;
  float* rates = call.workspace<float>(heads);
  for (int64_t head = 0; head < heads; ++head) rates[head] = std::exp(a_log.as<float>()[head]);
  p.rates = rates;
  p.dt_bias = dt_bias.as<float>();
  p.num_k_heads = num_k_heads;
  p.num_heads = heads;
  p.k_dim = k_dim;
  p.v_dim = v_dim;
  p.k_padded = round_up(k_dim, F32::width);
  p.v_padded = round_up(v_dim, kColumns);
  // The value heads of a key head share the convolution of its queries and keys, unless there are too few items then.
  const bool together = p.step.count * num_k_heads >= kItemsPerWorker * call.threads().count();
  p.heads_per_item = together ? heads / num_k_heads : 1;
  p.norm_eps = static_cast<float>(norm_eps);
  const int64_t sizes[] = {qkvz.sizes[0], heads * v_dim};
  p.out = call.empty(sizes, 2, qkvz.dtype);
  zero_rows(p.out, p.step.num_rows);
  if (p.step.count > 0) {
    with_element(qkvz.dtype, [&]<class T>(T) { run<T>(call, p); });
    keep_all_inputs(call.threads(), p.channels, p.step);
  }
  call.give(p.out);
}

}  // namespace

OSTINATO_KERNEL(gated_delta_rule, gated_delta_rule);

}  // namespace ostinato::recurrent::delta_rule
