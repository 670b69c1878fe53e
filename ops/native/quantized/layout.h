// The layout of a quantised linear weight, shared by the kernels that write it and those that read it.
//
// A weight [N, K] is stored as uint8 [panels][bytes]. A panel is 32 rows of the matrix, that is 32 columns of the
// result. It holds its groups of K one after the other, each with its scales. So a product with one row reads the
// whole tensor once, front to back. A group is
//
//   scales       32 factors
//   zero points  32 factors, whole numbers relative to the offset; or minimums; left out when symmetric
//   steps        8 bits: [steps][32 columns][4 values of K]
//                4 bits: [steps / 2][32 columns][4 bytes], step 2i in the low halves, step 2i + 1 in the high ones
//
// A value stands for (value - offset - zero point) * scale, where the offset is 128 (8 bits) or 8 (4 bits). With
// minimums it stands for value * scale - minimum. Values of the kind e2m1 are floats of 4 bits: indices into kE2m1,
// which holds twice each float plus an offset of 12. Values of the kind e4m3 are floats of 8 bits, and stand for
// themselves times the scale. A factor is a bfloat16, float16 or float32. K is padded to a multiple of 8 with zero
// bytes. Kernels skip these bytes or multiply them by activations of 0.
#pragma once

#include "core/elements.h"
#include "core/simd.h"
#include "linear/layout.h"

#include <string>

namespace ostinato::linear {

// How the values of a weight are widened to bytes: a template argument of its kernels.
enum Widening : int { kBytes, kHalves, kTable, kFloat8 };

// Twice the floats of 4 bits with 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats 1.0), plus 12.
constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A float of 8 bits with 4 bits of exponent and 3 of mantissa (arXiv:2209.05433). NaN has no case here, because weights
// are checked for NaN when they are loaded (models/quantized_checkpoints/stored_floats.py).
inline float from_float8(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const float mantissa = static_cast<float>(bits & 7) / 8.0f;
  const auto power = bit_cast<float>(static_cast<uint32_t>(exponent + 120) << 23);
  const float magnitude = exponent == 0 ? mantissa * 0x1p-6f : (1.0f + mantissa) * power;
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

struct QuantFormat {
  int bits;  // 8 or 4
  int64_t group_size;  // values of K that share a scale
  bool symmetric;
  DType factors;  // the dtype of scales, zero points and minimums
  bool has_minimums;
  bool is_e2m1;
  bool is_e4m3;

  int offset() const { return has_minimums || is_e4m3 ? 0 : is_e2m1 ? 12 : 1 << (bits - 1); }
  Widening widening() const { return is_e4m3 ? kFloat8 : is_e2m1 ? kTable : bits == 4 ? kHalves : kBytes; }
  int64_t factor_bytes() const { return factors == DType::float32 ? 4 : 2; }
  int64_t header_bytes() const { return kPanel * factor_bytes() * (symmetric ? 1 : 2); }
  int64_t step_bytes() const { return kPanel * bits / 2; }
};

// Reads the last five arguments of an op over quantised weights.
inline QuantFormat read_format(Call& call) {
  const int64_t bits = call.integer();
  const int64_t group_size = call.integer();
  const bool symmetric = call.boolean();
  const std::string factors = call.text();
  const std::string kind = call.text();
  OSTINATO_CHECK(factors == "bfloat16" || factors == "float16" || factors == "float32",
                 "scales must be bfloat16, float16 or float32, got ", factors);
  OSTINATO_CHECK(kind == "steps" || (kind == "minimums" && !symmetric) || (kind == "e2m1" && bits == 4 && symmetric) ||
                     (kind == "e4m3" && bits == 8 && symmetric),
                 "a quantised weight consists of steps, of steps with minimums, or of symmetric e2m1 (4 bits) or e4m3 "
                 "(8 bits), got ", kind);
  const DType type = factors == "bfloat16"  ? DType::bfloat16
                     : factors == "float16" ? DType::float16
                                            : DType::float32;
  return {static_cast<int>(bits), group_size, symmetric, type, kind == "minimums", kind == "e2m1", kind == "e4m3"};
}

// Rounds one factor of a group's header to its dtype.
inline void store_factor(const QuantFormat& format, float value, uint8_t* header, int64_t index) {
  with_element(format.factors, [&]<class T>(T) { from_float(value, reinterpret_cast<T*>(header) + index); });
}

// V vectors of factors of a group's header, from the first-th factor on.
template <int V>
OSTINATO_INLINE void load_factors(const QuantFormat& format, const uint8_t* header, int64_t first, F32 (&factors)[V]) {
  const auto load_all = [&](const auto* all) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) factors[v] = load(all + first + v * F32::width);
  };
  if (format.factors == DType::bfloat16) return load_all(reinterpret_cast<const BFloat16*>(header));
  if (format.factors == DType::float16) return load_all(reinterpret_cast<const Float16*>(header));
  load_all(reinterpret_cast<const float*>(header));
}

// One vector of them.
OSTINATO_INLINE F32 load_factors(const QuantFormat& format, const uint8_t* header, int64_t first) {
  F32 factors[1];
  load_factors(format, header, first, factors);
  return factors[0];
}

// The scales and zero points of a group, for one vector of columns.
struct Factors {
  OSTINATO_INLINE Factors(F32 scales, F32 zeros) : scale(scales), zero(zeros) {}
  // The factors of the columns from index `column` on.
  OSTINATO_INLINE Factors(const QuantFormat& format, const uint8_t* header, int64_t column)
      : scale(load_factors(format, header, column)), zero(broadcast(static_cast<float>(format.offset()))) {
    if (!format.symmetric) zero = zero + load_factors(format, header, kPanel + column);
  }

  // Returns total + the product of the group and a row of activations. `whole` is the sum of the products of integers,
  // `row_scale` the row's scale, and `minus_sum` minus the sum of the row's integers.
  OSTINATO_INLINE F32 add_product(bool has_minimums, F32 whole, F32 row_scale, F32 minus_sum, F32 total) const {
    if (has_minimums) return fma(zero * row_scale, minus_sum, fma(whole, scale * row_scale, total));
    return fma(fma(zero, minus_sum, whole), scale * row_scale, total);
  }

  F32 scale;
  F32 zero;  // the value that stands for zero, or the minimum
};

struct QuantizedShape {
  QuantizedShape(int64_t out_features, int64_t in_features, const QuantFormat& chosen) : format(chosen) {
    OSTINATO_CHECK((format.bits == 8 || format.bits == 4) && format.group_size >= 8 && format.group_size <= 256 &&
                       format.group_size % 8 == 0,
                   "a quantised weight has 8 or 4 bits and groups of 8 to 256 values, a multiple of 8");
    OSTINATO_CHECK(in_features > 0, "a quantised weight must have at least one column, got ", in_features);
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

  // Whether a tensor is a weight of this shape: contiguous uint8 [panels, panel_bytes].
  bool fits(const Tensor& tensor) const {
    return tensor.dtype == DType::uint8 && tensor.dim == 2 && tensor.sizes[0] == panels &&
           tensor.sizes[1] == panel_bytes && is_contiguous(tensor);
  }

  QuantFormat format;
  int64_t panels;
  int64_t steps;        // steps of 4 values of K; their number is even
  int64_t group_steps;  // steps of every group but the last
  int64_t groups;
  int64_t panel_bytes;
};

struct QuantizedWeight : QuantizedShape {
  // A matrix whose shape was checked before, such as one of a stack.
  QuantizedWeight(const uint8_t* bytes, const QuantizedShape& shape) : QuantizedShape(shape), data(bytes) {}
  QuantizedWeight(const Tensor& tensor, int64_t out_features, int64_t in_features, const QuantFormat& chosen)
      : QuantizedShape(out_features, in_features, chosen), data(tensor.as<uint8_t>()) {
    OSTINATO_CHECK(fits(tensor), "the weight must be what quantize_linear_weight made of ", out_features, " x ",
                   in_features, " values: contiguous uint8 [", panels, ", ", panel_bytes, "]");
  }

  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes; }

  const uint8_t* data;
};

}  // namespace ostinato::linear
