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

// packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output,
//               Tensor? residual=None) -> Tensor
void packed_linear(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  OSTINATO_CHECK(x.dim == 2 && (x.sizes[1] <= 1 || x.strides[1] == 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == weight.dtype, "x must have the dtype of the packed weight");
  const PackedWeight packed(weight, out_features, x.sizes[1]);
  Tensor out;
  const Problem problem = make_problem(call, x, bias, residual, out_features, float32_output, out);
  multiply(x.dtype, float32_output, problem, packed);
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(packed_linear, packed_linear);

}  // namespace ostinato::linear
