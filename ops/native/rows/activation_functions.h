// Activation functions, and rows of gated linear units.
#pragma once

#include "rows/each_row.h"

#include <algorithm>
#include <string>

namespace ostinato::activation {

// All functions keep NaN, as in torch. `max` and `min` return their second operand if one is NaN, so the value comes
// second.

constexpr float kLog2E = 1.442695041f;

OSTINATO_INLINE F32 sigmoid(F32 x) {
  const F32 exponent = min(broadcast(120.0f), x * broadcast(-kLog2E));  // the largest argument of exp2
  return broadcast(1.0f) / (broadcast(1.0f) + exp2(exponent));
}

enum class Activation { silu, gelu_tanh, quick_gelu, gelu, relu, relu2, swigluoai, sigmoid };

constexpr float kGateLimit = 7.0f;  // the limit of swigluoai, for gates and factors

// x (1 + erf(x / sqrt(2))) / 2 with formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7 |x| / 2.
OSTINATO_INLINE F32 gelu(F32 x) {
  const F32 size = min(max(x, broadcast(0.0f) - x), broadcast(40.0f));  // beyond 40, erfc is 0
  const F32 z = size * broadcast(0.70710678f);
  const F32 t = broadcast(1.0f) / fma(z, broadcast(0.3275911f), broadcast(1.0f));
  F32 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  const F32 complement = p * t * exp2(z * z * broadcast(-kLog2E));  // erfc(z)
  return max(broadcast(0.0f), x) - broadcast(0.5f) * size * complement;
}

template <class Function>
OSTINATO_INLINE void apply(float* x, int64_t count, const Function& function) {
  for (int64_t c = 0; c < count; c += F32::width) store(x + c, function(load(x + c)));
}

// Works in place. `count` is a multiple of the vectors' width.
inline void activate(Activation kind, float* x, int64_t count) {
  switch (kind) {
    case Activation::silu: return apply(x, count, [](F32 x) { return x * sigmoid(x); });
    case Activation::quick_gelu: return apply(x, count, [](F32 x) { return x * sigmoid(broadcast(1.702f) * x); });
    case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 = sigmoid(2 u)
      return apply(x, count, [](F32 x) {
        const F32 cube = broadcast(0.044715f) * x * x * x;
        return x * sigmoid(broadcast(1.5957691216f) * (x + cube));
      });
    case Activation::gelu: return apply(x, count, gelu);
    case Activation::relu: return apply(x, count, [](F32 x) { return max(broadcast(0.0f), x); });
    case Activation::relu2:
      return apply(x, count, [](F32 x) {
        const F32 positive = max(broadcast(0.0f), x);
        return positive * positive;
      });
    case Activation::swigluoai:
      return apply(x, count, [](F32 x) {
        const F32 gate = min(broadcast(kGateLimit), x);
        return gate * sigmoid(broadcast(1.702f) * gate);
      });
    case Activation::sigmoid:
      return apply(x, count, [](F32 x) {
        return sigmoid(min(broadcast(200.0f), max(broadcast(-200.0f), x)));  // 0 or 1 beyond these limits
      });
  }
}

inline Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "quick_gelu") return Activation::quick_gelu;
  if (name == "gelu") return Activation::gelu;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  if (name == "swigluoai") return Activation::swigluoai;
  throw_invalid_argument({"kind must be silu, gelu_tanh, quick_gelu, gelu, relu, relu2 or swigluoai, got ", name});
}

// The factor on an activated gate.
template <class T>
OSTINATO_INLINE F32 load_factor(Activation kind, const T* p) {
  const F32 factor = load(p);
  if (kind != Activation::swigluoai) return factor;
  return min(broadcast(kGateLimit), max(broadcast(-kGateLimit), factor)) + broadcast(1.0f);
}
OSTINATO_INLINE float factor_of(Activation kind, float factor) {
  return kind != Activation::swigluoai ? factor : std::clamp(factor, -kGateLimit, kGateLimit) + 1.0f;
}

// out = activation(x) * factor. If `factor` is null, nothing is multiplied.
template <class T>
void activate_row(Activation kind, const T* x, const T* factor, int64_t count, T* out) {
  constexpr int64_t kChunk = 512;
  alignas(64) float chunk[kChunk];
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t size = std::min(kChunk, count - first);
    const int64_t padded = round_up(size, F32::width);
    for (int64_t c = size; c < padded; ++c) chunk[c] = 0.0f;
    columns(
        size, [&](int64_t c) { store(chunk + c, load(x + first + c)); },
        [&](int64_t c) { chunk[c] = to_float(x[first + c]); });
    activate(kind, chunk, padded);
    if (factor == nullptr) {
      columns(
          size, [&](int64_t c) { store(out + first + c, load(chunk + c)); },
          [&](int64_t c) { from_float(chunk[c], out + first + c); });
    } else {
      columns(
          size, [&](int64_t c) { store(out + first + c, load(chunk + c) * load_factor(kind, factor + first + c)); },
          [&](int64_t c) { from_float(chunk[c] * factor_of(kind, to_float(factor[first + c])), out + first + c); });
    }
  }
}

}  // namespace ostinato::activation
