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

// Runs the products of all experts. make_blocks(rows) cuts an expert's rows into blocks, which form num_groups(blocks)
// groups.
template <class Worker, class Blocks, class MakeBlocks, class NumGroups>
void run(const ExpertCall& c, const ExpertRows& rows, const PackedExperts& weight, const std::vector<Problem>& problems,
         const MakeBlocks& make_blocks, const NumGroups& num_groups) {
  std::vector<ExpertTasks<PackedWeight, Blocks>> experts;
  experts.reserve(problems.size());
  int64_t num_tasks = 0;
  for (size_t e = 0; e < problems.size(); ++e) {
    experts.push_back({problems[e], weight.matrix(rows.experts[e].id), make_blocks(problems[e].rows), num_tasks});
    num_tasks += num_groups(experts.back().blocks) * weight.panels;
  }
  run_experts<Worker>(c.threads, experts, num_tasks);
}

template <class Kind, class Out>
void run_rows(const ExpertCall& c, const ExpertRows& rows, const PackedExperts& weight, const std::vector<Problem>& problems) {
  run<linear::RowWorker<Kind, Out>, linear::RowGroups>(
      c, rows, weight, problems,
      [&](int64_t count) { return linear::RowGroups(count, linear::kMaxRows, weight.steps * Kind::kFloats * 4); },
      [](const linear::RowGroups& groups) { return groups.count; });
}

template <class Out>
void run_bfloat16(const ExpertCall& c, const ExpertRows& rows, const PackedExperts& weight,
                  const std::vector<Problem>& problems) {
#if OSTINATO_AMX
  run<linear::TileWorker<Out>, linear::TileBlocks>(
      c, rows, weight, problems, [&](int64_t count) { return linear::TileBlocks(count, weight.steps); },
      [](const linear::TileBlocks& blocks) { return blocks.groups; });
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
