// Allocating the weight that an op packs, and dividing its panels between threads.
#pragma once

#include "linear/tasks.h"
#include "quantized/layout.h"

namespace ostinato::linear {

// Makes a weight. write_panels(begin, end, weight) writes its panels from `begin` to `end`.
template <class WritePanels>
void give_packed(Call& call, const QuantizedShape& shape, const WritePanels& write_panels) {
  const int64_t sizes[] = {shape.panels, shape.panel_bytes};
  const Tensor packed = call.empty(sizes, 2, DType::uint8);
  prefer_huge_pages(packed.data, shape.bytes());
  divide_conversion(call.threads(), NumParts{shape.panels}, shape.bytes()).run([&](int64_t begin, int64_t end) {
    write_panels(begin, end, packed.as<uint8_t>());
  });
  call.give(packed);
}

}  // namespace ostinato::linear
