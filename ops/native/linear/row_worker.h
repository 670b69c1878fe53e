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
      store(even, even_elements(units));
      store(even + rows, odd_elements(units));
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

template <class Kind, class Out>
class RowWorker {
 public:
  RowWorker(const Problem& problem, const PackedWeight& weight, const RowGroups& groups)
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
    sum_panel(group, weight_.panel(panel), sums);
    if (p_.unit == nullptr) {
      alignas(64) float bias[kPanel];
      load_bias<Element>(p_, column, bias);
      write_rows<Out>(p_, sums, rows, bias, row, column);
    } else if constexpr (std::is_same_v<Element, Out>) {
      alignas(64) float factors[kMaxGroupRows * kPanel];
      sum_panel(group, p_.unit->factors.panel(panel), factors);
      GatedPanel<Out>(p_, column).write(sums, factors, rows, row);
    }
  }

 private:
  using Element = typename Kind::Element;

  const Element* rows_from(int64_t row) const { return static_cast<const Element*>(p_.x) + row * p_.row_stride; }
  int64_t packed_floats(int64_t rows) const { return rows * weight_.steps * Kind::kFloats; }

  // sums [rows of the group][kPanel] = activations times a panel.
  void sum_panel(int64_t group, const uint32_t* weight, float* sums) const {
    const int64_t first_row = groups_.first_row(group);
    const int64_t first_block = groups_.first_block(group);
    const int64_t blocks = groups_.first_block(group + 1) - first_block;
    for (int64_t step = 0; step < weight_.steps; step += kStepsPerPass) {
      const int64_t steps = std::min(kStepsPerPass, weight_.steps - step);
      const uint32_t* units = weight + step * kPanel;
      int64_t row = first_row;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t next_row = groups_.blocks.begin(first_block + block + 1);
        const int rows = static_cast<int>(next_row - row);
        float* block_sums = sums + (row - first_row) * kPanel;
        const float* values = activations_ + packed_floats(row - first_row) + step * rows * Kind::kFloats;
        // Several blocks fetch the next part of the weights together. Otherwise the first block would wait for memory.
        const Fetch fetch = blocks > 1 ? Fetch::share(units, steps, block, blocks, rows) : Fetch::ahead(units, rows);
        kTiles<Kind>[rows - 1](values, units, steps, block_sums, step > 0, fetch);
        row = next_row;
      }
    }
  }

  const Problem& p_;
  const PackedWeight& weight_;
  const RowGroups& groups_;
  const float* activations_ = nullptr;
};

}  // namespace ostinato::linear
