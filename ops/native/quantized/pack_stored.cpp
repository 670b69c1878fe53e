// The op pack_stored: writes rows of a quantised weight (layout.h) from the values of a checkpoint, in the words or
// bytes in which they are stored. One pass reads them, so memory never has a copy of the matrix with a byte for each
// value.
//
// All packings are converted to word rows. Word row q of a panel has a word for each of the panel's 32 columns. The
// word holds the column's values from number q * (values of a word) on, the first in the lowest bits. The packing
// `columns` is stored in this form. The words of other packings are transposed, a few rows at a time.
#include "linear/tasks.h"
#include "linear/transpose.h"
#include "quantized/columns.h"
#include "quantized/layout.h"

#include <algorithm>
#include <string>
#include <vector>

namespace ostinato::linear {
namespace {

enum class StoredPacking { bytes, rows, columns, awq };

// The arguments of pack_stored that describe what is stored.
struct StoredPart {
  Tensor values;  // words or bytes, in a shape that depends on the packing
  Tensor scales;  // [rows, stored groups]
  Tensor zeros;   // [rows, stored groups] int32, or none
  const int32_t* order;
  StoredPacking packing;
  uint32_t flipped;  // bits that are inverted in each word: an integer with a sign becomes one without
  int64_t first_row, rows, in_features;  // of the weight
  int64_t group_columns;                 // columns of a stored group
  int bits;  // of a stored value: 8 for the packing `bytes`, otherwise those of the format

  int64_t per_word() const { return 32 / bits; }
  int64_t word_rows() const { return ceil_divide(in_features, per_word()); }
  int64_t pitch() const { return values.strides[0] * element_size(values.dtype); }
  const uint8_t* data() const { return values.as<uint8_t>(); }
};

using Words = uint32_t[kPanel];  // a word row of a panel

// The rows of a part that lie in one panel.
struct PanelRows {
  int64_t row;  // of the part
  int count;
  int column;   // of the panel, where they begin
};

PanelRows rows_in_panel(const StoredPart& part, int64_t panel) {
  const int64_t begin = std::max(panel * kPanel, part.first_row);
  const int64_t end = std::min((panel + 1) * kPanel, part.first_row + part.rows);
  return {begin - part.first_row, static_cast<int>(end - begin), static_cast<int>(begin - panel * kPanel)};
}

// ---- word rows of a panel ----------------------------------------------------------------------------------

// The bits of a word row that hold values of the matrix.
uint32_t used_bits(const StoredPart& part, int64_t q) {
  const int64_t values = std::min(part.per_word(), part.in_features - q * part.per_word());
  return values == part.per_word() ? ~0u : (1u << (values * part.bits)) - 1;
}

// Word rows `first` to `first + count` of values whose rows are contiguous.
void transpose_rows(const StoredPart& part, const PanelRows& rows, int64_t first, int64_t count, Words* out) {
  const int64_t row_bytes = ceil_divide(part.in_features * part.bits, 8);
  const int64_t whole = std::min(count, row_bytes / 4 - first);
  const uint8_t* source = part.data() + rows.row * part.pitch() + first * 4;
  transpose_units(source, part.pitch(), rows.count, whole, out, kPanel);
  if (whole == count) return;
  for (int c = 0; c < rows.count; ++c) {
    uint32_t last = 0;
    std::memcpy(&last, source + c * part.pitch() + whole * 4, row_bytes - (first + whole) * 4);
    out[whole][c] = last;
  }
}

// Word row `q` of AWQ's words. A stored word has 8 outputs of one input; 8 inputs are transposed together.
void transpose_awq(const StoredPart& part, const PanelRows& rows, int64_t q, Words& out) {
  typedef uint32_t FourWords __attribute__((vector_size(16)));  // those of a panel in one stored row
  constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  FourWords block[8] = {};
  const int64_t inputs = std::min<int64_t>(8, part.in_features - q * 8);
  const int64_t pitch = part.pitch();
  const uint8_t* source = part.data() + q * 8 * pitch + rows.row / 2;
  if (inputs == 8 && rows.count == kPanel) {
    for (int k = 0; k < 8; ++k) std::memcpy(&block[k], source + k * pitch, sizeof(FourWords));
  } else {
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(&block[k], source + k * pitch, ceil_divide(rows.count, 8) * 4);
  }
  const auto exchange = [&](int low, int high, int shift, uint32_t mask) __attribute__((always_inline)) {
    const FourWords swap = (block[low] >> shift ^ block[high]) & mask;
    block[low] ^= swap << shift;
    block[high] ^= swap;
  };
  exchange(0, 4, 16, 0x0000FFFFu), exchange(1, 5, 16, 0x0000FFFFu);
  exchange(2, 6, 16, 0x0000FFFFu), exchange(3, 7, 16, 0x0000FFFFu);
  exchange(0, 2, 8, 0x00FF00FFu), exchange(1, 3, 8, 0x00FF00FFu);
  exchange(4, 6, 8, 0x00FF00FFu), exchange(5, 7, 8, 0x00FF00FFu);
  exchange(0, 1, 4, 0x0F0F0F0Fu), exchange(2, 3, 4, 0x0F0F0F0Fu);
  exchange(4, 5, 4, 0x0F0F0F0Fu), exchange(6, 7, 4, 0x0F0F0F0Fu);
  uint32_t places[8][4];
  std::memcpy(places, block, sizeof(places));
  for (int w = 0; w < 4; ++w) {
    for (int place = 0; place < 8; ++place) out[w * 8 + kOrder[place]] = places[place][w];
  }
}

// Reads word rows `first` to `first + count`. Columns past those of the part have any content.
void read_words(const StoredPart& part, const PanelRows& rows, int64_t first, int64_t count, Words* out) {
  if (part.packing == StoredPacking::awq) {
    for (int64_t i = 0; i < count; ++i) transpose_awq(part, rows, first + i, out[i]);
  } else if (part.packing == StoredPacking::columns) {
    const uint8_t* source = part.data() + first * part.pitch() + rows.row * 4;
    for (int64_t i = 0; i < count; ++i) {
      if (rows.count == kPanel) {
        std::memcpy(out[i], source + i * part.pitch(), sizeof(Words));
      } else {
        std::memcpy(out[i], source + i * part.pitch(), rows.count * 4);
      }
    }
  } else {
    transpose_rows(part, rows, first, count, out);
    if (part.flipped != 0) {
      for (int64_t i = 0; i < count; ++i) {
        for (int c = 0; c < kPanel; ++c) out[i][c] ^= part.flipped;
      }
    }
  }
  const int64_t last = part.word_rows() - 1;
  const uint32_t used = used_bits(part, last);
  if (first + count > last && used != ~0u) {
    for (int c = 0; c < kPanel; ++c) out[last - first][c] &= used;
  }
}

// ---- units: 8 values of each column of a panel -----------------------------------------------------------------

// 8 values of 4 bits in a word: value 0, 4, 1, 5, 2, 6, 3, 7 from the lowest bits up.
OSTINATO_INLINE uint32_t interleave_halves(uint32_t word) {
  uint32_t swap = (word ^ word >> 8) & 0x0000FF00u;
  word ^= swap ^ swap << 8;
  swap = (word ^ word >> 4) & 0x00F000F0u;
  return word ^ swap ^ swap << 4;
}

// Writes a unit from its word rows: one if values are stored in 4 bits, otherwise two.
OSTINATO_INLINE void write_unit(const QuantFormat& format, int stored_bits, const Words* __restrict words,
                                uint8_t* __restrict out) {
  auto* target = reinterpret_cast<uint32_t*>(out);
  if (stored_bits == 4) {
    for (int c = 0; c < kPanel; ++c) target[c] = interleave_halves(words[0][c]);
  } else if (format.bits == 4) {
    for (int c = 0; c < kPanel; ++c) target[c] = (words[0][c] & 0x0F0F0F0Fu) | (words[1][c] & 0x0F0F0F0Fu) << 4;
  } else {
    std::memcpy(target, words, 2 * sizeof(Words));
  }
}

// Takes the values `columns[0]` to `columns[count - 1]` of each row into the word rows of a unit.
void gather(const StoredPart& part, const Words* __restrict words, const int32_t* columns, int64_t count,
            Words* __restrict out) {
  const uint32_t mask = part.bits == 4 ? 15 : 255;
  const int64_t per_word = part.per_word();
  std::memset(out, 0, 8 / per_word * sizeof(Words));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t* source = words[columns[i] / per_word];
    uint32_t* target = out[i / per_word];
    const int down = static_cast<int>(columns[i] % per_word * part.bits), up = static_cast<int>(i % per_word * part.bits);
    for (int c = 0; c < kPanel; ++c) target[c] |= (source[c] >> down & mask) << up;
  }
}

// ---- panels ----------------------------------------------------------------------------------------------------

// Writes the 32 factors of one kind of a group. Those of columns past `rows.count` are zero.
template <class Read>
void write_factors(const QuantFormat& format, const PanelRows& rows, uint8_t* header, const Read& read) {
  std::memset(header, 0, kPanel * format.factor_bytes());
  for (int c = 0; c < rows.count; ++c) store_factor(format, read(rows.row + c), header, c);
}

template <class T>
void copy_factors(const T* source, int64_t stride, int count, uint8_t* header) {
  std::memset(header, 0, kPanel * sizeof(T));
  for (int c = 0; c < count; ++c) std::memcpy(header + c * sizeof(T), source + c * stride, sizeof(T));
}

void write_header(const StoredPart& part, const PanelRows& rows, const QuantFormat& format, int64_t group,
                  uint8_t* header) {
  const int64_t stored = group * format.group_size / part.group_columns;
  const Tensor& scales = part.scales;
  const int64_t stride = scales.strides[0], offset = stored * scales.strides[1];
  if (scales.dtype == format.factors) {  // nothing to round
    const int64_t begin = rows.row * stride + offset;
    if (format.factor_bytes() == 2) {
      copy_factors(scales.as<uint16_t>() + begin, stride, rows.count, header);
    } else {
      copy_factors(scales.as<uint32_t>() + begin, stride, rows.count, header);
    }
  } else {
    write_factors(format, rows, header, [&](int64_t row) {
      const int64_t place = row * stride + offset;
      if (scales.dtype == DType::bfloat16) return to_float(scales.as<BFloat16>()[place]);
      if (scales.dtype == DType::float16) return to_float(scales.as<Float16>()[place]);
      return scales.as<float>()[place];
    });
  }
  if (format.symmetric) return;
  const int32_t* zeros = part.zeros.as<int32_t>() + stored * part.zeros.strides[1];
  write_factors(format, rows, header + kPanel * format.factor_bytes(), [&](int64_t row) {
    return static_cast<float>(zeros[row * part.zeros.strides[0]] - format.offset());
  });
}

// Where unit `unit` of a panel begins, in bytes. Writes the factors of its group before the group's first unit.
int64_t begin_unit(const StoredPart& part, const PanelRows& rows, const QuantizedShape& shape, int64_t unit,
                   uint8_t* panel) {
  const int64_t group_units = shape.group_steps / 2, group = unit / group_units;
  const int64_t offset = shape.group_offset(group);
  if (unit % group_units == 0) write_header(part, rows, shape.format, group, panel + offset);
  return offset + shape.format.header_bytes() + unit % group_units * 2 * shape.format.step_bytes();
}

// Packs panels one unit after the other. The buffers stay in a core's caches.
class PanelWriter {
 public:
  PanelWriter(const StoredPart& part, const QuantizedShape& shape)
      : part_(part), shape_(shape), rows_per_unit_(8 / part.per_word()) {
    words_.resize((part.order != nullptr ? units() * rows_per_unit_ : kChunk) * kPanel);
  }

  // Writes `count` panels from `first` on. Columns that are not of the part become zero.
  void write(int64_t first, int64_t count, uint8_t* const* panels) {
    if (part_.order != nullptr) {
      for (int64_t i = 0; i < count; ++i) write_ordered(rows_in_panel(part_, first + i), panels[i]);
    } else if (part_.packing == StoredPacking::columns || part_.packing == StoredPacking::awq) {
      // A stored row has words of all panels. So all panels take their words of a few rows, before the next are read.
      write_chunks(first, count, part_.packing == StoredPacking::awq ? 2 : kChunk, panels);
    } else {
      for (int64_t i = 0; i < count; ++i) write_chunks(first + i, 1, kChunk, panels + i);
    }
    for (int64_t i = 0; i < count; ++i) {
      const PanelRows rows = rows_in_panel(part_, first + i);
      if (rows.count == kPanel) continue;
      zero_columns(shape_, panels[i], rows.count);
    }
  }

 private:
  static constexpr int64_t kChunk = 16;  // word rows that are transposed together

  int64_t units() const { return shape_.steps / 2; }
  Words* words() { return reinterpret_cast<Words*>(words_.data()); }

  // Reads word rows of a panel. Those past the stored ones are zero.
  void read(const PanelRows& rows, int64_t first, int64_t count) {
    const int64_t stored = std::clamp<int64_t>(part_.word_rows() - first, 0, count);
    if (stored > 0) read_words(part_, rows, first, stored, words());
    if (stored < count) std::memset(words() + stored, 0, (count - stored) * sizeof(Words));
  }

  // Packs panels in the stored order of columns, `size` word rows of each panel at a time.
  void write_chunks(int64_t first, int64_t count, int64_t size, uint8_t* const* panels) {
    const int64_t total = units() * rows_per_unit_;
    for (int64_t q = 0; q < total; q += size) {
      const int64_t word_rows = std::min(size, total - q);
      for (int64_t i = 0; i < count; ++i) {
        const PanelRows rows = rows_in_panel(part_, first + i);
        read(rows, q, word_rows);
        for (int64_t row = 0; row < word_rows; row += rows_per_unit_) {
          const int64_t place = begin_unit(part_, rows, shape_, (q + row) / rows_per_unit_, panels[i]);
          write_unit(shape_.format, part_.bits, words() + row, panels[i] + place);
        }
      }
    }
  }

  // Packs a panel whose k-th column is the stored column order[k].
  void write_ordered(const PanelRows& rows, uint8_t* panel) {
    read(rows, 0, units() * rows_per_unit_);
    for (int64_t unit = 0; unit < units(); ++unit) {
      Words gathered[2];
      gather(part_, words(), part_.order + unit * 8, std::min<int64_t>(8, part_.in_features - unit * 8), gathered);
      write_unit(shape_.format, part_.bits, gathered, panel + begin_unit(part_, rows, shape_, unit, panel));
    }
  }

  const StoredPart& part_;
  const QuantizedShape& shape_;
  const int64_t rows_per_unit_;  // word rows of a unit
  std::vector<uint32_t> words_;
};

StoredPacking stored_packing(const std::string& name) {
  if (name == "bytes") return StoredPacking::bytes;
  if (name == "rows") return StoredPacking::rows;
  if (name == "columns") return StoredPacking::columns;
  OSTINATO_CHECK(name == "awq", "stored values are packed as bytes, rows, columns or awq, got ", name);
  return StoredPacking::awq;
}

void check_part(const StoredPart& part, const Tensor& order, const QuantizedShape& shape) {
  const bool is_rows = part.packing == StoredPacking::bytes || part.packing == StoredPacking::rows;
  const bool is_awq = part.packing == StoredPacking::awq;
  const int64_t lines = is_rows ? part.rows : is_awq ? part.in_features : part.word_rows();
  const int64_t length = is_rows  ? ceil_divide(part.in_features * part.bits, 8)
                         : is_awq ? ceil_divide(part.rows, 8)
                                  : part.rows;
  const Tensor& values = part.values;
  OSTINATO_CHECK(values.dtype == (is_rows ? DType::uint8 : DType::int32) && values.dim == 2 && values.sizes[0] >= lines &&
                     values.sizes[1] >= length && is_contiguous(values, 1),
                 "stored values must be a matrix with contiguous rows: uint8 if packed as bytes or rows, otherwise int32");
  OSTINATO_CHECK(!is_awq || (shape.format.bits == 4 && !order.exists() && part.first_row % 8 == 0),
                 "values in AWQ's order have 4 bits, no order of columns, and begin at a multiple of 8 rows");
  const int64_t groups = ceil_divide(part.in_features, part.group_columns);
  OSTINATO_CHECK(groups == 1 || part.group_columns % shape.format.group_size == 0,
                 "stored groups must consist of whole groups of the format");
  for (const Tensor* factors : {&part.scales, &part.zeros}) {
    OSTINATO_CHECK(!factors->exists() ||
                       (factors->dim == 2 && factors->sizes[0] == part.rows && factors->sizes[1] >= groups),
                   "scales and zero points must be matrices [rows, groups]");
  }
  OSTINATO_CHECK(part.scales.dtype == DType::float16 || part.scales.dtype == DType::bfloat16 ||
                     part.scales.dtype == DType::float32,
                 "scales must be float16, bfloat16 or float32");
  OSTINATO_CHECK(part.zeros.exists() == !shape.format.symmetric &&
                     (!part.zeros.exists() || part.zeros.dtype == DType::int32),
                 "zero points are int32, and given unless the format is symmetric");
  OSTINATO_CHECK(!order.exists() || (order.dtype == DType::int32 && order.dim == 1 &&
                                     order.sizes[0] == part.in_features && order.strides[0] == 1),
                 "order must be a contiguous int32 vector with an element for each column");
  for (int64_t k = 0; order.exists() && k < part.in_features; ++k) {
    OSTINATO_CHECK(part.order[k] >= 0 && part.order[k] < part.in_features,
                   "order must consist of columns, 0 to ", part.in_features - 1);
  }
}

// pack_stored(Tensor(a!) packed, Tensor values, Tensor scales, Tensor? zeros, Tensor? order, SymInt first_row,
//             SymInt in_features, SymInt group_columns, bool is_signed, str packing, SymInt bits, SymInt group_size,
//             bool symmetric, str scales, str kind) -> ()
void pack_stored(Call& call) {
  StoredPart part{};
  const Tensor packed = call.tensor();
  part.values = call.tensor();
  part.scales = call.tensor();
  part.zeros = call.optional_tensor();
  const Tensor order = call.optional_tensor();
  part.first_row = call.integer();
  part.in_features = call.integer();
  part.group_columns = call.integer();
  const bool is_signed = call.boolean();
  const std::string packing = call.text();
  const QuantFormat format = read_format(call);
  OSTINATO_CHECK(!format.has_minimums, "stored values with minimums are not packed by pack_stored");
  OSTINATO_CHECK(part.scales.dim == 2, "scales and zero points must be matrices [rows, groups]");
  part.packing = stored_packing(packing);
  part.rows = part.scales.sizes[0];
  part.order = order.exists() ? order.as<int32_t>() : nullptr;
  part.bits = part.packing == StoredPacking::bytes ? 8 : format.bits;
  part.flipped = !is_signed ? 0 : format.bits == 8 ? 0x80808080u : 0x08080808u;
  OSTINATO_CHECK(!is_signed || part.packing == StoredPacking::bytes, "only values of the packing bytes have a sign");
  OSTINATO_CHECK(!is_signed || !format.is_e4m3, "floats of 8 bits have their own sign; is_signed must be false");
  OSTINATO_CHECK(part.in_features > 0 && part.rows > 0 && part.first_row >= 0 && part.group_columns > 0,
                 "a part must have rows, columns and columns of a group, and first_row must be at least 0");
  const QuantizedShape shape(part.first_row + part.rows, part.in_features, format);
  check_part(part, order, shape);
  OSTINATO_CHECK(packed.dtype == DType::uint8 && packed.dim == 2 && packed.sizes[0] >= shape.panels &&
                     packed.sizes[1] == shape.panel_bytes && packed.strides[1] == 1 &&
                     packed.strides[0] == shape.panel_bytes,
                 "packed must be contiguous uint8 with the panels of the weight");
  if (part.first_row == 0) prefer_huge_pages(packed.data, packed.sizes[0] * shape.panel_bytes);
  constexpr int64_t kBlock = 32;  // panels that are written together
  const int64_t first_panel = part.first_row / kPanel, panels = shape.panels - first_panel;
  const Division division = divide_conversion(call.threads(), NumParts{panels}, panels * shape.panel_bytes);
  division.run([&](int64_t begin, int64_t end) {
    PanelWriter writer(part, shape);
    std::vector<uint8_t> shared;
    const int64_t last = first_panel + end;
    for (int64_t panel = first_panel + begin; panel < last;) {
      const int column = rows_in_panel(part, panel).column;
      const int64_t count = column == 0 ? std::min(kBlock, last - panel) : 1;
      uint8_t* targets[kBlock];
      for (int64_t i = 0; i < count; ++i) targets[i] = packed.as<uint8_t>() + (panel + i) * shape.panel_bytes;
      if (column == 0) {
        writer.write(panel, count, targets);
      } else {  // an earlier part has written the columns before `column`
        shared.resize(shape.panel_bytes);
        uint8_t* const own = shared.data();
        writer.write(panel, 1, &own);
        const int columns = rows_in_panel(part, panel).count;
        copy_columns(shape, own, targets[0], column, columns);
      }
      panel += count;
    }
  });
}

}  // namespace

OSTINATO_KERNEL(pack_stored, pack_stored);

}  // namespace ostinato::linear
