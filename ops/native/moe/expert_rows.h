// Shared by the linear ops over experts, for any layout of weights: the rows of each expert, and the sum of a token's
// results.
//
// A step has T tokens with k slots each, so T * k pairs; pair p is slot p % k of token p / k. An expert's pairs are
// computed as one product with its matrix. A row's result does not depend on the rows that are multiplied beside it
// (linear/tiles.h, linear/amx_linear.h), and a token's results are added in the order of its slots. So a token's bits
// do not depend on the other tokens.
#pragma once

#include "linear/tasks.h"

#include <optional>

namespace ostinato::moe {

using linear::Problem;

// A tensor without its first dimension, at the first expert.
inline Tensor first_expert(const Tensor& stack) {
  return {stack.handle, stack.data, stack.sizes + 1, stack.strides + 1, stack.dim - 1, stack.dtype};
}

// The pairs of each expert that has pairs.
struct ExpertRows {
  struct Expert {
    int64_t id;
    int64_t first;  // in `pairs`
    int64_t rows;
  };

  ExpertRows(const Tensor& ids, int64_t num_experts) : slots(ids.sizes[1]), pairs(ids.num_elements()) {
    const auto* chosen = ids.as<int32_t>();
    std::vector<int64_t> next(num_experts + 1);
    for (size_t pair = 0; pair < pairs.size(); ++pair) {
      const int32_t id = chosen[pair];
      OSTINATO_CHECK(id >= 0 && id < num_experts, "ids[", static_cast<int64_t>(pair) / slots, "] has ", id,
                     ", not an expert: 0 to ", num_experts - 1);
      ++next[id + 1];
    }
    for (int64_t id = 0; id < num_experts; ++id) {
      if (next[id + 1] > 0) experts.push_back({id, next[id], next[id + 1]});
      next[id + 1] += next[id];
    }
    for (size_t pair = 0; pair < pairs.size(); ++pair) pairs[next[chosen[pair]]++] = static_cast<int32_t>(pair);
  }

  int64_t slots;
  std::vector<int32_t> pairs;  // sorted by expert, then ascending
  std::vector<Expert> experts;
};

// A call's arguments and results besides the weight.
struct ExpertCall {
  Tensor x;  // [T, K], or [T * k, K]
  Tensor ids;
  Tensor bias;             // [experts, N], or none
  Tensor routing_weights;  // [T, k] float32, or none
  Tensor residual;         // [T, N], or none
  int64_t num_experts;
  int64_t out_features;
  Tensor out;     // [T * k, N], or [T, N]
  float* sums;    // [T * k, N] with routing weights
  Threads threads;

  int64_t in_features() const { return x.sizes[1]; }
  int64_t pairs_per_row() const { return x.sizes[0] == ids.sizes[0] ? ids.sizes[1] : 1; }
  const char* row(int64_t pair) const {
    return x.as<char>() + pair / pairs_per_row() * x.strides[0] * element_size(x.dtype);
  }
};

// Reads the arguments from the bias to the residual.
inline void read_call(Call& call, ExpertCall& c) {
  c.bias = call.optional_tensor();
  c.out_features = call.integer();
  c.routing_weights = call.optional_tensor();
  c.residual = call.optional_tensor();
  c.threads = call.threads();
}

inline void check(const ExpertCall& c) {
  const int64_t tokens = c.ids.dim == 2 ? c.ids.sizes[0] : 0;
  OSTINATO_CHECK(c.ids.dim == 2 && c.ids.dtype == DType::int32 && c.ids.sizes[1] >= 1 && is_contiguous(c.ids),
                 "ids must be contiguous int32 [T, k]");
  const int64_t pairs = tokens * c.ids.sizes[1];
  OSTINATO_CHECK(c.x.dim == 2 && is_contiguous(c.x, 1) && (c.x.sizes[0] == tokens || c.x.sizes[0] == pairs),
                 "x must be [T, K] or [T * k, K] with contiguous rows");
  OSTINATO_CHECK(c.x.dtype == DType::float32 || c.x.dtype == DType::bfloat16, "x must be float32 or bfloat16");
  const int64_t columns = c.out_features;
  OSTINATO_CHECK(!c.bias.exists() || (c.bias.dtype == c.x.dtype && c.bias.dim == 2 && c.bias.sizes[0] == c.num_experts &&
                                      c.bias.sizes[1] == columns && is_contiguous(c.bias, 1)),
                 "bias must be [experts, out_features] in x's dtype with contiguous rows");
  const Tensor& weights = c.routing_weights;
  OSTINATO_CHECK(!weights.exists() || (weights.dtype == DType::float32 && weights.dim == 2 && weights.sizes[0] == tokens &&
                                       weights.sizes[1] == c.ids.sizes[1] && is_contiguous(weights)),
                 "routing_weights must be contiguous float32 [T, k]");
  OSTINATO_CHECK(!c.residual.exists() || (weights.exists() && c.residual.dtype == c.x.dtype && c.residual.dim == 2 &&
                                          c.residual.sizes[0] == tokens && c.residual.sizes[1] == columns &&
                                          is_contiguous(c.residual, 1)),
                 "residual must be [T, out_features] in x's dtype with contiguous rows, and needs routing_weights");
}

// Memory for the result.
inline void allocate(Call& call, ExpertCall& c) {
  const bool is_combined = c.routing_weights.exists();
  const int64_t pairs = c.ids.num_elements();
  const int64_t sizes[] = {is_combined ? c.ids.sizes[0] : pairs, c.out_features};
  c.sums = is_combined ? call.workspace<float>(pairs * c.out_features) : nullptr;
  c.out = call.empty(sizes, 2, c.x.dtype);
}

// The product of one expert's rows with its matrix. Rows that are not evenly spaced in memory are copied to
// `gathered`, where the expert's first row has the number `first`.
inline Problem expert_problem(const ExpertCall& c, const ExpertRows& rows, const ExpertRows::Expert& expert, char* gathered) {
  const int32_t* pairs = rows.pairs.data() + expert.first;
  const int64_t row_bytes = c.in_features() * element_size(c.x.dtype);
  const char* begin = c.row(pairs[0]);
  const int64_t pitch = expert.rows > 1 ? c.row(pairs[1]) - begin : row_bytes;
  bool is_regular = true;
  for (int64_t r = 2; r < expert.rows && is_regular; ++r) is_regular = c.row(pairs[r]) == begin + r * pitch;
  Problem problem{};
  problem.x = begin;
  problem.row_stride = pitch / element_size(c.x.dtype);
  if (!is_regular) {
    char* copy = gathered + expert.first * row_bytes;
    for (int64_t r = 0; r < expert.rows; ++r) std::memcpy(copy + r * row_bytes, c.row(pairs[r]), row_bytes);
    problem.x = copy;
    problem.row_stride = c.in_features();
  }
  problem.rows = expert.rows;
  problem.in_features = c.in_features();
  if (c.bias.exists()) {
    problem.bias = c.bias.as<char>() + expert.id * c.bias.strides[0] * element_size(c.bias.dtype);
  }
  problem.out_features = c.out_features;
  problem.out = c.sums != nullptr ? static_cast<void*>(c.sums) : c.out.data;
  problem.threads = c.threads;
  problem.out_rows = pairs;
  return problem;
}

// The problems of all experts.
inline std::vector<Problem> expert_problems(Call& call, const ExpertCall& c, const ExpertRows& rows) {
  const int64_t bytes = c.ids.num_elements() * c.in_features() * element_size(c.x.dtype);
  // If there are as many experts as pairs, each expert has one row, and no row needs to be copied.
  char* gathered = rows.experts.size() < rows.pairs.size() ? call.workspace<char>(bytes) : nullptr;
  std::vector<Problem> problems(rows.experts.size());
  const auto count = static_cast<int64_t>(problems.size());
  linear::divide_conversion(c.threads, NumParts{count}, gathered == nullptr ? 0 : bytes).for_each([&](int64_t e) {
    problems[e] = expert_problem(c, rows, rows.experts[e], gathered);
  });
  return problems;
}

// One expert's product, cut into tasks.
template <class Weight, class Blocks>
struct ExpertTasks {
  Problem problem;
  Weight weight;
  Blocks blocks;
  int64_t first_task;
};

// Runs all `num_tasks` tasks with workers of type Worker. An expert's tasks are those from its first_task to the next
// expert's.
template <class Worker, class Tasks>
void run_experts(const Threads& threads, const std::vector<Tasks>& experts, int64_t num_tasks) {
  if (num_tasks == 0) return;
  class Body {
   public:
    explicit Body(const std::vector<Tasks>& experts) : experts_(experts) {}
    void operator()(int64_t task) {
      if (current_ == nullptr || task < current_->first_task || task >= end_) enter(task);
      (*tasks_)(task - current_->first_task);
    }

   private:
    void enter(int64_t task) {
      const auto after = std::upper_bound(experts_.begin(), experts_.end(), task,
                                          [](int64_t number, const Tasks& expert) { return number < expert.first_task; });
      current_ = &*(after - 1);
      end_ = after == experts_.end() ? task + (int64_t{1} << 62) : after->first_task;
      tasks_.emplace(current_->problem, current_->weight, current_->blocks);
    }

    const std::vector<Tasks>& experts_;
    const Tasks* current_ = nullptr;
    int64_t end_ = 0;
    std::optional<linear::PanelTasks<Worker>> tasks_;
  };
  int64_t traffic = 0;
  for (const Tasks& expert : experts) traffic += expert.weight.bytes();
  const Division tasks = divide<linear::kTrafficPerWorker>(threads, NumParts{num_tasks}, traffic);
  linear::for_each_task(tasks, [&] { return Body(experts); });
}

// Multiplies the rows of the experts for which takes(number of rows) is true by their matrices. make_blocks cuts an
// expert's rows into blocks. Worker is the type of the workers.
template <class Worker, class Weights, class MakeBlocks, class Takes>
void multiply_experts(const ExpertCall& c, const ExpertRows& rows, const Weights& weights,
                      const std::vector<Problem>& problems, const MakeBlocks& make_blocks, const Takes& takes) {
  std::vector<ExpertTasks<decltype(weights.matrix(0)), decltype(make_blocks(0))>> experts;
  experts.reserve(problems.size());
  int64_t num_tasks = 0;
  for (size_t e = 0; e < problems.size(); ++e) {
    if (!takes(problems[e].rows)) continue;
    experts.push_back({problems[e], weights.matrix(rows.experts[e].id), make_blocks(problems[e].rows), num_tasks});
    num_tasks += experts.back().blocks.num_groups * experts.back().weight.panels;
  }
  run_experts<Worker>(c.threads, experts, num_tasks);
}

inline bool any_rows(int64_t) { return true; }

// out[t] = sum over slots s, in order, of routing_weights[t][s] * sums[t * k + s], plus the residual.
template <class Element>
void combine(const ExpertCall& c) {
  const int64_t tokens = c.ids.sizes[0], slots = c.ids.sizes[1], columns = c.out_features;
  const int64_t bytes = tokens * slots * columns * 4;
  linear::divide_conversion(c.threads, NumParts{tokens}, bytes).for_each([&](int64_t token) {
    const float* sums = c.sums + token * slots * columns;
    const float* weights = c.routing_weights.as<float>() + token * slots;
    const Element* residual = c.residual.exists() ? c.residual.as<Element>() + token * c.residual.strides[0] : nullptr;
    Element* out = c.out.as<Element>() + token * columns;
    int64_t column = 0;
    for (; column + F32::width <= columns; column += F32::width) {
      F32 sum = broadcast(0.0f);
      for (int64_t s = 0; s < slots; ++s) sum = fma(broadcast(weights[s]), load(sums + s * columns + column), sum);
      store(out + column, residual == nullptr ? sum : sum + load(residual + column));
    }
    for (; column < columns; ++column) {
      float sum = 0.0f;
      for (int64_t s = 0; s < slots; ++s) sum += weights[s] * sums[s * columns + column];
      from_float(residual == nullptr ? sum : sum + to_float(residual[column]), out + column);
    }
  });
}

inline void combine(const ExpertCall& c) {
  if (c.sums == nullptr || c.ids.sizes[0] == 0) return;
  if (c.x.dtype == DType::float32) return combine<float>(c);
  combine<BFloat16>(c);
}

// Checks the call, calls run(rows, problems), and gives the result.
template <class Run>
void multiply_and_give(Call& call, ExpertCall& c, int64_t num_experts, const Run& run) {
  c.num_experts = num_experts;
  check(c);
  const ExpertRows rows(c.ids, num_experts);
  allocate(call, c);
  run(rows, expert_problems(call, c, rows));
  combine(c);
  call.give(c.out);
}

}  // namespace ostinato::moe
