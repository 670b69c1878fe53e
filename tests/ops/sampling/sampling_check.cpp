// Samples from made-up rows with and without selection (rows/nucleus.h) and compares the tokens. test_sample_tokens.py
// compiles it for each instruction set.
//
// arguments: seed, number of rows. stdout: draws (4 a row), draws that selection decided, wrong tokens.
#include "rows/draw.h"

#include <cstdio>
#include <cstdlib>
#include <random>

using namespace ostinato::sampling;

namespace {

template <class Choice>
Choice pick(std::mt19937_64& random, std::initializer_list<Choice> choices) {
  return choices.begin()[random() % choices.size()];
}

// A row of logits of a random kind: flat, peaked, with ties, clusters, one outlier, a ramp or NaN. Some tokens may be
// impossible.
std::vector<float> make_row(std::mt19937_64& random) {
  const int count = pick(random, {513, 600, 1000, 4096, 5001, 20000});
  const int kind = static_cast<int>(random() % 8);
  const float spread = pick(random, {0.0f, 1e-6f, 0.01f, 0.3f, 1.0f, 3.0f, 30.0f});
  const double impossible = pick(random, {0.0, 0.0, 0.3, 0.9, 0.999});
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<float> row(count);
  for (int i = 0; i < count; ++i) {
    float logit = normal(random) * spread;
    if (kind == 1) logit = std::round(normal(random) * 3) * spread;                   // ties
    if (kind == 2) logit = (i % 3) * 5.0f + normal(random) * 1e-3f * spread;          // clusters
    if (kind == 3) logit = i == count / 2 ? 12.0f : logit * 0.01f;                    // an outlier
    if (kind == 4) logit = -static_cast<float>(i) * spread / count;                   // a ramp
    if (kind == 5) logit = i < 3 ? 20.0f : logit;                                     // peaks
    if (kind == 6) logit = logit * 1e3f;                                              // most likelihoods are 0
    if (kind == 7) logit = random() % 50 ? logit : std::numeric_limits<float>::quiet_NaN();
    row[i] = uniform(random) < impossible ? -std::numeric_limits<float>::infinity() : logit;
  }
  row[random() % count] = 0.5f;  // at least one token is possible
  return row;
}

Parameters make_parameters(std::mt19937_64& random, int64_t count) {
  std::uniform_real_distribution<double> uniform;
  Parameters p{Path::wide, pick(random, {0.1, 0.7, 1.0, 1.3, 5.0}), count, 1.0, 0.0, uniform(random)};
  p.top_p = pick(random, {1e-4, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9999, 0.999999, uniform(random), 1.0});
  p.min_p = pick(random, {0.0, 0.0, 0.0, 1e-6, 0.01, 0.5, 1.0});
  if (random() % 8 == 0) p.uniform = pick(random, {0.0, 1e-12, 0.5, 1.0 - 0x1p-53});
  return p;
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937_64 random(std::strtoull(arguments[1], nullptr, 10));
  const long rows = std::strtol(arguments[2], nullptr, 10);
  long selected = 0, wrong = 0;
  for (long number = 0; number < rows; ++number) {
    const std::vector<float> logits = make_row(random);
    const Row row(logits.data(), static_cast<int64_t>(logits.size()));
    for (int again = 0; again < 4; ++again) {
      const Parameters p = make_parameters(random, row.count());
      std::vector<double> sums;
      const int64_t sorted = draw_filtered(row, p, sums, false);
      wrong += draw_filtered(row, p, sums, true) != sorted;
      // draw_selected is called for every row, also where draw_filtered does not need it.
      if (const std::optional<int64_t> id = draw_selected(row, p, sums.back())) {
        ++selected;
        wrong += *id != sorted;
      }
    }
  }
  std::printf("%ld %ld %ld\n", 4 * rows, selected, wrong);
}
