// The linear ops over compressed weights: bfloat16 in 12 bits (compressed.h). They give the bits of the packed linear ops
// over the same values.
#include "linear/compressed.h"
#include "linear/linear_call.h"

#if OSTINATO_AMX
#include "linear/compressed_tiles.h"
#else
#include "linear/compressed_steps.h"
#endif

namespace ostinato::linear {
namespace {

CompressedWeight make_compressed(const LinearArguments<2>& arguments) {
  arguments.check_rows(DType::bfloat16);
  return {arguments.weight[0], arguments.weight[1], arguments.out_features, arguments.x.sizes[1]};
}

template <class Out>
void run_compressed(const Problem& problem, const CompressedWeight& weight) {
#if OSTINATO_AMX
  run_tiles<Out, CompressedPanelTiles>(problem, weight);
#else
  using Worker = RowWorker<BFloat16Pairs, Out, CompressedSteps>;
  run_panels<Worker>(problem, weight, RowGroups(problem.rows, kMaxRows, weight.steps * BFloat16Pairs::kFloats * 4));
#endif
}

void multiply_compressed_weight(DType, bool float32_output, const Problem& problem, const CompressedWeight& weight) {
  if (float32_output) return run_compressed<float>(problem, weight);
  run_compressed<BFloat16>(problem, weight);
}

// compressed_linear(Tensor x, Tensor weight, Tensor exceptions, Tensor? bias, SymInt out_features, bool float32_output,
//                   Tensor? residual=None) -> Tensor
void compressed_linear(Call& call) { call_linear<2>(call, make_compressed, multiply_compressed_weight); }

// compressed_gated_linear(Tensor x, Tensor weight, Tensor exceptions, Tensor? bias, SymInt out_features, str kind) -> Tensor
void compressed_gated_linear(Call& call) { call_gated_linear<2>(call, make_compressed, multiply_compressed_weight); }

}  // namespace

OSTINATO_KERNEL(compressed_linear, compressed_linear);
OSTINATO_KERNEL(compressed_gated_linear, compressed_gated_linear);

}  // namespace ostinato::linear
