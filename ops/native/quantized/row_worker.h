// A worker of the quantised linear op without matrix tiles: quantises its rows of activations and multiplies them by
// panels.
#pragma once

#include "linear/tasks.h"
#include "linear/transpose.h"
#include "quantized/activations.h"
#include "quantized/tiles.h"

namespace ostinato::linear {

// The bytes of a panel that stay in the first level cache while all rows are multiplied by them.
constexpr int64_t kPassBytes = 16 << 10;

// Four values of K as the tile multiplies them.
template <int Units>
OSTINATO_INLINE void widen_step(const int8_t* values, uint32_t* units) {
  if constexpr (Units == 1) {
    std::memcpy(units, values, 4);
  } else if constexpr (Units == 2) {
    const int16_t pairs[] = {values[0], values[2], values[1], values[3]};
    std::memcpy(units, pairs, 8);
  } else {
    for (int j = 0; j < 4; ++j) units[j] = bit_cast<uint32_t>(static_cast<float>(values[j]));
  }
}

// The offsets of the activations of a group of row blocks in a worker's memory, in four-byte units.
struct RowLayout {
  explicit RowLayout(const QuantizedShape& shape)
      : units(shape.steps * quant_units(shape.format.widening())), groups(shape.groups), row(units + 3 * groups) {}
  int64_t units;
  int64_t groups;
  int64_t row;  // four-byte units of a packed row: its values, scales, sums and starts

  QuantizedRows block(const uint32_t* first_row, int64_t offset_rows, int64_t rows) const {
    const uint32_t* begin = first_row + offset_rows * row;
    const auto* scales = reinterpret_cast<const float*>(begin + units * rows);
    return {begin, scales, scales + groups * rows, reinterpret_cast<const Start*>(scales + 2 * groups * rows)};
  }
};

template <Widening Bits, class In, class Out>
class QuantizedRowWorker {
 public:
  QuantizedRowWorker(const Problem& problem, const QuantizedWeight& weight, const RowGroups& groups)
      : p_(problem), weight_(weight), groups_(groups), layout_(weight) {}

  void pack(int64_t group) {
    const int64_t first_row = groups_.first_row(group);
    const int64_t rows = groups_.first_row(group + 1) - first_row;
    const int64_t bytes_per_row = round_up(weight_.steps * 4 + 64, 64);  // whole vectors are written
    const int64_t packed = rows * layout_.row + bytes_per_row / 4 + kQuantRows * layout_.units;
    float* memory = scratch(line_bytes<In>(p_) / 4 + packed);
    auto* line = reinterpret_cast<In*>(memory);
    memory += line_bytes<In>(p_) / 4;
    activations_ = reinterpret_cast<uint32_t*>(memory);
    auto* bytes = reinterpret_cast<int8_t*>(memory + rows * layout_.row);
    auto* wide = reinterpret_cast<uint32_t*>(bytes + bytes_per_row);
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      pack_block(row, groups_.blocks.height(block), activations_ + (row - first_row) * layout_.row, bytes, wide,
                 line);
    }
  }

  void multiply(int64_t group, int64_t panel) const {
    alignas(64) float sums[kMaxGroupRows * kPanel];
    alignas(64) float bias[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<In>(p_, column, bias);
    const int64_t first_row = groups_.first_row(group);
    const int64_t first_block = groups_.first_block(group);
    const int64_t blocks = groups_.first_block(group + 1) - first_block;
    const int64_t group_bytes = weight_.group_offset(1);
    const int64_t pass_groups = groups_.blocks.count == 1 ? weight_.groups : std::max<int64_t>(kPassBytes / group_bytes, 1);
    for (int64_t first = 0; first < weight_.groups; first += pass_groups) {
      const int64_t step = first * weight_.group_steps;
      const int64_t steps = std::min(pass_groups * weight_.group_steps, weight_.steps - step);
      const uint8_t* data = weight_.panel(panel) + weight_.group_offset(first);
      const int64_t count = std::min(pass_groups, weight_.groups - first);
      const int64_t bytes = count * group_bytes;
      int64_t row = first_row;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t next_row = groups_.blocks.begin(first_block + block + 1);
        const int rows = static_cast<int>(next_row - row);
        float* block_sums = sums + (row - first_row) * kPanel;
        QuantizedRows x = layout_.block(activations_, row - first_row, rows);
        x.units += step * kUnits * rows;
        x.scales += first * rows;
        x.sums += first * rows;
        x.starts += first * rows;
        GroupFetch fetch{};
        // With AVX2, prefetching makes a row of 4-bit weights faster, and one of 8 bits not.
        const bool is_ahead = OSTINATO_ISA >= 2 ? rows > 1 : OSTINATO_ISA == 1 && Bits != kBytes && rows <= 2;
        if (groups_.blocks.count == 1 && is_ahead) fetch = GroupFetch::ahead(data, group_bytes);
        if (blocks > 1) fetch = GroupFetch::share(data + bytes, bytes, count, block, blocks, rows);
        if (first == 0) std::memset(block_sums, 0, rows * kPanel * sizeof(float));
        kQuantizedTiles<Bits>[rows - 1](x, data, steps, weight_, block_sums, fetch);
        if (step + steps == weight_.steps) write_rows<Out>(p_, block_sums, rows, bias, row, column);
        row = next_row;
      }
    }
  }

 private:
  static constexpr int kUnits = quant_units(Bits);

  void pack_block(int64_t first_row, int rows, uint32_t* packed, int8_t* bytes, uint32_t* wide, In* line) {
    auto* scales = reinterpret_cast<float*>(packed + layout_.units * rows);
    float* sums = scales + layout_.groups * rows;
    auto* starts = reinterpret_cast<Start*>(sums + layout_.groups * rows);
    const auto offset = weight_.format.symmetric ? static_cast<Start>(weight_.format.offset()) : Start{0};
    for (int r = 0; r < rows; ++r) {
      const In* x = row_in_order(p_, first_row + r, line);
      const int64_t size = weight_.format.group_size;
      for (int64_t group = 0; group < layout_.groups; ++group) {
        const int64_t begin = group * size;
        const int64_t count = std::min(size, p_.in_features - begin);
        const int64_t padded = std::min(size, weight_.steps * 4 - begin);
        const float sum = -quantize_group(x + begin, count, padded, bytes + begin, scales + group * rows + r);
        sums[group * rows + r] = sum;
        starts[group * rows + r] = offset * static_cast<Start>(sum);
      }
      uint32_t* target = rows == 1 ? packed : wide + r * layout_.units;
      if constexpr (kUnits == 1) {
        std::memcpy(target, bytes, weight_.steps * 4);
      } else {
        for (int64_t step = 0; step < weight_.steps; ++step) {
          widen_step<kUnits>(bytes + step * 4, target + step * kUnits);
        }
      }
    }
    if (rows > 1) transpose_units(wide, layout_.units * 4, rows, layout_.units, packed, rows);
  }

  const Problem& p_;
  const QuantizedWeight& weight_;
  const RowGroups& groups_;
  const RowLayout layout_;
  uint32_t* activations_ = nullptr;
};

}  // namespace ostinato::linear
