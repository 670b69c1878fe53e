// The packed linear op for CPUs: x @ weight.T + bias + residual, with the weights laid out once in the order in which
// the kernel reads them. The layout is described in layout.h, the arithmetic in row_worker.h, tiles.h and amx_linear.h.
#include "core/elements.h"
#include "linear/row_worker.h"

#if OSTINATO_AMX
#include "linear/amx_linear.h"
#endif

namespace ostinato::linear {
namespace {

template <class Kind, class Out>
void run(const Problem& problem, const PackedWeight& weight) {
  const RowGroups groups(problem.rows, kMaxRows, weight.steps * Kind::kFloats * 4);
  run_panels<RowWorker<Kind, Out>>(problem, weight, groups);
}

template <class Out>
void run_bfloat16(const Problem& problem, const PackedWeight& weight) {
#if OSTINATO_AMX
  run_tiles<Out>(problem, weight);
#else
  run<BFloat16Pairs, Out>(problem, weight);
#endif
}

void multiply(DType dtype, bool float32_output, const Problem& problem, const PackedWeight& weight) {
#if OSTINATO_HAS(OSTINATO_FLOAT32)
  if (dtype == DType::float32) return run<Float32, float>(problem, weight);
#endif
#if OSTINATO_HAS(OSTINATO_BFLOAT16)
  if (dtype == DType::bfloat16) {
    return float32_output ? run_bfloat16<float>(problem, weight) : run_bfloat16<BFloat16>(problem, weight);
  }
#endif
  throw_not_compiled();
}

void check_rows(const Tensor& x, const Tensor& weight) {
  OSTINATO_CHECK(x.dim == 2 && (x.sizes[1] <= 1 || x.strides[1] == 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == weight.dtype, "x must have the dtype of the packed weight");
}

// packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output,
//               Tensor? residual=None) -> Tensor
void packed_linear(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  check_rows(x, weight);
  const PackedWeight packed(weight, out_features, x.sizes[1]);
  Tensor out;
  const Problem problem = make_problem(call, x, bias, residual, out_features, float32_output, out);
  multiply(x.dtype, float32_output, problem, packed);
  call.give(out);
}

// Turns the gates and factors in `problem.out` into the rows of `out`.
void activate_rows(DType dtype, activation::Activation kind, const Problem& problem, const Tensor& out) {
  const int64_t count = problem.out_features / 2;
  with_element(dtype, [&]<class T>(T) {
    for_each_row(problem.threads, problem.rows, problem.rows * problem.out_features * element_bytes(dtype), [&](int64_t row) {
      const T* gates = static_cast<const T*>(problem.out) + row * problem.out_features;
      activation::activate_row(kind, gates, gates + count, count, out.as<T>() + row * count);
    });
  });
}

// With fewer rows, weights are read at the rate of memory only if they lie one after the other. Gates and factors do not.
constexpr int64_t kFewRows = 16;

// packed_gated_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, str kind) -> Tensor
void packed_gated_linear(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer(), half = out_features / 2;
  const std::string name = call.text();
  const activation::Activation kind = activation::activation_named(name);
  check_rows(x, weight);
  OSTINATO_CHECK(out_features % (2 * kPanel) == 0, "gates and factors must be whole panels of 32 rows, got ", out_features,
                 " rows");
  check_bias(bias, x, out_features);
  const PackedWeight packed(weight, out_features, x.sizes[1]);
  Tensor out;
  Problem problem = make_problem(call, x, Tensor{}, Tensor{}, half, false, out);
  problem.bias = bias.data;
  if (x.sizes[0] < kFewRows) {
    problem.out_features = out_features;
    problem.out = call.workspace<char>(x.sizes[0] * out_features * element_bytes(x.dtype));
    multiply(x.dtype, false, problem, packed);
    activate_rows(x.dtype, kind, problem, out);
  } else {
    const GatedUnit unit{kind, PackedWeight(packed.panel(packed.panels / 2), packed.panels / 2, packed.steps)};
    problem.unit = &unit;
    multiply(x.dtype, false, problem, PackedWeight(packed.units, packed.panels / 2, packed.steps));
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(packed_linear, packed_linear);
OSTINATO_KERNEL(packed_gated_linear, packed_gated_linear);

}  // namespace ostinato::linear
