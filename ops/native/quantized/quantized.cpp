// The linear op over quantised weights for CPUs: x @ weight.T + bias + residual. Layout in layout.h,
// arithmetic in row_worker.h, tiles.h and amx_quantized.h.
//
// The activations are quantised too: each group of a row that shares weight scales becomes 8-bit integers and a scale.
// So the products are of integers, for which the CPU has wide instructions, and weights are not widened.
#include "quantized/row_worker.h"

#if OSTINATO_AMX
#include "quantized/amx_quantized.h"
#endif

namespace ostinato::linear {
namespace {

template <int Bits, class In, class Out>
void run(const Problem& problem, const QuantizedWeight& weight) {
#if OSTINATO_AMX
  if (suits_tiles(weight, problem.rows)) return run_quantized_tiles<Bits, In, Out>(problem, weight);
#endif
  const RowGroups groups(problem.rows, kQuantRows, RowLayout(weight).row * 4);
  for_each_panel(problem.threads, groups.count * weight.panels, weight.bytes(), groups.blocks.count,
                 [&] { return QuantizedRowWorker<Bits, In, Out>(problem, weight, groups); });
}

template <int Bits>
void run(DType dtype, bool float32_output, const Problem& problem, const QuantizedWeight& weight) {
  if (dtype == DType::float32) {
    run<Bits, float, float>(problem, weight);
  } else if (float32_output) {
    run<Bits, BFloat16, float>(problem, weight);
  } else {
    run<Bits, BFloat16, BFloat16>(problem, weight);
  }
}

// quantized_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output, Tensor? residual,
//                  SymInt bits, SymInt group_size, bool symmetric) -> Tensor
void quantized_linear(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  const QuantFormat format = read_format(call);
  OSTINATO_CHECK(x.dim == 2 && (x.sizes[1] <= 1 || x.strides[1] == 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == DType::float32 || x.dtype == DType::bfloat16, "x must be float32 or bfloat16");
  const QuantizedWeight quantized(weight, out_features, x.sizes[1], format);
  Tensor out;
  const Problem problem = make_problem(call, x, bias, residual, out_features, float32_output, out);
  if (format.bits == 8) {
    run<8>(x.dtype, float32_output, problem, quantized);
  } else {
    run<4>(x.dtype, float32_output, problem, quantized);
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(quantized_linear, quantized_linear);

}  // namespace ostinato::linear
