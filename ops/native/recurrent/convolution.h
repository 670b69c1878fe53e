// The causal convolution of each channel by itself, and the inputs of it that a slot keeps.
#pragma once

#include "recurrent/states.h"

namespace ostinato::recurrent {

// The inputs of a sequence's convolution: rows of the step, and before them those that a slot keeps.
template <class T>
struct Inputs {
  // Input `token` of all channels; from -kept on.
  const T* at(int64_t token) const {
    return token >= 0 ? rows + token * stride : earlier + (kept + token) * earlier_stride;
  }

  const T* rows;
  int64_t stride;
  const T* earlier;
  int64_t earlier_stride;  // 0 = `earlier` is one row of zeros
  int64_t kept;            // W - 1
};

// The channels of a convolution: where their inputs are in a step's rows, and where they are kept.
struct Channels {
  Tensor weight;        // [C, W]
  Tensor bias;          // may not exist
  Tensor conv_state;    // [slots, W - 1, C]
  const void* rows;     // the inputs of the step's first row
  int64_t row_stride;   // elements
  const void* zeros;    // C elements

  int64_t count() const { return weight.sizes[0]; }
  int64_t width() const { return weight.sizes[1]; }

  template <class T>
  Inputs<T> inputs_of(const Sequence& sequence) const {
    const T* of_sequence = static_cast<const T*>(rows) + sequence.begin * row_stride;
    if (sequence.read == 0) return {of_sequence, row_stride, static_cast<const T*>(zeros), 0, width() - 1};
    return {of_sequence, row_stride, slot<T>(sequence.read), count(), width() - 1};
  }
  template <class T>
  T* slot(int64_t number) const {
    return conv_state.as<T>() + number * conv_state.strides[0];
  }
};

inline Channels make_channels(Call& call, const Tensor& weight, const Tensor& bias, const Tensor& conv_state,
                              const void* rows, int64_t row_stride) {
  const int64_t bytes = weight.sizes[0] * element_size(conv_state.dtype);
  char* zeros = call.workspace<char>(bytes);
  std::memset(zeros, 0, bytes);
  return {weight, bias, conv_state, rows, row_stride, zeros};
}

// Weights of some channels as floats, [W + 1, padded]: a row for each column of the weight, then the bias. Channels past
// `count` are zero.
inline void load_taps(const Tensor& weight, const Tensor& bias, int64_t first, int64_t count, int64_t padded,
                      float* taps) {
  const int64_t width = weight.sizes[1];
  std::fill(taps, taps + (width + 1) * padded, 0.0f);
  with_element(weight.dtype, [&]<class T>(T) {
    const T* from = weight.as<T>() + first * width;
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t w = 0; w < width; ++w) taps[w * padded + c] = to_float(*from++);
    }
  });
  if (bias.exists()) widen(bias, first, count, taps + width * padded);
}

// The convolution and SiLU of channels [first, first + count) for tokens [begin, end). `taps` is from `load_taps`, and
// `out` is [end - begin, padded] with a stride. `kWidth` is W, or 0 for any width.
template <int kWidth, class T>
void convolve_in(const Inputs<T>& inputs, const float* taps, int64_t first, int64_t count, int64_t padded, int64_t begin,
                 int64_t end, float* out, int64_t out_stride) {
  const int64_t width = kWidth > 0 ? kWidth : inputs.kept + 1;
  for (int64_t token = begin; token < end; ++token, out += out_stride) {
    const T* rows[kMaxWidth];
    for (int64_t w = 0; w < width; ++w) rows[w] = inputs.at(token + w + 1 - width) + first;
    const auto run = [&](int64_t c, const auto& input) {
      F32 sum = load(taps + width * padded + c);
#pragma GCC unroll 8
      for (int64_t w = 0; w < width; ++w) sum = fma(input(rows[w] + c), load(taps + w * padded + c), sum);
      store(out + c, silu(sum));
    };
    int64_t c = 0;
    for (; c + F32::width <= count; c += F32::width) run(c, [](const T* from) { return load(from); });
    for (; c < padded; c += F32::width) run(c, [&](const T* from) { return load_some(from, count - c); });
  }
}

template <class T>
void convolve(const Inputs<T>& inputs, const float* taps, int64_t first, int64_t count, int64_t padded, int64_t begin,
              int64_t end, float* out, int64_t out_stride) {
  const auto run = inputs.kept == 3 ? convolve_in<4, T> : convolve_in<0, T>;
  run(inputs, taps, first, count, padded, begin, end, out, out_stride);
}

// Writes the inputs that the convolution of the tokens after the first `end` needs to a slot.
template <class T>
void keep_inputs(const Channels& channels, const Inputs<T>& inputs, int64_t end, int64_t slot) {
  T* kept = channels.slot<T>(slot);
  // In this order also if the slot is the one that `inputs` reads: an input moves towards the front.
  for (int64_t row = 0; row < inputs.kept; ++row) {
    const T* from = inputs.at(end - inputs.kept + row);
    if (from != kept + row * channels.count()) std::memcpy(kept + row * channels.count(), from, channels.count() * sizeof(T));
  }
}

// Writes the slots of all sequences. It is called when all convolutions are done, because they read the slots.
inline void keep_all_inputs(const Threads& threads, const Channels& channels, const Step& step) {
  if (channels.width() == 1) return;
  const int64_t bytes = step.count * channels.conv_state.strides[0] * element_size(channels.conv_state.dtype);
  with_element(channels.conv_state.dtype, [&]<class T>(T) {
    for_each_row(threads, NumParts{step.count}, bytes, [&](int64_t s) {
      const Sequence& sequence = step.sequences[s];
      const Inputs<T> inputs = channels.inputs_of<T>(sequence);
      // The slot that is read is written last.
      const bool checkpoint_last = sequence.checkpoint == sequence.read;
      if (checkpoint_last) keep_inputs(channels, inputs, sequence.count, sequence.write);
      if (sequence.checkpoint != 0) keep_inputs(channels, inputs, sequence.checkpoint_tokens, sequence.checkpoint);
      if (!checkpoint_last) keep_inputs(channels, inputs, sequence.count, sequence.write);
    });
  });
}

}  // namespace ostinato::recurrent
