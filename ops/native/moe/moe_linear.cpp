// The linear ops over packed and compressed matrices of experts: every token is multiplied by the matrices of the experts
// that it was routed to. The matrices lie in the layouts of linear/layout.h and compressed.h, one after the other.
#include "linear/compressed.h"
#include "linear/row_worker.h"
#include "moe/expert_rows.h"

#if OSTINATO_AMX
#include "linear/amx_linear.h"
#include "linear/compressed_tiles.h"
#else
#include "linear/compressed_steps.h"
#endif

namespace ostinato::moe {
namespace {

using linear::CompressedWeight;
using linear::PackedWeight;

#if OSTINATO_AMX
template <class Out, class Panels>
using BFloat16Worker = linear::TileWorker<Out, Panels>;
using PackedPanels = linear::PackedPanelTiles;
using CompressedPanels = linear::CompressedPanelTiles;
#else
template <class Out, class Panels>
using BFloat16Worker = linear::RowWorker<linear::BFloat16Pairs, Out, Panels>;
using PackedPanels = linear::PackedSteps;
using CompressedPanels = linear::CompressedSteps;
#endif

template <class Weight>
struct Experts {
  Weight first;
  int64_t count;

  Weight matrix(int64_t expert) const { return first.next(expert); }
};

Experts<PackedWeight> packed_experts(const Tensor& weight, int64_t out_features, int64_t in_features) {
  OSTINATO_CHECK(weight.dim == 5, "the weight must have five dimensions: [experts, panels, steps, 32, values of K]");
  const Experts<PackedWeight> experts{{first_expert(weight), out_features, in_features}, weight.sizes[0]};
  OSTINATO_CHECK(experts.count <= 1 || weight.strides[0] * element_size(weight.dtype) == experts.first.bytes(),
                 "the experts' packed matrices must lie one after the other");
  return experts;
}

Experts<CompressedWeight> compressed_experts(const Tensor& weight, const Tensor& exceptions, int64_t out_features,
                                             int64_t in_features) {
  OSTINATO_CHECK(weight.dim == 3, "the weight must have three dimensions: [experts, panels, bytes]");
  const Experts<CompressedWeight> experts{{first_expert(weight), exceptions, out_features, in_features}, weight.sizes[0]};
  OSTINATO_CHECK(experts.count <= 1 || weight.strides[0] == experts.first.bytes(),
                 "the experts' compressed matrices must lie one after the other");
  return experts;
}

template <class Worker, class Weight>
void run_rows(const ExpertCall& c, const ExpertRows& rows, const Experts<Weight>& experts, int64_t step_floats,
              const std::vector<Problem>& problems) {
  const auto make_groups = [&](int64_t count) {
    return linear::RowGroups(count, linear::kMaxRows, experts.first.steps * step_floats * 4);
  };
  multiply_experts<Worker>(c, rows, experts, problems, make_groups, any_rows);
}

template <class Panels, class Weight>
void run_bfloat16(const ExpertCall& c, const ExpertRows& rows, const Experts<Weight>& experts,
                  const std::vector<Problem>& problems) {
  const auto run = [&]<class Out>(Out) {
    using Worker = BFloat16Worker<Out, Panels>;
#if OSTINATO_AMX
    const auto make_blocks = [&](int64_t count) { return linear::TileBlocks(count, experts.first.steps); };
    multiply_experts<Worker>(c, rows, experts, problems, make_blocks, any_rows);
#else
    run_rows<Worker>(c, rows, experts, linear::BFloat16Pairs::kFloats, problems);
#endif
  };
  if (c.sums != nullptr) {
    run(float{});
  } else {
    run(BFloat16{});
  }
}

// packed_moe_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, SymInt out_features, Tensor? routing_weights,
//                   Tensor? residual) -> Tensor
void packed_moe_linear(Call& call) {
  ExpertCall c{};
  c.x = call.tensor();
  c.ids = call.tensor();
  const Tensor weight = call.tensor();
  read_call(call, c);
  OSTINATO_CHECK(c.x.dim == 2 && c.x.dtype == weight.dtype, "x must be a matrix in the dtype of the packed weight");
  const auto experts = packed_experts(weight, c.out_features, c.x.sizes[1]);
  multiply_and_give(call, c, experts.count, [&](const ExpertRows& rows, const std::vector<Problem>& problems) {
    if (c.x.dtype == DType::float32) {
      run_rows<linear::RowWorker<linear::Float32, float>>(c, rows, experts, linear::Float32::kFloats, problems);
    } else {
      run_bfloat16<PackedPanels>(c, rows, experts, problems);
    }
  });
}

// compressed_moe_linear(Tensor x, Tensor ids, Tensor weight, Tensor exceptions, Tensor? bias, SymInt out_features,
//                       Tensor? routing_weights, Tensor? residual) -> Tensor
void compressed_moe_linear(Call& call) {
  ExpertCall c{};
  c.x = call.tensor();
  c.ids = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor exceptions = call.tensor();
  read_call(call, c);
  OSTINATO_CHECK(c.x.dim == 2 && c.x.dtype == DType::bfloat16, "x must be a matrix of bfloat16 for a compressed weight");
  const auto experts = compressed_experts(weight, exceptions, c.out_features, c.x.sizes[1]);
  multiply_and_give(call, c, experts.count, [&](const ExpertRows& rows, const std::vector<Problem>& problems) {
    run_bfloat16<CompressedPanels>(c, rows, experts, problems);
  });
}

}  // namespace

OSTINATO_KERNEL(packed_moe_linear, packed_moe_linear);
OSTINATO_KERNEL(compressed_moe_linear, compressed_moe_linear);

}  // namespace ostinato::moe
