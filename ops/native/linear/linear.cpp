// The packed linear op for CPUs: x @ weight.T + bias + residual, with the weights laid out once in the order in which
// the kernel reads them. The layout is described in layout.h, the arithmetic in row_worker.h, tiles.h and amx_linear.h.
#include "linear/linear_call.h"
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

PackedWeight make_weight(const LinearArguments<1>& arguments) {
  arguments.check_rows(arguments.weight[0].dtype);
  return {arguments.weight[0], arguments.out_features, arguments.x.sizes[1]};
}

// packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output,
//               Tensor? residual=None) -> Tensor
void packed_linear(Call& call) { call_linear<1>(call, make_weight, multiply); }

// packed_gated_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, str kind) -> Tensor
void packed_gated_linear(Call& call) { call_gated_linear<1>(call, make_weight, multiply); }

}  // namespace

OSTINATO_KERNEL(packed_linear, packed_linear);
OSTINATO_KERNEL(packed_gated_linear, packed_gated_linear);

}  // namespace ostinato::linear
