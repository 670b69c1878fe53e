// Reads the arguments of the linear ops over packed and compressed weights, and returns their results.
#pragma once

#include "core/elements.h"
#include "linear/tasks.h"

namespace ostinato::linear {

// x, the weight, the bias and the size of the result, in the order of both ops' schemas. A weight has one or two tensors.
template <int kTensors>
struct LinearArguments {
  explicit LinearArguments(Call& call) {
    x = call.tensor();
    for (Tensor& tensor : weight) tensor = call.tensor();
    bias = call.optional_tensor();
    out_features = call.integer();
  }

  void check_rows(DType dtype) const {
    OSTINATO_CHECK(x.dim == 2 && is_contiguous(x, 1), "x must be a matrix with contiguous rows");
    OSTINATO_CHECK(x.dtype == dtype, "x must have the dtype of the packed weight");
  }

  Tensor x;
  Tensor weight[kTensors];
  Tensor bias;
  int64_t out_features;
};

// (Tensor x, weight, Tensor? bias, SymInt out_features, bool float32_output, Tensor? residual=None) -> Tensor
//
// make_weight(arguments) checks the dtype of x and returns the weight. multiply(dtype, float32_output, problem, weight)
// computes.
template <int kTensors, class MakeWeight, class Multiply>
void call_linear(Call& call, const MakeWeight& make_weight, const Multiply& multiply) {
  const LinearArguments<kTensors> arguments(call);
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  const auto weight = make_weight(arguments);
  Tensor out;
  const Problem problem =
      make_problem(call, arguments.x, arguments.bias, residual, arguments.out_features, float32_output, out);
  multiply(arguments.x.dtype, float32_output, problem, weight);
  call.give(out);
}

// Turns the gates and factors in `problem.out` into the rows of `out`.
inline void activate_rows(DType dtype, activation::Activation kind, const Problem& problem, const Tensor& out) {
  const int64_t count = problem.out_features / 2;
  const int64_t bytes = problem.rows * problem.out_features * element_size(dtype);
  with_element(dtype, [&]<class T>(T) {
    for_each_row(problem.threads, NumParts{problem.rows}, bytes, [&](int64_t row) {
      const T* gates = static_cast<const T*>(problem.out) + row * problem.out_features;
      activation::activate_row(kind, gates, gates + count, count, out.as<T>() + row * count);
    });
  });
}

// With fewer rows, weights are read at the rate of memory only if they lie one after the other. Gates and factors do not.
constexpr int64_t kGatedRows = 16;

// (Tensor x, weight, Tensor? bias, SymInt out_features, str kind) -> Tensor; as `call_linear`
template <int kTensors, class MakeWeight, class Multiply>
void call_gated_linear(Call& call, const MakeWeight& make_weight, const Multiply& multiply) {
  const LinearArguments<kTensors> arguments(call);
  const std::string name = call.text();
  const activation::Activation kind = activation::activation_named(name);
  const Tensor& x = arguments.x;
  const int64_t out_features = arguments.out_features;
  const auto weight = make_weight(arguments);
  OSTINATO_CHECK(out_features % (2 * kPanel) == 0, "gates and factors must be whole panels of 32 rows, got ", out_features,
                 " rows");
  check_bias(arguments.bias, x, out_features);
  Tensor out;
  Problem problem = make_problem(call, x, Tensor{}, Tensor{}, out_features / 2, false, out);
  problem.bias = arguments.bias.data;
  if (x.sizes[0] < kGatedRows) {
    problem.out_features = out_features;
    problem.out = call.workspace<char>(x.sizes[0] * out_features * element_size(x.dtype));
    multiply(x.dtype, false, problem, weight);
    activate_rows(x.dtype, kind, problem, out);
  } else {
    problem.gated = &kind;
    multiply(x.dtype, false, problem, weight.first_half());
  }
  call.give(out);
}

}  // namespace ostinato::linear
