// A worker of the packed linear op without matrix tiles: packs its rows of activations and multiplies them by panels.
#pragma once

#include "linear/tasks.h"
#include "linear/tiles.h"
#include "linear/transpose.h"

#include <type_traits>

namespace ostinato::linear {

// Steps of K in a pass. A pass is summed from zero, and then added to the sums of the earlier passes. With AVX2, the
// 16 KiB of a panel's weights in a pass stay in the first level cache (32 KiB or more) while all blocks of rows are
// multiplied by them. A tile of AVX-512 uses a weight for 14 rows, and is not slower if it comes from the second level.
constexpr int64_t kStepsPerPass = OSTINATO_ISA == 1 ? 128 : 512;

// Widens pairs of bfloat16, [steps][rows], to floats, [steps][2][rows], at `packed`. The pairs lie in the second half
// of that memory, so that a pair is read before its place is written.
inline void widen_pairs(const float* pairs, int rows, int64_t steps, float* packed) {
  static_assert(kMaxRows <= F32::width);
  for (int64_t step = 0; step < steps; ++step) {
    const float* from = pairs + step * rows;
    float* even = packed + step * 2 * rows;
    if ((steps - step) * rows >= F32::width) {
      // The next floats overwrite the lanes past the last row.
      const F32 units = load(from);
      store(even, low_of_pairs(units));
      store(even + rows, high_of_pairs(units));
    } else {
      for (int r = 0; r < rows; ++r) {
        const auto pair = bit_cast<uint32_t>(from[r]);
        even[r] = bit_cast<float>(pair << 16);
        even[rows + r] = bit_cast<float>(pair & 0xffff0000u);
      }
    }
  }
}

// Copies `rows` rows into the order in which a tile reads them. If K is odd, its missing last value is zero.
template <class Kind>
void pack_activations(const typename Kind::Element* x, int64_t row_stride, int rows, int64_t in_features,
                      float* packed) {
  using Element = typename Kind::Element;
  const int64_t steps = ceil_divide(in_features, Kind::kElements);
  const int64_t whole = in_features / Kind::kElements;
  // Units that are widened to two floats lie in the second half of the memory first.
  float* units = packed + (Kind::kFloats - 1) * steps * rows;
  transpose_units(x, row_stride * static_cast<int64_t>(sizeof(Element)), rows, whole, units, rows);
  if (whole < steps) {
    for (int r = 0; r < rows; ++r) {
      units[whole * rows + r] = 0.0f;
      std::memcpy(units + whole * rows + r, x + r * row_stride + in_features - 1, sizeof(Element));
    }
  }
  if constexpr (Kind::kFloats == 2) widen_pairs(units, rows, steps, packed);
}

// Gives the tiles the steps of a packed panel.
class PackedSteps {
 public:
  using Weight = PackedWeight;
  static constexpr int64_t kMost = kStepsPerPass;  // steps at a time
  static constexpr int kFewRows = 0;               // no rows that it multiplies by itself

  PackedSteps(const PackedWeight& weight, int64_t panel) : units_(weight.panel(panel)) {}

  const uint32_t* at(int64_t step, int64_t) const { return units_ + step * kPanel; }

  // What is prefetched while a block of rows is multiplied by the steps. Several blocks fetch the next steps together.
  // Otherwise the first block would wait for memory.
  Fetch fetch(int64_t step, int64_t steps, int64_t block, int64_t blocks, int rows) const {
    if (blocks == 1) return Fetch::ahead(at(step, steps), rows);
    return Fetch::share(at(step + steps, steps), steps * kPanel * 4, steps, block, blocks, rows);
  }

 private:
  const uint32_t* units_;
};

template <class Kind, class Out, class Steps = PackedSteps>
class RowWorker {
 public:
  using Weight = typename Steps::Weight;

  RowWorker(const Problem& problem, const Weight& weight, const RowGroups& groups)
      : p_(problem), weight_(weight), groups_(groups) {}

  void pack(int64_t group) {
    if (p_.rows == 1 && Kind::kFloats == 1 && p_.in_features % Kind::kElements == 0 &&
        reinterpret_cast<uintptr_t>(p_.x) % alignof(float) == 0) {
      activations_ = static_cast<const float*>(p_.x);  // already in the packed order
      return;
    }
    const int64_t first_row = groups_.first_row(group);
    float* packed = scratch(packed_floats(groups_.first_row(group + 1) - first_row));
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      pack_activations<Kind>(rows_from(row), p_.row_stride, groups_.blocks.height(block), p_.in_features,
                             packed + packed_floats(row - first_row));
    }
    activations_ = packed;
  }

  void multiply(int64_t group, int64_t panel) const {
    alignas(64) float sums[kMaxGroupRows * kPanel];
    const int64_t column = panel * kPanel, row = groups_.first_row(group);
    const int rows = static_cast<int>(groups_.first_row(group + 1) - row);
    sum_panel(group, panel, sums);
    if (p_.gated == nullptr) {
      alignas(64) float bias[kPanel];
      load_bias<Element>(p_, column, bias);
      write_rows<Out>(p_, sums, rows, bias, row, column);
    } else if constexpr (std::is_same_v<Element, Out>) {
      alignas(64) float factors[kMaxGroupRows * kPanel];
      sum_panel(group, weight_.panels + panel, factors);
      GatedPanel<Out>(p_, column).write(sums, factors, rows, row);
    }
  }

 private:
  using Element = typename Kind::Element;

  const Element* rows_from(int64_t row) const { return static_cast<const Element*>(p_.x) + row * p_.row_stride; }
  int64_t packed_floats(int64_t rows) const { return rows * weight_.steps * Kind::kFloats; }

  // sums [rows of the group][kPanel] = activations times a panel.
  void sum_panel(int64_t group, int64_t panel, float* sums) const {
    constexpr bool in_parts = Steps::kMost < kStepsPerPass;
    alignas(64) float later_sums[in_parts ? kMaxGroupRows * kPanel : 1];
    const int64_t rows = groups_.first_row(group + 1) - groups_.first_row(group);
    Steps weight(weight_, panel);
    for (int64_t pass = 0; pass < weight_.steps; pass += kStepsPerPass) {
      const int64_t end = std::min(pass + kStepsPerPass, weight_.steps);
      if constexpr (Steps::kFewRows > 0) {
        if (p_.rows <= Steps::kFewRows) {
          weight.multiply(activations_ + pass * rows * Kind::kFloats, pass, end, static_cast<int>(rows), sums);
          continue;
        }
      }
      float* pass_sums = in_parts && pass > 0 ? later_sums : sums;
      for (int64_t step = pass; step < end; step += Steps::kMost) {
        const Sum mode = step > pass ? Sum::go_on : pass_sums == sums && pass > 0 ? Sum::add : Sum::begin;
        multiply_steps(group, weight, step, std::min(Steps::kMost, end - step), mode, pass_sums);
      }
      if (pass_sums == sums) continue;
      for (int64_t i = 0; i < rows * kPanel; i += F32::width) store(sums + i, load(sums + i) + load(pass_sums + i));
    }
  }

  // Multiplies all blocks of a group by some steps of a panel.
  void multiply_steps(int64_t group, Steps& weight, int64_t step, int64_t steps, Sum mode, float* sums) const {
    const uint32_t* units = weight.at(step, steps);
    const int64_t first_block = groups_.first_block(group), first_row = groups_.first_row(group);
    const int64_t blocks = groups_.first_block(group + 1) - first_block;
    int64_t row = first_row;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t next_row = groups_.blocks.begin(first_block + block + 1);
      const int rows = static_cast<int>(next_row - row);
      const float* values = activations_ + packed_floats(row - first_row) + step * rows * Kind::kFloats;
      kTiles<Kind>[rows - 1](values, units, steps, sums + (row - first_row) * kPanel, mode,
                             weight.fetch(step, steps, block, blocks, rows));
      row = next_row;
    }
  }

  const Problem& p_;
  const Weight& weight_;
  const RowGroups& groups_;
  const float* activations_ = nullptr;
};

}  // namespace ostinato::linear
