// Two ops on quantised weights in the layout of layout.h. pack_quantized writes that layout from the integers and
// factors of a quantised checkpoint. quantized_rows reads rows back, so an embedding that shares the output layer's
// weight needs no second copy.
#include "linear/give_rows.h"
#include "quantized/bytes.h"
#include "quantized/give_packed.h"
#include "quantized/layout.h"

#include <algorithm>

namespace ostinato::linear {
namespace {

// The tensors that pack_quantized packs.
struct Stored {
  Tensor values;  // [N, K]
  Tensor scales;  // [N, groups] float32
  Tensor zeros;   // the same, or none

  float factor(const Tensor& factors, int64_t row, int64_t group) const {
    return factors.as<float>()[row * factors.strides[0] + group * factors.strides[1]];
  }
};

// Stores the first values of a group whose rows are contiguous, 8 of each row at a time. Returns how many of the
// `count` values it stored.
int64_t pack_eights(const QuantFormat& format, const uint8_t* values, int64_t row_stride, int64_t count, int columns,
                    uint8_t* data) {
  const int64_t whole = count / 8 * 8;
  for (int64_t k = 0; k < whole; k += 8) {
    uint8_t* out = data + k * kPanel * format.bits / 8;
    for (int c = 0; c < columns; ++c) {
      uint64_t eight;
      std::memcpy(&eight, values + c * row_stride + k, 8);
      if (format.bits == 4) {
        const uint32_t joined = join_halves(eight);
        std::memcpy(out + c * 4, &joined, 4);
      } else {
        std::memcpy(out + c * 4, &eight, 4);
        const uint32_t second = static_cast<uint32_t>(eight >> 32);
        std::memcpy(out + (kPanel + c) * 4, &second, 4);
      }
    }
  }
  return whole;
}

// Writes one panel: `columns` rows of the matrix from `row` on, then zeros.
void pack_panel(const Stored& stored, int64_t row, int columns, const QuantizedShape& shape, uint8_t* panel) {
  const QuantFormat& format = shape.format;
  const int64_t in_features = stored.values.sizes[1];
  const int64_t row_stride = stored.values.strides[0];
  const int64_t stride = stored.values.strides[1];
  const uint8_t* values = stored.values.as<uint8_t>() + row * row_stride;
  std::memset(panel, 0, shape.panel_bytes);
  for (int64_t group = 0; group < shape.groups; ++group) {
    uint8_t* data = panel + shape.group_offset(group);
    for (int c = 0; c < columns; ++c) {
      store_factor(format, stored.factor(stored.scales, row + c, group), data, c);
      if (format.symmetric) continue;
      const float zero = stored.factor(stored.zeros, row + c, group) - static_cast<float>(format.offset());
      store_factor(format, zero, data, kPanel + c);
    }
    data += format.header_bytes();
    const int64_t begin = group * format.group_size;
    const int64_t count = std::min(format.group_size, in_features - begin);
    const int64_t done = stride == 1 ? pack_eights(format, values + begin, row_stride, count, columns, data) : 0;
    for (int64_t k = done; k < count; ++k) {
      const uint8_t* source = values + (begin + k) * stride;
      const int64_t step = k / 4;
      if (format.bits == 8) {
        uint8_t* out = data + step * 4 * kPanel + k % 4;
        for (int c = 0; c < columns; ++c) out[c * 4] = source[c * row_stride];
      } else {
        uint8_t* out = data + step / 2 * 4 * kPanel + k % 4;
        const int shift = step % 2 * 4;
        for (int c = 0; c < columns; ++c) {
          out[c * 4] = static_cast<uint8_t>(out[c * 4] | (source[c * row_stride] & 15) << shift);
        }
      }
    }
  }
}

// Checks the factors of a matrix: the scales, and zero points or minimums unless the format is symmetric.
void check_factors(const Stored& stored, int64_t out_features, const QuantizedShape& shape) {
  OSTINATO_CHECK(stored.zeros.exists() == !shape.format.symmetric,
                 "zero points are given unless the format is symmetric");
  for (const Tensor* factors : {&stored.scales, &stored.zeros}) {
    OSTINATO_CHECK(!factors->exists() || (factors->dtype == DType::float32 && factors->dim == 2 &&
                                          factors->sizes[0] == out_features && factors->sizes[1] == shape.groups),
                   "scales and zero points must be float32 [", out_features, ", ", shape.groups, "]");
  }
}

// pack_quantized(Tensor values, Tensor scales, Tensor? zeros, SymInt bits, SymInt group_size, bool symmetric, str scales,
//                str kind) -> Tensor
void pack_quantized(Call& call) {
  Stored stored{};
  stored.values = call.tensor();
  stored.scales = call.tensor();
  stored.zeros = call.optional_tensor();
  const QuantFormat format = read_format(call);
  OSTINATO_CHECK(stored.values.dtype == DType::uint8 && stored.values.dim == 2, "values must be a matrix of uint8");
  const int64_t out_features = stored.values.sizes[0];
  const QuantizedShape shape(out_features, stored.values.sizes[1], format);
  check_factors(stored, out_features, shape);
  give_packed(call, shape, [&](int64_t begin, int64_t end, uint8_t* packed) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t row = panel * kPanel;
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, out_features - row));
      pack_panel(stored, row, columns, shape, packed + panel * shape.panel_bytes);
    }
  });
}

// One factor of a group's header.
float read_factor(const QuantFormat& format, const uint8_t* header, int64_t index) {
  if (format.factors == DType::bfloat16) return to_float(reinterpret_cast<const BFloat16*>(header)[index]);
  if (format.factors == DType::float16) return to_float(reinterpret_cast<const Float16*>(header)[index]);
  return reinterpret_cast<const float*>(header)[index];
}

// The k-th value of a column of a group, widened.
float read_value(const QuantFormat& format, const uint8_t* values, int64_t k, int column) {
  const int64_t step = k / 4;
  const int64_t byte = column * 4 + k % 4;
  if (format.bits == 8) {
    const uint8_t value = values[step * 4 * kPanel + byte];
    return format.is_e4m3 ? from_float8(value) : static_cast<float>(value);
  }
  const int value = values[step / 2 * 4 * kPanel + byte] >> (step % 2 * 4) & 15;
  return static_cast<float>(format.is_e2m1 ? kE2m1[value] : value);
}

// Computes one row of the matrix that a quantised weight stands for.
template <class T>
void read_row(const QuantizedWeight& weight, int64_t row, int64_t in_features, T* out) {
  const int column = static_cast<int>(row % kPanel);
  const QuantFormat& format = weight.format;
  for (int64_t group = 0; group < weight.groups; ++group) {
    const uint8_t* data = weight.panel(row / kPanel) + weight.group_offset(group);
    const float scale = read_factor(format, data, column);
    const float second = format.symmetric ? 0.0f : read_factor(format, data, kPanel + column);
    const float zero = format.has_minimums ? 0.0f : static_cast<float>(format.offset()) + second;
    const float minimum = format.has_minimums ? second : 0.0f;
    const uint8_t* values = data + format.header_bytes();
    const int64_t begin = group * format.group_size;
    const int64_t count = std::min(format.group_size, in_features - begin);
    for (int64_t k = 0; k < count; ++k) {
      from_float((read_value(format, values, k, column) - zero) * scale - minimum, out + begin + k);
    }
  }
}

// quantized_rows(Tensor weight, Tensor ids, SymInt out_features, SymInt in_features, bool float32_output,
//                SymInt bits, SymInt group_size, bool symmetric, str scales, str kind) -> Tensor
void quantized_rows(Call& call) {
  const Tensor weight = call.tensor();
  const Tensor ids = call.tensor();
  const int64_t out_features = call.integer();
  const int64_t in_features = call.integer();
  const bool float32_output = call.boolean();
  const QuantFormat format = read_format(call);
  const QuantizedWeight quantized(weight, out_features, in_features, format);
  const DType dtype = float32_output ? DType::float32 : DType::bfloat16;
  give_rows(call, ids, out_features, in_features, dtype, in_features * 8, [&](int64_t id, char* target) {
    if (float32_output) {
      read_row(quantized, id, in_features, reinterpret_cast<float*>(target));
    } else {
      read_row(quantized, id, in_features, reinterpret_cast<BFloat16*>(target));
    }
  });
}

}  // namespace

OSTINATO_KERNEL(pack_quantized, pack_quantized);
OSTINATO_KERNEL(quantized_rows, quantized_rows);

}  // namespace ostinato::linear
