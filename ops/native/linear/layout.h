// The layout of a packed linear weight, shared by the kernels that write it and those that read it.
//
// [panels][steps][32 columns][elements]: a panel is 32 rows of the original [N, K] matrix, that is 32 columns
// of the result, and a step is four bytes of K for each of them: one float32 or two bfloat16. Padding past N and K is
// zero. A product with one row reads the whole tensor once, front to back.
#pragma once

#include "core/division.h"
#include "core/kernel.h"

namespace ostinato::linear {

constexpr int kPanel = 32;  // columns of a panel

// Elements of K in a step; 0 for dtypes that are not packed.
inline int64_t elements_per_step(DType dtype) {
  return dtype == DType::float32 ? 1 : dtype == DType::bfloat16 ? 2 : 0;
}

struct PackedWeight {
  // A matrix whose shape was checked before, such as one of a stack.
  PackedWeight(const uint32_t* data, int64_t num_panels, int64_t num_steps)
      : units(data), panels(num_panels), steps(num_steps) {}
  PackedWeight(const Tensor& tensor, int64_t out_features, int64_t in_features)
      : units(tensor.as<uint32_t>()), panels(ceil_divide(out_features, kPanel)) {
    const int64_t elements = elements_per_step(tensor.dtype);
    OSTINATO_CHECK(elements != 0 && tensor.dim == 4 && tensor.sizes[2] == kPanel && tensor.sizes[3] == elements,
                   "the weight must come from pack_linear_weight: [panels, steps, 32, 2] bfloat16 or "
                   "[panels, steps, 32, 1] float32");
    steps = ceil_divide(in_features, elements);
    OSTINATO_CHECK(tensor.sizes[0] == panels && tensor.sizes[1] == steps,
                   "a packed weight of ", tensor.sizes[0], " panels and ", tensor.sizes[1], " steps does not hold ",
                   out_features, " x ", in_features, " values");
    const int64_t strides[] = {steps * kPanel * elements, kPanel * elements, elements, 1};
    for (int i = 0; i < 4; ++i) {
      OSTINATO_CHECK(tensor.sizes[i] <= 1 || tensor.strides[i] == strides[i],
                     "a packed weight must be contiguous, as pack_linear_weight returns it");
    }
  }

  const uint32_t* panel(int64_t index) const { return units + index * steps * kPanel; }
  // The first half of the panels. Those of the other half follow, from panel(panels) on.
  PackedWeight first_half() const { return {units, panels / 2, steps}; }
  // The matrix `count` places after this one in a stack.
  PackedWeight next(int64_t count) const { return {panel(count * panels), panels, steps}; }
  int64_t bytes() const { return panels * steps * kPanel * 4; }

  const uint32_t* units;
  int64_t panels;
  int64_t steps;
};

}  // namespace ostinato::linear
