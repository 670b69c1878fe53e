// One token for each row of logits: the likeliest, or a draw after top-k, then top-p, then min-p by inverting the
// cumulative distribution at the row's number. Rows are independent: a row's token depends neither on other rows nor
// on the number of threads.
//
// Plain torch needs a sort and four passes in float64. This kernel makes one pass for the sum, and then looks at the
// few candidates that can be drawn. Where the filters leave many, nucleus.h finds the token without a sort. Tests
// compare the kernel with the plain torch in ops/sample_rows.py.
#include "core/kernel.h"
#include "core/simd.h"
#include "rows/nucleus.h"

#include <algorithm>
#include <vector>

namespace ostinato::sampling {
namespace {

constexpr float kLog2E = 1.442695041f;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kDepth = 16;  // logits that share one maximum
constexpr int kChunk = kDepth * F32::width;
constexpr int64_t kFirstCandidates = 512;
constexpr int64_t kLogitsPerWorker = 16 << 10;  // that pay for waking one more thread

enum class Path { greedy = 0, full = 1, narrow = 2, wide = 3 };  // as in ops/sample_rows.py

struct Parameters {
  Path path;
  double temperature;
  int64_t top_k;
  double top_p, min_p, uniform;
};

struct Candidate {
  float logit;
  int32_t id;
};

bool likelier(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// A row in chunks of kDepth vectors; past its end it is impossible. The maximum of lane l of chunk c is that of the
// kDepth logits at c * kChunk + l + multiples of the width: no horizontal step is needed to find it. A token whose logit
// is NaN is impossible too.
class Row {
 public:
  Row(const float* logits, int64_t count) : logits_(logits), count_(count), num_chunks_((count + kChunk - 1) / kChunk) {
    const int64_t whole = count / kChunk;
    if (whole < num_chunks_) {
      std::fill(tail_, tail_ + kChunk, kNever);
      std::copy(logits + whole * kChunk, logits + count, tail_);
    }
    maxima_.resize(num_chunks_ * F32::width);
    F32 most = broadcast(kNever);
    for (int64_t c = 0; c < num_chunks_; ++c) {
      const float* from = chunk(c);
      F32 lanes = broadcast(kNever);
      // In this order, because max gives its second argument where one is NaN.
      for (int v = 0; v < kDepth; ++v) lanes = max(load(from + v * F32::width), lanes);
      store(maxima_.data() + c * F32::width, lanes);
      most = max(most, lanes);
    }
    most_ = reduce_max(most);
  }

  float most() const { return most_; }
  const float* logits() const { return logits_; }
  int64_t count() const { return count_; }

  // The first id of the largest logit; 0 when no token is possible.
  int64_t likeliest() const {
    if (!(most_ > kNever)) return 0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (reduce_max(load(maxima_.data() + c * F32::width)) != most_) continue;
      const float* from = chunk(c);
      return c * kChunk + (std::find(from, from + kChunk, most_) - from);
    }
    return 0;  // not reached
  }

  // exp((logit - most) * inverse_temperature), summed up to and including each chunk.
  void sum(float inverse_temperature, std::vector<double>& cumulative) const {
    cumulative.resize(num_chunks_);
    double total = 0.0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      const float* from = chunk(c);
      F32 lanes = broadcast(0.0f);
      for (int v = 0; v < kDepth; ++v) lanes = lanes + weight(from + v * F32::width, inverse_temperature);
      total += reduce_sum(lanes);
      cumulative[c] = total;
    }
  }

  // The id at which the cumulative sum exceeds `target`; ids without mass are skipped.
  int64_t invert(double target, float inverse_temperature, const std::vector<double>& cumulative) const {
    auto place = std::upper_bound(cumulative.begin(), cumulative.end(), target);
    if (place == cumulative.end()) place = std::lower_bound(cumulative.begin(), cumulative.end(), cumulative.back());
    const int64_t c = place - cumulative.begin();
    alignas(64) float weights[kChunk];
    for (int v = 0; v < kDepth; ++v) {
      store(weights + v * F32::width, weight(chunk(c) + v * F32::width, inverse_temperature));
    }
    double before = c == 0 ? 0.0 : cumulative[c - 1];
    int last = 0;
    for (int i = 0; i < kChunk; ++i) {
      if (weights[i] == 0.0f) continue;
      last = i;
      before += weights[i];
      if (before > target) break;
    }
    return c * kChunk + last;
  }

  // The `wanted` likeliest, in order, equal ones by id.
  void candidates(int64_t wanted, std::vector<Candidate>& found) const {
    float threshold = kNever;
    if (wanted < static_cast<int64_t>(maxima_.size())) {
      // At least `wanted` logits are as large as the maximum of that rank.
      std::vector<float> ranked = maxima_;
      std::nth_element(ranked.begin(), ranked.begin() + wanted - 1, ranked.end(), std::greater<>());
      threshold = ranked[wanted - 1];
    }
    found.clear();
    int64_t num_equal = 0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (reduce_max(load(maxima_.data() + c * F32::width)) < threshold) continue;
      const int64_t first = c * kChunk;
      const float* from = chunk(c);
      const int64_t size = std::min<int64_t>(kChunk, count_ - first);
      for (int64_t i = 0; i < size; ++i) {
        // Of those as large as the threshold, only the first are wanted.
        if (from[i] > threshold || (from[i] == threshold && num_equal++ < wanted)) {
          found.push_back({from[i], static_cast<int32_t>(first + i)});
        }
      }
    }
    if (wanted < static_cast<int64_t>(found.size())) {
      std::nth_element(found.begin(), found.begin() + wanted, found.end(), likelier);
      found.resize(wanted);
    }
    std::sort(found.begin(), found.end(), likelier);
  }

 private:
  const float* chunk(int64_t c) const { return (c + 1) * kChunk <= count_ ? logits_ + c * kChunk : tail_; }

  F32 weight(const float* from, float inverse_temperature) const {
    return exp2((load(from) - broadcast(most_)) * broadcast(inverse_temperature * kLog2E));
  }

  const float* logits_;
  int64_t count_, num_chunks_;
  float most_ = kNever;
  std::vector<float> maxima_;
  alignas(64) float tail_[kChunk];
};

// The likelihoods, relative to the first's, of the leading candidates that the filters leave.
//
// Returns whether a filter, and not the end of the candidates, decided which one is the last.
bool filter(const std::vector<Candidate>& candidates, const Parameters& p, double total, std::vector<double>& kept) {
  kept.clear();
  double before = 0.0;
  for (const Candidate& candidate : candidates) {
    const double mass = std::exp((static_cast<double>(candidate.logit) - candidates[0].logit) / p.temperature);
    if (!kept.empty() && (before >= p.top_p * total || mass == 0.0)) return true;
    if (mass < p.min_p) return true;
    kept.push_back(mass);
    before += mass;
  }
  return false;
}

// The token that draw_filtered gives, without a sort; nothing where the order of a sum could decide. For rows
// without top-k.
//
// `total`: the row's likelihoods summed up, as `filter` gets them.
std::optional<int64_t> draw_selected(const Row& row, const Parameters& p, double total) {
  constexpr double kLeast = 1e-290;  // smaller likelihoods change no sum: the largest is 1
  const Nucleus nucleus(row.logits(), row.count(), row.most(), p.temperature, std::max(p.min_p, kLeast));
  if (!nucleus.is_certain()) return std::nullopt;
  const double margin = nucleus.margin();
  // The last token that the filters leave is the first with which the sum reaches top-p; without one it is the last.
  const double border = p.top_p * total;
  double kept = nucleus.total();
  if (border <= kept + margin) {
    const std::optional<Place> last = nucleus.find(border);
    if (!last || border >= last->with - margin || (last->before > 0.0 && border <= last->before + margin)) {
      return std::nullopt;
    }
    kept = last->with;
  }
  const double target = p.uniform * kept;
  const std::optional<Place> drawn = nucleus.find(target);
  if (!drawn || target >= std::min(drawn->with, kept) - 2 * margin ||
      (drawn->before > 0.0 && target <= drawn->before + 2 * margin)) {
    return std::nullopt;
  }
  return drawn->id;
}

// The token of a row with filters. `may_select`: whether draw_selected may be used where many candidates are left;
// the token is the same.
int64_t draw_filtered(const Row& row, const Parameters& p, std::vector<double>& sums, bool may_select) {
  std::vector<Candidate> candidates;
  std::vector<double> kept;
  const int64_t limit = std::clamp<int64_t>(p.top_k, 1, row.count());
  if (limit < row.count()) {
    row.candidates(limit, candidates);
    double total = 0.0;
    for (const Candidate& c : candidates) {
      total += std::exp((static_cast<double>(c.logit) - candidates[0].logit) / p.temperature);
    }
    filter(candidates, p, total, kept);
  } else {
    row.sum(static_cast<float>(1.0 / p.temperature), sums);
    for (int64_t wanted = kFirstCandidates;; wanted *= 8) {
      row.candidates(wanted, candidates);
      if (filter(candidates, p, sums.back(), kept) || wanted >= row.count()) break;
      if (may_select && wanted == kFirstCandidates) {
        if (const std::optional<int64_t> id = draw_selected(row, p, sums.back())) return *id;
      }
    }
  }
  double total = 0.0;
  for (const double mass : kept) total += mass;
  const double target = p.uniform * total;
  double sum = 0.0;
  for (size_t i = 0; i < kept.size(); ++i) {
    sum += kept[i];
    if (sum > target) return candidates[i].id;
  }
  return candidates[kept.size() - 1].id;
}

int64_t draw(const float* logits, int64_t count, const Parameters& p) {
  const Row row(logits, count);
  if (p.path == Path::greedy || !(row.most() > kNever)) return row.likeliest();
  std::vector<double> sums;
  if (p.path != Path::full) return draw_filtered(row, p, sums, true);
  const auto inverse = static_cast<float>(1.0 / p.temperature);
  row.sum(inverse, sums);
  return row.invert(p.uniform * sums.back(), inverse, sums);
}

// sample_tokens(Tensor logits, Tensor inputs) -> Tensor
void sample_tokens(Call& call) {
  const Tensor logits = call.tensor();
  const Tensor inputs = call.tensor();
  OSTINATO_CHECK(logits.dtype == DType::float32 && logits.dim == 2 && logits.sizes[1] > 0 &&
                     (logits.sizes[1] == 1 || logits.strides[1] == 1),
                 "logits must be float32 [R, V] with contiguous rows, V at least 1");
  const int64_t rows = logits.sizes[0], count = logits.sizes[1];
  OSTINATO_CHECK(inputs.dtype == DType::float64 && inputs.dim == 2 && inputs.sizes[0] == 6 &&
                     inputs.sizes[1] == rows && (rows <= 1 || inputs.strides[1] == 1),
                 "inputs must be float64 [6, R] with contiguous rows");
  const Tensor out = call.empty(logits.sizes, 1, DType::int64);
  const int64_t worth = std::min(rows * count / kLogitsPerWorker, rows);
  const int workers = static_cast<int>(std::clamp<int64_t>(worth, 1, call.threads().count()));
  call.threads().run(workers, [&](int worker) {
    const int64_t last = rows * (worker + 1) / workers;
    for (int64_t r = rows * worker / workers; r < last; ++r) {
      const auto input = [&](int64_t field) { return inputs.as<double>()[field * inputs.strides[0] + r]; };
      const Parameters parameters{static_cast<Path>(static_cast<int>(input(0))),
                                  input(1),
                                  static_cast<int64_t>(input(2)),
                                  input(3),
                                  input(4),
                                  input(5)};
      out.as<int64_t>()[r] = draw(logits.as<float>() + r * logits.strides[0], count, parameters);
    }
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(sample_tokens, sample_tokens);

}  // namespace ostinato::sampling
