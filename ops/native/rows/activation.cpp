// Activation functions, computed in float32 and rounded once.
#include "rows/activation_functions.h"

namespace ostinato::activation {
namespace {

// activation(Tensor x, str kind, bool gated) -> Tensor
void activation(Call& call) {
  const Tensor x = call.tensor();
  const std::string name = call.text();
  const bool gated = call.boolean();
  const Activation kind = activation_named(name);
  check_matrix(x);
  OSTINATO_CHECK(gated || kind != Activation::swigluoai, "swigluoai needs a gate");
  OSTINATO_CHECK(!gated || x.sizes[1] % 2 == 0, "rows with a gate must have an even number of elements");
  const int64_t rows = x.sizes[0], count = gated ? x.sizes[1] / 2 : x.sizes[1];
  const int64_t sizes[] = {rows, count};
  const Tensor out = call.empty(sizes, 2, x.dtype);
  with_element(x.dtype, [&]<class T>(T) {
    for_each_row(call.threads(), NumParts{rows}, x.num_bytes(), [&](int64_t row) {
      const T* from = x.as<T>() + row * x.strides[0];
      activate_row(kind, from, gated ? from + count : nullptr, count, out.as<T>() + row * count);
    });
  });
  call.give(out);
}

// sigmoid_gate(Tensor x, Tensor gate) -> Tensor
void sigmoid_gate(Call& call) {
  const Tensor x = call.tensor(), gate = call.tensor();
  check_matrix(x);
  check_matrix(gate);
  OSTINATO_CHECK(x.dtype == gate.dtype, "x and gate must have one dtype");
  OSTINATO_CHECK(x.sizes[0] == gate.sizes[0] && x.sizes[1] == gate.sizes[1], "x and gate must have one shape");
  const int64_t rows = x.sizes[0], count = x.sizes[1];
  const int64_t sizes[] = {rows, count};
  const Tensor out = call.empty(sizes, 2, x.dtype);
  with_element(x.dtype, [&]<class T>(T) {
    for_each_row(call.threads(), NumParts{rows}, 2 * x.num_bytes(), [&](int64_t row) {
      const T* gates = gate.as<T>() + row * gate.strides[0];
      activate_row(Activation::sigmoid, gates, x.as<T>() + row * x.strides[0], count, out.as<T>() + row * count);
    });
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(activation, activation);
OSTINATO_KERNEL(sigmoid_gate, sigmoid_gate);

}  // namespace ostinato::activation
