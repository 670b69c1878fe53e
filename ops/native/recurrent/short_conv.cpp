// The op gated_short_conv (ops/recurrent/short_conv.py).
//
// A work item is one sequence and a block of channels. It reads what a slot keeps of these channels before it writes
// it, so one pass suffices.
#include "recurrent/convolution.h"

namespace ostinato::recurrent::short_conv {
namespace {

constexpr int64_t kChannels = 128;  // of a block; a multiple of the width of all vectors

struct Problem {
  Tensor bcx, weight, bias, conv_state, out;
  Step step;
  int64_t channels, width;
};

template <class T>
class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem), taps_(linear::scratch((2 * p_.width + 1) * kChannels)), products_(taps_ + (p_.width + 1) * kChannels) {}

  // Items are in the order of channels, so that a worker loads the weights of a block once.
  void operator()(int64_t item) {
    load_block(item / p_.step.count * kChannels);
    const Sequence& sequence = p_.step.sequences[item % p_.step.count];
    load_products(sequence.read);
    for_parts(sequence, [&](int64_t begin, int64_t end, int64_t slot) {
      for (int64_t token = begin; token < end; ++token) run_token(sequence.begin + token, token);
      keep_products(slot, end);
    });
  }

 private:
  void load_block(int64_t first) {
    if (first == first_) return;
    first_ = first;
    count_ = std::min(kChannels, p_.channels - first);
    load_taps(p_.weight, p_.bias, first, count_, kChannels, taps_);
  }

  // The products of a token's b and x, in a ring of W rows. Tokens are counted from the sequence's first in this step.
  float* products(int64_t token) const { return products_ + (token + p_.width) % p_.width * kChannels; }
  T* kept(int64_t slot, int64_t row) const {
    return p_.conv_state.as<T>() + slot * p_.conv_state.strides[0] + row * p_.channels + first_;
  }

  void load_products(int64_t slot) {
    for (int64_t row = 0; row + 1 < p_.width; ++row) {
      float* to = products(row + 1 - p_.width);
      std::fill(to, to + kChannels, 0.0f);
      if (slot == 0) continue;
      const T* from = kept(slot, row);
      columns(
          count_, [&](int64_t c) { store(to + c, load(from + c)); }, [&](int64_t c) { to[c] = to_float(from[c]); });
    }
  }

  void keep_products(int64_t slot, int64_t tokens) const {
    for (int64_t row = 0; row + 1 < p_.width; ++row) {
      const float* from = products(tokens + row + 1 - p_.width);
      T* to = kept(slot, row);
      for (int64_t c = 0; c < count_; c += F32::width) store_some(to + c, load(from + c), count_ - c);
    }
  }

  void run_token(int64_t row, int64_t token) {
    const T* b = p_.bcx.as<T>() + row * p_.bcx.strides[0] + first_;
    const T *gate = b + p_.channels, *x = gate + p_.channels;
    T* out = p_.out.as<T>() + row * p_.out.strides[0] + first_;
    const float* rows[kMaxWidth];
    for (int64_t w = 0; w < p_.width; ++w) rows[w] = products(token + w + 1 - p_.width);
    float* newest = products(token);
    for (int64_t c = 0; c < count_; c += F32::width) {
      const int64_t rest = count_ - c;
      T rounded[F32::width];
      store(rounded, load_some(b + c, rest) * load_some(x + c, rest));
      store(newest + c, load(rounded));
      F32 sum = load(taps_ + p_.width * kChannels + c);
      for (int64_t w = 0; w < p_.width; ++w) {
        sum = fma(load(rows[w] + c), load(taps_ + w * kChannels + c), sum);
      }
      store_some(out + c, load_some(gate + c, rest) * sum, rest);
    }
  }

  const Problem& p_;
  float* taps_;      // [W + 1, kChannels]: weights, then the bias
  float* products_;  // [W, kChannels]
  int64_t first_ = -1, count_ = 0;
};

// gated_short_conv(Tensor bcx, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, Tensor query_start_loc,
//                  Tensor state_slots) -> Tensor
void gated_short_conv(Call& call) {
  constexpr const char* kOp = "gated_short_conv";
  Problem p{};
  p.bcx = call.tensor();
  p.weight = call.tensor();
  p.bias = call.optional_tensor();
  p.conv_state = call.tensor();
  const Tensor starts = call.tensor(), slots = call.tensor();
  const Checks checks{kOp, p.bcx.dtype};
  OSTINATO_CHECK(p.weight.dim == 2, kOp, ": conv_weight must be [C, W]");
  p.channels = p.weight.sizes[0];
  p.width = p.weight.sizes[1];
  checks.rows("bcx", p.bcx, 3 * p.channels);
  checks.convolution(p.weight, p.bias, p.channels);
  checks.states(p.conv_state, p.channels, p.width);
  p.step = read_step(call, kOp, starts, slots, p.bcx.sizes[0], p.conv_state.sizes[0]);
  const int64_t sizes[] = {p.bcx.sizes[0], p.channels};
  p.out = call.empty(sizes, 2, p.bcx.dtype);
  zero_rows(p.out, p.step.num_rows);
  const int64_t items = ceil_divide(p.channels, kChannels) * p.step.count;
  const int64_t moved_rows = 4 * p.step.num_rows + 2 * p.width * p.step.count;
  const int64_t bytes = moved_rows * p.channels * element_size(p.bcx.dtype);
  const Division division = divide<kMovedBytesPerWorker>(call.threads(), NumParts{items}, bytes);
  with_element(p.bcx.dtype, [&]<class T>(T) { linear::for_each_task(division, [&] { return Worker<T>(p); }); });
  call.give(p.out);
}

}  // namespace

OSTINATO_KERNEL(gated_short_conv, gated_short_conv);

}  // namespace ostinato::recurrent::short_conv
