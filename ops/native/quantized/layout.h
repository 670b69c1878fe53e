// The layout of a quantised linear weight, shared by the kernels that write it and those that read it.
//
// A weight [N, K] is stored as uint8 [panels][bytes]: a panel is 32 rows of the matrix, that is 32 columns of the
// result, and holds its groups of K one after the other, each with what its products need, so that a product with
// one row reads the whole tensor once, front to back. A group is
//
//   scales       32 bfloat16
//   zero points  32 bfloat16, whole numbers relative to the offset; left out when symmetric
//   steps        8 bits: [steps][32 columns][4 values of K]
//                4 bits: [steps / 2][32 columns][4 bytes], step 2i in the low halves, step 2i + 1 in the high ones
//
// and stands for (value - offset - zero point) * scale, where the offset is 128 or 8. K is padded to a multiple of
// 8 with zero bytes, which no product sees because activations end there.
#pragma once

#include "linear/layout.h"
#include "core/simd.h"

namespace ostinato::linear {

struct QuantFormat {
  int bits;  // 8 or 4
  int64_t group_size;  // values of K that share a scale
  bool symmetric;

  int offset() const { return 1 << (bits - 1); }
  int64_t header_bytes() const { return symmetric ? 2 * kPanel : 4 * kPanel; }
  int64_t step_bytes() const { return kPanel * bits / 2; }
};

// The last three arguments of every op over quantised weights.
inline QuantFormat read_format(Call& call) {
  const int64_t bits = call.integer();
  const int64_t group_size = call.integer();
  return {static_cast<int>(bits), group_size, call.boolean()};
}

struct QuantizedShape {
  QuantizedShape(int64_t out_features, int64_t in_features, const QuantFormat& chosen) : format(chosen) {
    OSTINATO_CHECK((format.bits == 8 || format.bits == 4) && format.group_size >= 8 && format.group_size <= 256 &&
                       format.group_size % 8 == 0,
                   "a quantised weight has 8 or 4 bits and groups of 8 to 256 values, a multiple of 8");
    panels = ceil_divide(out_features, kPanel);
    steps = ceil_divide(in_features, 8) * 2;
    group_steps = format.group_size / 4;
    groups = ceil_divide(steps, group_steps);
    panel_bytes = groups * format.header_bytes() + steps * format.step_bytes();
  }

  int64_t group_offset(int64_t group) const {  // bytes from the panel's begin
    return group * (format.header_bytes() + group_steps * format.step_bytes());
  }
  int64_t bytes() const { return panels * panel_bytes; }

  QuantFormat format;
  int64_t panels;
  int64_t steps;        // of 4 values of K, an even number
  int64_t group_steps;  // of every group but the last
  int64_t groups;
  int64_t panel_bytes;
};

struct QuantizedWeight : QuantizedShape {
  // A matrix whose shape was checked, such as one of a stack.
  QuantizedWeight(const uint8_t* bytes, const QuantizedShape& shape) : QuantizedShape(shape), data(bytes) {}
  QuantizedWeight(const Tensor& tensor, int64_t out_features, int64_t in_features, const QuantFormat& chosen)
      : QuantizedShape(out_features, in_features, chosen), data(tensor.as<uint8_t>()) {
    OSTINATO_CHECK(tensor.dtype == DType::uint8 && tensor.dim == 2 && tensor.sizes[0] == panels &&
                       tensor.sizes[1] == panel_bytes && (panel_bytes <= 1 || tensor.strides[1] == 1) &&
                       (panels <= 1 || tensor.strides[0] == panel_bytes),
                   "the weight must be what quantize_linear_weight made of " + std::to_string(out_features) + " x " +
                       std::to_string(in_features) + " values: contiguous uint8 [" + std::to_string(panels) + ", " +
                       std::to_string(panel_bytes) + "]");
  }

  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes; }

  const uint8_t* data;
};

}  // namespace ostinato::linear
