// Chooses one token of a row of logits: the likeliest, or a draw after top-k, then top-p, then min-p. A draw
// inverts the cumulative distribution at the row's random number. Rows are independent: a row's token depends neither
// on other rows nor on the number of threads.
//
// Plain torch needs a sort and four passes in float64. This kernel finds the largest logits in one pass, adds up all
// likelihoods in another one if the draw needs their sum, and then looks at the few candidates that can be drawn. If
// the filters leave many candidates, nucleus.h finds the token without a sort. Tests compare the kernel with the plain
// torch in ops/sampling/sample_rows.py.
#pragma once

#include "rows/nucleus.h"
#include "rows/row.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace ostinato::sampling {

using logit_rows::Candidate;
using logit_rows::kNever;
using logit_rows::Row;

constexpr int64_t kFirstCandidates = 512;

enum class Path { greedy = 0, full = 1, narrow = 2, wide = 3 };  // as in ops/sampling/sample_rows.py

struct Parameters {
  Path path;
  double temperature;
  int64_t top_k;
  double top_p, min_p, uniform;

  // From the values of one row: the first field of the row at `values`, the next one `stride` further, and so on.
  static Parameters read(const double* values, int64_t stride) {
    return {static_cast<Path>(static_cast<int>(values[0])),
            values[stride],
            static_cast<int64_t>(values[2 * stride]),
            values[3 * stride],
            values[4 * stride],
            values[5 * stride]};
  }
};
constexpr int64_t kNumParameters = 6;

// Puts into `kept` the likelihoods, relative to the first, of the leading candidates that pass the filters. `total` is
// the sum of the likelihoods of all tokens that top-k leaves.
//
// Returns true if a filter decided which candidate is the last, and false if the candidates ended first.
inline bool filter(const std::vector<Candidate>& candidates, const Parameters& p, double total, std::vector<double>& kept) {
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

// Finds the token of draw_filtered without a sort, for rows without top-k. Returns nothing if the order of a floating
// point sum could change the token.
//
// `total` is the sum of the row's likelihoods, as for `filter`.
inline std::optional<int64_t> draw_selected(const Row& row, const Parameters& p, double total) {
  constexpr double kLeast = 1e-290;  // smaller likelihoods change no sum, because the largest likelihood is 1
  const Nucleus nucleus(row.logits(), row.count(), row.most(), p.temperature, std::max(p.min_p, kLeast));
  if (!nucleus.is_certain()) return std::nullopt;
  const double margin = nucleus.margin();
  // The last token that top-p leaves is the one at which the sum of likelihoods reaches top-p. If no token does, all
  // are left.
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

// The token of a row with filters. `may_select`: whether draw_selected may be used if many candidates are left. It does
// not change the token.
inline int64_t draw_filtered(const Row& row, const Parameters& p, std::vector<double>& sums, bool may_select) {
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

// The token of a row of `count` logits.
inline int64_t draw(const float* logits, int64_t count, const Parameters& p) {
  const Row row(logits, count);
  if (p.path == Path::greedy || !(row.most() > kNever)) return row.likeliest();
  std::vector<double> sums;
  if (p.path != Path::full) return draw_filtered(row, p, sums, true);
  const auto inverse = static_cast<float>(1.0 / p.temperature);
  row.sum(inverse, sums);
  return row.invert(p.uniform * sums.back(), inverse, sums);
}

}  // namespace ostinato::sampling
