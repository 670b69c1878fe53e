// The linear op over quantised weights for CPUs: x @ weight.T + bias + residual. Layout in layout.h, rounding of
// activations in activations.h. Arithmetic in row_worker.h, tiles.h and products.h; on matrix tiles in amx_quantized.h;
// over weights that are floats of 8 bits in float8.h and amx_float8.h.
//
// The activations are quantised too, unless the weights are floats of 8 bits. A row is cut into the groups of the
// weight, and each group becomes 8-bit integers and a scale. So the products are products of small integers, for which
// CPUs have wide instructions.
#include "quantized/float8.h"
#include "quantized/row_worker.h"

#if OSTINATO_AMX
#include "quantized/amx_float8.h"
#include "quantized/amx_quantized.h"
#endif

namespace ostinato::linear {
namespace {

template <Widening Bits, class In, class Out>
void run_integers(const Problem& problem, const QuantizedWeight& weight) {
#if OSTINATO_AMX
  if (suits_tiles(weight, problem.rows)) return run_quantized_tiles<Bits, In, Out>(problem, weight);
#endif
  const RowGroups groups(problem.rows, kQuantRows, RowLayout(weight).row * 4);
  run_panels<QuantizedRowWorker<Bits, In, Out>>(problem, weight, groups);
}

template <class In, class Out>
void run_float8(const Problem& problem, const QuantizedWeight& weight) {
#if OSTINATO_AMX
  if constexpr (std::is_same_v<In, BFloat16>) {
    if (suits_float8_tiles(weight)) return run_float8_tiles<Out>(problem, weight);
  }
#endif
  using Worker = Float8RowWorker<In, Out>;
  run_panels<Worker>(problem, weight, RowGroups(problem.rows, kMaxRows, Worker::row_bytes(weight)));
}

template <Widening Bits, class In, class Out>
void run(const Problem& problem, const QuantizedWeight& weight) {
  if constexpr (Bits == kFloat8) {
    run_float8<In, Out>(problem, weight);
  } else {
    run_integers<Bits, In, Out>(problem, weight);
  }
}

template <Widening Bits>
void run(DType dtype, bool float32_output, const Problem& problem, const QuantizedWeight& weight) {
  if (dtype == DType::float32) {
    run<Bits, float, float>(problem, weight);
  } else if (float32_output) {
    run<Bits, BFloat16, float>(problem, weight);
  } else {
    run<Bits, BFloat16, BFloat16>(problem, weight);
  }
}

// The checked order: for each column of a weight, the column of x that it multiplies.
const int32_t* checked_order(const Tensor& order, int64_t in_features) {
  OSTINATO_CHECK(order.dtype == DType::int32 && order.dim == 1 && order.sizes[0] == in_features && is_contiguous(order),
                 "order must be a contiguous int32 vector with an element for each column of x");
  const auto* columns = order.as<int32_t>();
  uint32_t largest = 0;
  for (int64_t k = 0; k < in_features; ++k) largest = std::max(largest, static_cast<uint32_t>(columns[k]));
  OSTINATO_CHECK(largest < in_features, "order must consist of columns of x, 0 to ", in_features - 1);
  return columns;
}

// quantized_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output, Tensor? residual,
//                  Tensor? order, SymInt bits, SymInt group_size, bool symmetric, str scales, str kind) -> Tensor
void quantized_linear(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  const Tensor order = call.optional_tensor();
  const QuantFormat format = read_format(call);
  OSTINATO_CHECK(x.dim == 2 && is_contiguous(x, 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == DType::float32 || x.dtype == DType::bfloat16, "x must be float32 or bfloat16");
  const QuantizedWeight quantized(weight, out_features, x.sizes[1], format);
  Tensor out;
  Problem problem = make_problem(call, x, bias, residual, out_features, float32_output, out);
  if (order.exists()) problem.order = checked_order(order, x.sizes[1]);
  switch (format.widening()) {
    case kBytes: run<kBytes>(x.dtype, float32_output, problem, quantized); break;
    case kHalves: run<kHalves>(x.dtype, float32_output, problem, quantized); break;
    case kTable: run<kTable>(x.dtype, float32_output, problem, quantized); break;
    case kFloat8: run<kFloat8>(x.dtype, float32_output, problem, quantized); break;
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(quantized_linear, quantized_linear);

}  // namespace ostinato::linear
