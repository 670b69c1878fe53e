// Top-p selection without a sort. The tokens of a row are summed from the likeliest on, and the kernel finds the token
// at which the running sum of likelihoods passes a border.
//
// The logits are counted into buckets by their distance from the largest logit. The buckets are in order, so the sum
// passes the border in one of them. Only the logits of that bucket are divided further, until few are left to be
// sorted.
//
// The likelihoods are added in another order than in a sorted row. Both sums differ from the exact sum by less than
// `margin`. So if the running sums before and after the found token are farther than `margin` from the border, a sort
// would find the same token.
#pragma once

#include "rows/row.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace ostinato::sampling {

constexpr int kBlock = 16;  // likelihoods that are computed at once

namespace nucleus {

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));
constexpr int kLanes = 8;

// exp(input) for numbers from -700 to 0, within two units in the last place; 0 for smaller numbers and for NaN.
inline __attribute__((always_inline)) void exponentials(const Doubles& input, double* out) {
  // x = k log(2) + r; adding 1.5 * 2^52 rounds to a whole number and leaves k in the lowest bits.
  constexpr double kRound = 0x1.8p52, kHigh = 0x1.62e42fefa3800p-1, kLow = 0x1.ef35793c76730p-45;
  const Longs in_range = input >= -700.0;
  const Doubles zero = {};
  const Doubles x = in_range ? input : zero;
  const Doubles shifted = x * 0x1.71547652b82fep0 + kRound;
  const Doubles k = shifted - kRound;
  const Doubles r = (x - k * kHigh) - k * kLow;
  // The Taylor series. The first omitted term is below 2^-57.
  Doubles sum = zero + 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r * r + r + 1.0;
  Longs bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  Longs power;
  std::memcpy(&power, &sum, sizeof power);
  power += bits << 52;  // times 2^k
  power &= in_range;
  std::memcpy(out, &power, sizeof power);
}

}  // namespace nucleus

// exp((logit - most) / temperature) of kBlock logits.
inline void likelihoods(const float* logits, float most, double temperature, double* out) {
  for (int first = 0; first < kBlock; first += nucleus::kLanes) {
    nucleus::Floats part;
    std::memcpy(&part, logits + first, sizeof part);
    const auto wide = __builtin_convertvector(part, nucleus::Doubles);
    nucleus::exponentials((wide - static_cast<double>(most)) / temperature, out + first);
  }
}

// Counts logits by their distance from the largest logit. Bucket 0 has the largest logits.
class Buckets {
 public:
  static constexpr int kCount = 1024;

  Buckets(float highest, float lowest)
      : highest_(highest), scale_(highest > lowest ? (kCount - 1) / (highest - lowest) : 1.0f) {}

  // Whether the buckets keep the order of the logits.
  bool is_valid() const { return scale_ > 0.0f && scale_ < 1e30f; }

  int of(float logit) const {
    const float place = (highest_ - logit) * scale_;
    return place < kCount - 1 ? static_cast<int>(place) : kCount - 1;
  }

  void add(int bucket, double mass) {
    masses_[bucket] += mass;
    ++sizes_[bucket];
  }

  // Returns the bucket in which the running sum passes the border, or kCount if it never does. `before` is the running
  // sum so far; it becomes the sum before that bucket.
  int find(double border, double& before) const {
    for (int bucket = 0; bucket < kCount; ++bucket) {
      if (before + masses_[bucket] > border) return bucket;
      before += masses_[bucket];
    }
    return kCount;
  }

  double mass(int bucket) const { return masses_[bucket]; }
  int64_t size(int bucket) const { return sizes_[bucket]; }

 private:
  float highest_, scale_;
  double masses_[kCount] = {};
  int32_t sizes_[kCount] = {};
};

// The token with which a running sum passes a border.
struct Place {
  int64_t id;
  double before, with;  // the running sums without and with the token; `before` is 0 for the first token
};

// The likelihoods of one row, relative to the largest logit's.
class Nucleus {
 public:
  // Likelihoods below `least` are ignored.
  Nucleus(const float* logits, int64_t count, float most, double temperature, double least)
      : logits_(logits), count_(count), most_(most), temperature_(temperature), least_(least), buckets_(most, lowest()) {
    if (!buckets_.is_valid()) return;
    is_certain_ = true;
    places_.resize(round_up(count, kScan), kOutside);
    int64_t first = 0;
    for (; first + kBlock <= count; first += kBlock) add_block(logits + first, first);
    if (first < count) {
      float rest[kBlock];
      std::fill(rest, rest + kBlock, -std::numeric_limits<float>::infinity());
      std::copy(logits + first, logits + count, rest);
      add_block(rest, first);
    }
    for (int bucket = 0; bucket < Buckets::kCount; ++bucket) total_ += buckets_.mass(bucket);
  }

  // False if the buckets are not valid, or if a likelihood is so near to `least` that a rounding error decides whether
  // it counts.
  bool is_certain() const { return is_certain_; }
  double total() const { return total_; }
  // More than twice the rounding error of a sum of the row in any order.
  double margin() const { return total_ * static_cast<double>(count_ + Buckets::kCount) * 4e-16; }

  // The token with which the running sum passes the border. Nothing if the sum never passes it, or if rounding could
  // decide.
  std::optional<Place> find(double border) const {
    double before = 0.0;
    const int bucket = buckets_.find(border, before);
    if (bucket == Buckets::kCount) return std::nullopt;
    std::vector<Candidate> entries;
    entries.reserve(buckets_.size(bucket));
    for (int64_t first = 0; first < count_; first += kScan) {
      if (!has(places_.data() + first, static_cast<uint16_t>(bucket))) continue;
      for (int64_t id = first; id < first + kScan; ++id) {
        if (places_[id] == bucket) entries.push_back({logits_[id], static_cast<int32_t>(id)});
      }
    }
    return find_among(entries, border, before);
  }

 private:
  using Candidate = logit_rows::Candidate;

  static constexpr size_t kSortable = 256;

  void add_block(const float* logits, int64_t first) {
    double masses[kBlock];
    int places[kBlock];
    likelihoods(logits, most_, temperature_, masses);
    for (int i = 0; i < kBlock; ++i) places[i] = buckets_.of(logits[i]);
    int num_small = 0;
    for (int i = 0; i < kBlock; ++i) num_small += masses[i] <= least_ * (1.0 + 1e-12);
    for (int i = 0; i < kBlock; ++i) {
      if (num_small > 0 && masses[i] <= least_ * (1.0 + 1e-12)) {
        // Near enough to `least` for a rounding error to decide.
        is_certain_ = is_certain_ && masses[i] < least_ * (1.0 - 1e-12);
        continue;
      }
      buckets_.add(places[i], masses[i]);
      places_[first + i] = static_cast<uint16_t>(places[i]);
    }
  }

  static constexpr int kScan = 32;
  static constexpr uint16_t kOutside = 0xffff;  // the bucket number of an ignored logit

  // Whether one of kScan bucket numbers is `wanted`.
  static bool has(const uint16_t* places, uint16_t wanted) {
    typedef uint16_t Places __attribute__((vector_size(2 * kScan)));
    Places part;
    std::memcpy(&part, places, sizeof part);
    const auto equal = part == wanted;
    uint64_t words[sizeof part / 8];
    std::memcpy(words, &equal, sizeof words);
    uint64_t any = 0;
    for (const uint64_t word : words) any |= word;
    return any != 0;
  }

  // Calls take(entry, likelihood) for each entry in order, until it returns true.
  template <class Take>
  void weigh(const std::vector<Candidate>& entries, const Take& take) const {
    float logits[kBlock] = {};
    double masses[kBlock];
    for (size_t first = 0; first < entries.size(); first += kBlock) {
      const size_t size = std::min<size_t>(kBlock, entries.size() - first);
      for (size_t i = 0; i < size; ++i) logits[i] = entries[first + i].logit;
      likelihoods(logits, most_, temperature_, masses);
      for (size_t i = 0; i < size; ++i) {
        if (take(entries[first + i], masses[i])) return;
      }
    }
  }

  // `entries` are sorted by id. `before` is the running sum before all of them.
  std::optional<Place> find_among(std::vector<Candidate>& entries, double border, double before) const {
    bool is_sorted = false;
    while (entries.size() > kSortable) {
      float highest = entries[0].logit, lowest = highest;
      for (const Candidate& entry : entries) {
        highest = std::max(highest, entry.logit);
        lowest = std::min(lowest, entry.logit);
      }
      is_sorted = highest == lowest;  // equal logits are already in the order of their ids
      if (is_sorted) break;
      Buckets buckets(highest, lowest);
      if (!buckets.is_valid()) break;
      weigh(entries, [&](const Candidate& entry, double mass) {
        buckets.add(buckets.of(entry.logit), mass);
        return false;
      });
      const int bucket = buckets.find(border, before);
      if (bucket == Buckets::kCount) return std::nullopt;
      if (buckets.size(bucket) == static_cast<int64_t>(entries.size())) break;
      const auto is_elsewhere = [&](const Candidate& entry) { return buckets.of(entry.logit) != bucket; };
      entries.erase(std::remove_if(entries.begin(), entries.end(), is_elsewhere), entries.end());
    }
    if (!is_sorted) std::sort(entries.begin(), entries.end(), logit_rows::likelier);
    std::optional<Place> found;
    weigh(entries, [&](const Candidate& entry, double mass) {
      if (before + mass > border) {
        found = Place{entry.id, before, before + mass};
        return true;
      }
      before += mass;
      return false;
    });
    return found;
  }

  // Approximately the smallest logit whose likelihood counts.
  float lowest() const {
    const auto floor = static_cast<float>(most_ + temperature_ * std::log(least_));
    float lowest = most_;
    for (int64_t i = 0; i < count_; ++i) {
      const float logit = logits_[i] > floor ? logits_[i] : most_;
      lowest = logit < lowest ? logit : lowest;
    }
    return lowest;
  }

  const float* logits_;
  int64_t count_;
  float most_;
  double temperature_, least_;
  Buckets buckets_;
  double total_ = 0.0;
  bool is_certain_ = false;
  std::vector<uint16_t> places_;  // the bucket of each logit
};

}  // namespace ostinato::sampling
