// The op pack_blocks: writes rows of a quantised weight (layout.h) from the blocks of a GGUF file, one panel after the
// other. Integers and factors of 32 rows are unpacked into buffers that stay in a core's caches, and transposed from
// there.
#include "linear/tasks.h"
#include "linear/transpose.h"
#include "quantized/blocks.h"
#include "quantized/bytes.h"
#include "quantized/columns.h"
#include "quantized/layout.h"

#include <algorithm>
#include <string>
#include <vector>

namespace ostinato::linear {
namespace {

// 32 rows of bytes, which are moved in units of four.
struct UnitRows {
  explicit UnitRows(int64_t row_bytes)
      : units(ceil_divide(row_bytes, 4)),
        pitch(units * 4 + (units % 1024 == 1008 ? 128 : 64)),
        data(kPanel * pitch + 64) {}

  uint8_t* row(int64_t index) { return data.data() + index * pitch; }

  int64_t units;  // of a row
  int64_t pitch;  // bytes; not a multiple of 4096, at which loads of all rows would share a set of the first cache
  std::vector<uint8_t> data;
};

// Writes unit u of all rows at panel + offset(u), one row after the other.
template <class Offset>
void scatter_words(UnitRows& rows, uint8_t* panel, const Offset& offset) {
  constexpr int kBlock = F32::width;
  for (int64_t unit = 0; unit < rows.units; unit += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, rows.units - unit));
    int64_t places[kBlock];
    for (int i = 0; i < count; ++i) places[i] = offset(unit + i);
    for (int row = 0; row < kPanel; row += kBlock) {
      F32 block[kBlock];
      for (int i = 0; i < kBlock; ++i) block[i] = load(reinterpret_cast<const float*>(rows.row(row + i)) + unit);
      transpose(block);
      for (int i = 0; i < count; ++i) store(reinterpret_cast<float*>(panel + places[i]) + row, block[i]);
    }
  }
}

// Packs panels one after the other.
class BlockPacker {
 public:
  BlockPacker(const BlockType& type, const QuantizedShape& shape, int64_t row_blocks, uint8_t added)
      : type_(type),
        shape_(shape),
        row_blocks_(row_blocks),
        added_(added),
        bytes_(row_blocks * type.values),
        integers_(row_blocks * type.values * shape.format.bits / 8),
        scales_(shape.groups * shape.format.factor_bytes()),
        minimums_(type.has_minimums ? shape.groups * shape.format.factor_bytes() : 0) {}

  // Writes a panel from the blocks of its `columns` rows. The other columns become zero.
  void write(const uint8_t* blocks, int columns, uint8_t* panel) {
    for (int c = 0; c < columns; ++c) {
      const uint8_t* source = blocks + c * row_blocks_ * type_.bytes;
      read_integers(source, integers_.row(c));
      type_.read_factors(source, row_blocks_, scales_.row(c), minimums_.row(c));
    }
    for (int c = columns; c < kPanel; ++c) {
      for (UnitRows* rows : {&integers_, &scales_, &minimums_}) std::memset(rows->row(c), 0, rows->pitch);
    }
    const QuantFormat& format = shape_.format;
    const int64_t group_units = format.group_size * format.bits / 32, header = format.header_bytes();
    scatter_words(integers_, panel, [&](int64_t unit) {
      return shape_.group_offset(unit / group_units) + header + unit % group_units * 4 * kPanel;
    });
    write_factors(scales_, 0, panel);
    if (type_.has_minimums) write_factors(minimums_, kPanel * format.factor_bytes(), panel);
  }

 private:
  // The integers of a row, in the order of a panel's bytes.
  void read_integers(const uint8_t* source, uint8_t* out) {
    if (shape_.format.bits == 8) return type_.unpack(source, 0, row_blocks_, added_, out);
    type_.unpack(source, 0, row_blocks_, added_, bytes_.data());
    const auto count = static_cast<int64_t>(bytes_.size());
    for (int64_t k = 0; k < count; k += 32) {
      uint64_t words[4];
      uint32_t joined[4];
      std::memcpy(words, bytes_.data() + k, sizeof(words));
      for (int i = 0; i < 4; ++i) joined[i] = join_halves(words[i]);
      std::memcpy(out + k / 2, joined, sizeof(joined));
    }
  }

  // Writes the factors of all groups, `place` bytes behind the begin of each group.
  void write_factors(UnitRows& factors, int64_t place, uint8_t* panel) {
    if (shape_.format.factor_bytes() == 4) {
      return scatter_words(factors, panel, [&](int64_t group) { return shape_.group_offset(group) + place; });
    }
    for (int64_t group = 0; group < shape_.groups; ++group) {
      uint8_t* target = panel + shape_.group_offset(group) + place;
      for (int c = 0; c < kPanel; ++c) std::memcpy(target + c * 2, factors.row(c) + group * 2, 2);
    }
  }

  const BlockType& type_;
  const QuantizedShape& shape_;
  const int64_t row_blocks_;
  const uint8_t added_;
  std::vector<uint8_t> bytes_;  // the integers of a row
  UnitRows integers_, scales_, minimums_;
};

// pack_blocks(Tensor(a!) packed, Tensor blocks, str type, SymInt added, SymInt first_row, SymInt out_features,
//             SymInt bits, SymInt group_size, bool symmetric, str scales, str kind) -> ()
void pack_blocks(Call& call) {
  const Tensor packed = call.tensor();
  const Tensor blocks = call.tensor();
  const std::string name = call.text();
  const int64_t added = call.integer();
  const int64_t first_row = call.integer();
  const int64_t out_features = call.integer();
  const QuantFormat format = read_format(call);
  const BlockType& type = block_type(name, blocks, 3);
  const int64_t rows = blocks.sizes[0], row_blocks = blocks.sizes[1], end_row = first_row + rows;
  OSTINATO_CHECK(first_row >= 0 && end_row <= out_features, "rows ", first_row, " to ", end_row,
                 " are not rows of the matrix, 0 to ", out_features);
  OSTINATO_CHECK(format.group_size * type.groups == type.values && format.factors == type.factors &&
                     format.has_minimums == type.has_minimums && format.symmetric == !type.has_minimums &&
                     !format.is_e2m1 && !format.is_e4m3,
                 "blocks of the type ", name, " have groups of ", type.values / type.groups,
                 " values; use the format that models/gguf/stored_formats.py names for the type");
  const QuantizedShape shape(out_features, row_blocks * type.values, format);
  OSTINATO_CHECK(shape.fits(packed), "packed must be contiguous uint8 [", shape.panels, ", ", shape.panel_bytes, "]");
  const int64_t first_panel = first_row / kPanel, panels = ceil_divide(end_row, kPanel) - first_panel;
  const Division division = divide_conversion(call.threads(), NumParts{panels}, panels * shape.panel_bytes);
  division.run([&](int64_t begin, int64_t end) {
    BlockPacker packer(type, shape, row_blocks, static_cast<uint8_t>(added));
    std::vector<uint8_t> shared;  // a panel that has rows of other parts
    for (int64_t panel = first_panel + begin; panel < first_panel + end; ++panel) {
      const int64_t row = std::max(panel * kPanel, first_row);
      const int columns = static_cast<int>(std::min((panel + 1) * kPanel, end_row) - row);
      const uint8_t* source = blocks.as<uint8_t>() + (row - first_row) * row_blocks * type.bytes;
      uint8_t* target = packed.as<uint8_t>() + panel * shape.panel_bytes;
      if (columns == kPanel) {
        packer.write(source, columns, target);
        continue;
      }
      shared.resize(shape.panel_bytes);
      packer.write(source, columns, shared.data());
      copy_columns(shape, shared.data(), target, static_cast<int>(row % kPanel), columns);
      if (end_row == out_features && panel == shape.panels - 1) {
        zero_columns(shape, target, static_cast<int>(out_features - panel * kPanel));
      }
    }
  });
}

}  // namespace

OSTINATO_KERNEL(pack_blocks, pack_blocks);

}  // namespace ostinato::linear
