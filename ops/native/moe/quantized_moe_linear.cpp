// The linear op over quantised matrices of experts: every token is multiplied by the matrices of the experts that it
// was routed to. The matrices lie in the layout of quantized/layout.h, one after the other.
#include "moe/expert_rows.h"
#include "quantized/float8.h"
#include "quantized/row_worker.h"

#if OSTINATO_AMX
#include "quantized/amx_float8.h"
#include "quantized/amx_quantized.h"
#endif

namespace ostinato::moe {
namespace {

using linear::QuantFormat;
using linear::QuantizedShape;
using linear::QuantizedWeight;

struct QuantizedExperts {
  QuantizedExperts(const Tensor& tensor, int64_t out_features, int64_t in_features, const QuantFormat& format)
      : shape(out_features, in_features, format) {
    OSTINATO_CHECK(tensor.dim == 3, "the weight must have three dimensions: [experts, panels, bytes]");
    data = QuantizedWeight(first_expert(tensor), out_features, in_features, format).data;  // checks it
    count = tensor.sizes[0];
    OSTINATO_CHECK(count <= 1 || tensor.strides[0] == shape.bytes(),
                   "the experts' quantised matrices must lie one after the other");
  }
  QuantizedWeight matrix(int64_t expert) const { return {data + expert * shape.bytes(), shape}; }

  QuantizedShape shape;
  const uint8_t* data;
  int64_t count;
};

template <linear::Widening Bits, class In, class Out>
void run_integers(const ExpertCall& c, const ExpertRows& rows, const QuantizedExperts& weight,
                  const std::vector<Problem>& problems) {
  const QuantizedShape& shape = weight.shape;
  const auto by_tiles = [&]([[maybe_unused]] int64_t count) {
#if OSTINATO_AMX
    return linear::suits_tiles(shape, count);
#else
    return false;
#endif
  };
#if OSTINATO_AMX
  const auto make_blocks = [&](int64_t count) { return linear::TileBlocks(count, shape.groups * shape.group_steps); };
  multiply_experts<linear::QuantizedTileWorker<Bits, In, Out>>(c, rows, weight, problems, make_blocks, by_tiles);
#endif
  const auto make_groups = [&](int64_t count) {
    return linear::RowGroups(count, linear::kQuantRows, linear::RowLayout(shape).row * 4);
  };
  multiply_experts<linear::QuantizedRowWorker<Bits, In, Out>>(c, rows, weight, problems, make_groups,
                                                              [&](int64_t count) { return !by_tiles(count); });
}

template <class In, class Out>
void run_float8(const ExpertCall& c, const ExpertRows& rows, const QuantizedExperts& weight,
                const std::vector<Problem>& problems) {
  const QuantizedShape& shape = weight.shape;
#if OSTINATO_AMX
  if constexpr (std::is_same_v<In, BFloat16>) {
    if (linear::suits_float8_tiles(shape)) {
      using Worker = linear::Float8TileWorker<Out>;
      const auto make_blocks = [&](int64_t count) { return Worker::make_blocks(count, shape); };
      return multiply_experts<Worker>(c, rows, weight, problems, make_blocks, any_rows);
    }
  }
#endif
  using Worker = linear::Float8RowWorker<In, Out>;
  const auto make_groups = [&](int64_t count) {
    return linear::RowGroups(count, linear::kMaxRows, Worker::row_bytes(shape));
  };
  multiply_experts<Worker>(c, rows, weight, problems, make_groups, any_rows);
}

template <linear::Widening Bits, class In, class Out>
void run(const ExpertCall& c, const ExpertRows& rows, const QuantizedExperts& weight,
         const std::vector<Problem>& problems) {
  if constexpr (Bits == linear::kFloat8) {
    run_float8<In, Out>(c, rows, weight, problems);
  } else {
    run_integers<Bits, In, Out>(c, rows, weight, problems);
  }
}

template <linear::Widening Bits>
void run(const ExpertCall& c, const ExpertRows& rows, const QuantizedExperts& weight,
         const std::vector<Problem>& problems) {
  if (c.x.dtype == DType::float32) {
    run<Bits, float, float>(c, rows, weight, problems);
  } else if (c.sums != nullptr) {
    run<Bits, BFloat16, float>(c, rows, weight, problems);
  } else {
    run<Bits, BFloat16, BFloat16>(c, rows, weight, problems);
  }
}

// quantized_moe_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, SymInt out_features, Tensor? routing_weights,
//                      Tensor? residual, SymInt bits, SymInt group_size, bool symmetric, str scales, str kind)
//                      -> Tensor
void quantized_moe_linear(Call& call) {
  ExpertCall c{};
  c.x = call.tensor();
  c.ids = call.tensor();
  const Tensor weight = call.tensor();
  read_call(call, c);
  const QuantFormat format = linear::read_format(call);
  OSTINATO_CHECK(c.x.dim == 2, "x must be a matrix");
  const QuantizedExperts experts(weight, c.out_features, c.x.sizes[1], format);
  multiply_and_give(call, c, experts.count, [&](const ExpertRows& rows, const std::vector<Problem>& problems) {
    switch (format.widening()) {
      case linear::kBytes: return run<linear::kBytes>(c, rows, experts, problems);
      case linear::kHalves: return run<linear::kHalves>(c, rows, experts, problems);
      case linear::kTable: return run<linear::kTable>(c, rows, experts, problems);
      case linear::kFloat8: return run<linear::kFloat8>(c, rows, experts, problems);
    }
  });
}

}  // namespace

OSTINATO_KERNEL(quantized_moe_linear, quantized_moe_linear);

}  // namespace ostinato::moe
