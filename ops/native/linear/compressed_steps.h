// Widens the steps of a compressed panel for the tiles of tiles.h. Few rows are multiplied by weights that are widened
// in registers.
//
// The sums have the order of those over packed weights (row_worker.h), so they have the same bits.
#pragma once

#include "linear/compressed.h"
#include "linear/row_worker.h"

#include <array>
#include <utility>

namespace ostinato::linear {

#if OSTINATO_ISA >= 1
// sums[R][32] += or = x * the steps [first, last) of a panel, which are one pass. `first` begins a chunk. `x` is packed as
// for the tiles of row_worker.h.
template <int R>
void multiply_compressed(const float* x, PanelReader& panel, int64_t first, int64_t last, float* sums) {
  using Kind = BFloat16Pairs;
  // With 16 registers, more than two rows sum one part of the columns after the other. The second part finds the weights
  // of the pass in the first level cache.
  constexpr int kTogether = kStepParts > 1 && R > 2 ? 1 : kStepParts;
  const PanelReader begin = panel;
  for (int part = 0; part < kStepParts; part += kTogether) {
    panel = begin;
    const float* values = x;
    F32 sum[kTogether][R][2];
#pragma GCC unroll 2
    for (int p = 0; p < kTogether; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[p][r][0] = sum[p][r][1] = broadcast(0.0f);
    }
    for (int64_t step = first; step < last; step += kChunkSteps) {
      const int64_t chunk = step / kChunkSteps;
      if (panel.is_whole() || panel.has_exceptions(chunk) || last - step < kChunkSteps) {
        alignas(64) uint32_t buffer[kChunkUnits];
        if (!panel.is_whole()) panel.widen_chunk(chunk, buffer);
        const auto* units = reinterpret_cast<const float*>(panel.is_whole() ? panel.whole() + step * kPanel : buffer);
        const int64_t steps = std::min<int64_t>(kChunkSteps, last - step);
        for (int64_t i = 0; i < steps; ++i, units += kPanel, values += R * Kind::kFloats) {
#pragma GCC unroll 2
          for (int p = 0; p < kTogether; ++p) {
            const float* columns = units + (part + p) * F32::width;
            Kind::step(sum[p], values, [&](int v) OSTINATO_INLINED { return load(columns + 16 * v); });
          }
        }
      } else {
        const uint8_t* pair = panel.chunk(chunk);
        for (int i = 0; i < kChunkSteps; i += 2, pair += kStepPairBytes, values += 2 * R * Kind::kFloats) {
#if OSTINATO_ISA == 1
          fetch_pair(pair);
#endif
#pragma GCC unroll 2
          for (int p = 0; p < kTogether; ++p) {
            F32 units[2][2];
            panel.widener().widen(pair, part + p, units);
            Kind::step(sum[p], values, [&](int v) OSTINATO_INLINED { return units[0][v]; });
            Kind::step(sum[p], values + R * Kind::kFloats, [&](int v) OSTINATO_INLINED { return units[1][v]; });
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kTogether; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          float* target = sums + r * kPanel + 16 * v + (part + p) * F32::width;
          store(target, first > 0 ? load(target) + sum[p][r][v] : sum[p][r][v]);
        }
      }
    }
  }
}

using MultiplyCompressed = void (*)(const float* x, PanelReader& panel, int64_t first, int64_t last, float* sums);

template <int... R>
constexpr std::array<MultiplyCompressed, sizeof...(R)> make_multiply_compressed(std::integer_sequence<int, R...>) {
  return {&multiply_compressed<R + 1>...};
}
#endif

class CompressedSteps {
 public:
  using Weight = CompressedWeight;
  // Steps at a time: 16 KiB when widened with AVX2, a whole pass, and 8 KiB otherwise.
  static constexpr int64_t kMost = (OSTINATO_ISA == 1 ? 8 : 4) * kChunkSteps;
  // Up to which widening weights anew for each step of K is faster than storing them.
  static constexpr int kFewRows = OSTINATO_ISA >= 2 ? 8 : OSTINATO_ISA == 1 ? 4 : 0;

  CompressedSteps(const CompressedWeight& weight, int64_t panel) : panel_(weight, panel) {}

  // The units of steps [step, step + steps), which begin a chunk.
  const uint32_t* at(int64_t step, int64_t steps) {
    if (panel_.is_whole()) return panel_.whole() + step * kPanel;
    for (int64_t done = 0; done < steps; done += kChunkSteps) {
      panel_.widen_chunk((step + done) / kChunkSteps, widened_ + done * kPanel);
    }
    return widened_;
  }

  Fetch fetch(int64_t step, int64_t steps, int64_t block, int64_t blocks, int rows) const {
    if (blocks == 1) return Fetch::none(widened_);
    const int64_t next = ceil_divide(step + steps, kChunkSteps);
    return Fetch::share(panel_.chunk(next), kMost / kChunkSteps * kChunkBytes, steps, block, blocks, rows);
  }

#if OSTINATO_ISA >= 1
  // Adds the products of a pass to `sums`, or begins with them: steps [first, last).
  void multiply(const float* x, int64_t first, int64_t last, int rows, float* sums) {
    static constexpr auto kMultiply = make_multiply_compressed(std::make_integer_sequence<int, kFewRows>{});
    kMultiply[rows - 1](x, panel_, first, last, sums);
  }
#endif

 private:
  PanelReader panel_;
  alignas(64) uint32_t widened_[kMost * kPanel];
};

}  // namespace ostinato::linear
