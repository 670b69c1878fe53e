// One row of logits: the maxima, sums and candidates that the kernels of sampling and of log-probabilities share.
#pragma once

#include "core/division.h"
#include "core/simd.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace ostinato::logit_rows {

constexpr float kLog2E = 1.442695041f;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kLogitsPerWorker = 16 << 10;  // logits for which waking one more thread pays
constexpr int kDepth = 16;  // logits that share one maximum
constexpr int kChunk = kDepth * F32::width;

struct Candidate {
  float logit;
  int32_t id;
};

inline bool likelier(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// A row in chunks of kDepth vectors. Elements past its end and logits that are NaN count as -inf, and `candidates`
// leaves them out. There is a maximum for each lane of each chunk: that of lane l of chunk c covers the kDepth logits
// at c * kChunk + l + multiples of the width. So finding the maxima needs no operation across lanes.
class Row {
 public:
  Row(const float* logits, int64_t count) : logits_(logits), count_(count), num_chunks_(ceil_divide(count, kChunk)) {
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
      // The load is the first argument, because max returns its second argument if one of them is NaN.
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

  // For each chunk, the sum of exp((logit - most) * inverse_temperature) up to the chunk's end.
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

  // How many logits are larger than `logit`.
  int64_t count_above(float logit) const {
    int64_t found = 0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (!(reduce_max(load(maxima_.data() + c * F32::width)) > logit)) continue;
      const float* from = chunk(c);
      for (int i = 0; i < kChunk; ++i) found += from[i] > logit;
    }
    return found;
  }

  // The `wanted` largest logits in descending order, fewer if too few are numbers. Equal logits are in the order of
  // their ids.
  void candidates(int64_t wanted, std::vector<Candidate>& found) const {
    float threshold = kNever;
    if (wanted < static_cast<int64_t>(maxima_.size())) {
      // The maximum with rank `wanted` is a threshold: at least `wanted` logits reach it.
      std::vector<float> ranked = maxima_;
      std::nth_element(ranked.begin(), ranked.begin() + wanted - 1, ranked.end(),
                       [](const auto& a, const auto& b) { return a > b; });
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
        // Several values may equal the threshold; only the first of them are taken.
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
    const F32 exponent = (load(from) - broadcast(most_)) * broadcast(inverse_temperature * kLog2E);
    return exp2(max(exponent, broadcast(-127.0f)));  // 0 from there down, and for NaN: the second argument
  }

  const float* logits_;
  int64_t count_, num_chunks_;
  float most_ = kNever;
  std::vector<float> maxima_;
  alignas(64) float tail_[kChunk];
};

}  // namespace ostinato::logit_rows
