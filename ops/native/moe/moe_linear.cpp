// The linear op over packed matrices of experts: every token is multiplied by the matrices of the experts that it was
// routed to. The matrices lie in the layout of linear/layout.h, one after the other.
#include "linear/row_worker.h"
#include "moe/expert_rows.h"

#if OSTINATO_AMX
#include "linear/amx_linear.h"
#endif

namespace ostinato::moe {
namespace {

using linear::PackedWeight;

struct PackedExperts {
  PackedExperts(const Tensor& tensor, int64_t out_features, int64_t in_features) {
    OSTINATO_CHECK(tensor.dim == 5, "the weight must have five dimensions: [experts, panels, steps, 32, values of K]");
    const Tensor first{tensor.handle, tensor.data, tensor.sizes + 1, tensor.strides + 1, 4, tensor.dtype};
    const PackedWeight matrix(first, out_features, in_features);  // checks it
    units = matrix.units;
    panels = matrix.panels;
    steps = matrix.steps;
    count = tensor.sizes[0];
    OSTINATO_CHECK(count <= 1 || tensor.strides[0] * element_size(tensor.dtype) == matrix.bytes(),
                   "the experts' packed matrices must lie one after the other");
  }
  PackedWeight matrix(int64_t expert) const {
    return {units + expert * panels * steps * linear::kPanel, panels, steps};
  }

  const uint32_t* units;
  int64_t count;
  int64_t panels;
  int64_t steps;
};

template <class Kind, class Out>
void run_rows(const ExpertCall& c, const ExpertRows& rows, const PackedExperts& weight, const std::vector<Problem>& problems) {
  const auto make_groups = [&](int64_t count) {
    return linear::RowGroups(count, linear::kMaxRows, weight.steps * Kind::kFloats * 4);
  };
  multiply_experts<linear::RowWorker<Kind, Out>>(c, rows, weight, problems, make_groups, any_rows);
}

template <class Out>
void run_bfloat16(const ExpertCall& c, const ExpertRows& rows, const PackedExperts& weight,
                  const std::vector<Problem>& problems) {
#if OSTINATO_AMX
  const auto make_blocks = [&](int64_t count) { return linear::TileBlocks(count, weight.steps); };
  multiply_experts<linear::TileWorker<Out>>(c, rows, weight, problems, make_blocks, any_rows);
#else
  run_rows<linear::BFloat16Pairs, Out>(c, rows, weight, problems);
#endif
}

// packed_moe_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, SymInt out_features, Tensor? routing_weights,
//                   Tensor? residual) -> Tensor
void packed_moe_linear(Call& call) {
  ExpertCall c{};
  c.x = call.tensor();
  c.ids = call.tensor();
  const Tensor weight = call.tensor();
  c.bias = call.optional_tensor();
  c.out_features = call.integer();
  c.routing_weights = call.optional_tensor();
  c.residual = call.optional_tensor();
  c.threads = call.threads();
  OSTINATO_CHECK(c.x.dim == 2 && c.x.dtype == weight.dtype, "x must be a matrix in the dtype of the packed weight");
  const PackedExperts experts(weight, c.out_features, c.x.sizes[1]);
  c.num_experts = experts.count;
  check(c);
  const ExpertRows rows(c.ids, experts.count);
  allocate(call, c);
  const std::vector<Problem> problems = expert_problems(call, c, rows);
  if (c.x.dtype == DType::float32) {
    run_rows<linear::Float32, float>(c, rows, experts, problems);
  } else if (c.sums != nullptr) {
    run_bfloat16<float>(c, rows, experts, problems);
  } else {
    run_bfloat16<BFloat16>(c, rows, experts, problems);
  }
  combine(c);
  call.give(c.out);
}

}  // namespace

OSTINATO_KERNEL(packed_moe_linear, packed_moe_linear);

}  // namespace ostinato::moe
