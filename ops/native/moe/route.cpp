// Routing of tokens to experts: scores, the top k of them, and their weights. Rows are independent and use float32
// throughout, so a token's experts and weights do not depend on the other tokens.
#include "core/division.h"
#include "core/elements.h"
#include "core/kernel.h"
#include "core/simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ostinato::moe {
namespace {

enum class Scoring { softmax, sigmoid, top_softmax };

Scoring scoring_named(const std::string& name) {
  if (name == "softmax") return Scoring::softmax;
  if (name == "sigmoid") return Scoring::sigmoid;
  if (name == "top_softmax") return Scoring::top_softmax;
  throw_invalid_argument({"scoring must be softmax, sigmoid or top_softmax, got ", name});
}

struct Routing {
  int64_t experts;
  int top_k;
  Scoring scoring;
  bool renormalize;
  float scale;
  int groups;
  int top_groups;
  int group_top;
  const float* bias;  // null for none
};

// Keeps the largest of the offered values, with their ids, in descending order. Equal values keep the order in which
// they were offered.
class Largest {
 public:
  Largest(int32_t* ids, float* values, int limit) : ids_(ids), values_(values), limit_(limit) {}

  void offer(int32_t id, float value) {
    if (count_ == limit_ && !(value > values_[limit_ - 1])) return;
    int place = count_ < limit_ ? count_++ : limit_ - 1;
    for (; place > 0 && value > values_[place - 1]; --place) {
      values_[place] = values_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    values_[place] = value;
    ids_[place] = id;
  }

 private:
  int32_t* ids_;
  float* values_;
  int limit_;
  int count_ = 0;
};

// x = exp(x - largest) / sum. Returns false if the softmax is undefined.
bool softmax(float* x, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, x[i]);
  if (!std::isfinite(largest)) return false;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
  return true;
}

class Router {
 public:
  explicit Router(const Routing& routing)
      : r_(routing), scores_(routing.experts), choice_(routing.experts), is_open_(routing.groups, 1),
        best_(std::max({routing.top_k, routing.top_groups, routing.group_top})),
        open_groups_(routing.top_groups) {}

  // Reads the logits from scores().
  void operator()(int32_t* ids, float* weights) {
    if (!choose(ids, weights)) {
      for (int slot = 0; slot < r_.top_k; ++slot) {
        ids[slot] = slot;
        weights[slot] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }

  float* scores() { return scores_.data(); }

 private:
  bool choose(int32_t* ids, float* weights) {
    for (const float logit : scores_) {
      if (std::isnan(logit)) return false;
    }
    const bool by_logits = r_.bias == nullptr && r_.groups == 1;
    if (by_logits) choice_ = scores_;
    if (r_.scoring == Scoring::softmax && !softmax(scores_.data(), r_.experts)) return false;
    if (r_.scoring == Scoring::sigmoid) {
      for (float& score : scores_) score = 1.0f / (1.0f + std::exp(-score));
    }
    if (!by_logits) {
      for (int64_t e = 0; e < r_.experts; ++e) choice_[e] = scores_[e] + (r_.bias == nullptr ? 0.0f : r_.bias[e]);
    }
    if (r_.groups > 1) choose_groups();
    const int64_t group_size = r_.experts / r_.groups;
    Largest largest(ids, best_.data(), r_.top_k);
    for (int64_t e = 0; e < r_.experts; ++e) {
      if (is_open_[e / group_size]) largest.offer(static_cast<int32_t>(e), choice_[e]);
    }
    for (int slot = 0; slot < r_.top_k; ++slot) weights[slot] = scores_[ids[slot]];
    if (r_.scoring == Scoring::top_softmax && !softmax(weights, r_.top_k)) return false;
    if (r_.renormalize) {
      float sum = 0.0f;
      for (int slot = 0; slot < r_.top_k; ++slot) sum += weights[slot];
      for (int slot = 0; slot < r_.top_k; ++slot) weights[slot] /= sum + 1e-20f;
    }
    for (int slot = 0; slot < r_.top_k; ++slot) weights[slot] *= r_.scale;
    return true;
  }

  // Opens the groups in which the sum of the `group_top` best experts is largest, and closes the others.
  void choose_groups() {
    const int64_t group_size = r_.experts / r_.groups;
    Largest groups(open_groups_.data(), best_.data(), r_.top_groups);
    std::vector<int32_t> members(r_.group_top);
    std::vector<float> values(r_.group_top);
    for (int group = 0; group < r_.groups; ++group) {
      Largest best(members.data(), values.data(), r_.group_top);
      for (int64_t e = group * group_size; e < (group + 1) * group_size; ++e) best.offer(static_cast<int32_t>(e), choice_[e]);
      float sum = 0.0f;
      for (const float value : values) sum += value;
      groups.offer(group, sum);
    }
    std::fill(is_open_.begin(), is_open_.end(), 0);
    for (const int32_t group : open_groups_) is_open_[group] = 1;
  }

  const Routing& r_;
  std::vector<float> scores_;
  std::vector<float> choice_;  // the numbers by which experts are chosen
  std::vector<char> is_open_;  // by group
  std::vector<float> best_;
  std::vector<int32_t> open_groups_;
};

template <class T>
void read_row(const T* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]);
}

// route(Tensor logits, Tensor? bias, SymInt top_k, str scoring, bool renormalize, float scale, SymInt num_groups,
//       SymInt top_groups, SymInt group_top) -> (Tensor, Tensor)
void route(Call& call) {
  const Tensor logits = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t top_k = call.integer();
  const std::string scoring = call.text();
  const bool renormalize = call.boolean();
  const auto scale = static_cast<float>(call.number());
  const int64_t groups = call.integer();
  const int64_t top_groups = call.integer();
  const int64_t group_top = call.integer();
  OSTINATO_CHECK(logits.dim == 2 && is_contiguous(logits, 1) &&
                     (logits.dtype == DType::float32 || logits.dtype == DType::bfloat16 || logits.dtype == DType::float16),
                 "logits must be a matrix [T, experts] of floats with contiguous rows");
  const int64_t experts = logits.sizes[1];
  OSTINATO_CHECK(groups >= 1 && experts % groups == 0 && top_groups >= 1 && top_groups <= groups && group_top >= 1 &&
                     group_top <= experts / groups,
                 "num_groups must divide the number of experts, top_groups must be 1 to num_groups, and group_top "
                 "must be 1 to the number of experts of a group");
  OSTINATO_CHECK(top_k >= 1 && top_k <= top_groups * (experts / groups),
                 "top_k must be 1 to the number of experts of the chosen groups");
  OSTINATO_CHECK(!bias.exists() || (bias.dtype == DType::float32 && bias.dim == 1 && bias.sizes[0] == experts &&
                                    is_contiguous(bias)),
                 "bias must be a contiguous float32 vector with a value for each expert");
  const Routing routing{experts, static_cast<int>(top_k), scoring_named(scoring), renormalize, scale, static_cast<int>(groups),
                        static_cast<int>(top_groups), static_cast<int>(group_top), bias.as<float>()};
  const int64_t tokens = logits.sizes[0];
  const int64_t sizes[] = {tokens, top_k};
  const Tensor ids = call.empty(sizes, 2, DType::int32);
  const Tensor weights = call.empty(sizes, 2, DType::float32);
  constexpr int64_t kRouterLogitsPerWorker = 4096;  // logits for which waking one more thread pays
  const Division division = divide<kRouterLogitsPerWorker>(call.threads(), NumParts{tokens}, tokens * experts);
  division.run([&](int64_t token, int64_t end) {
    Router router(routing);
    for (; token < end; ++token) {
      with_element(logits.dtype, [&]<class T>(T) {
        read_row(logits.as<T>() + token * logits.strides[0], experts, router.scores());
      });
      router(ids.as<int32_t>() + token * top_k, weights.as<float>() + token * top_k);
    }
  });
  call.give({ids, weights});
}

}  // namespace

OSTINATO_KERNEL(route, route);

}  // namespace ostinato::moe
