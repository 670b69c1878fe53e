// Single columns of a panel of a quantised weight, which are rows of the matrix. Parts of a matrix can begin and end
// within a panel.
#pragma once

#include "quantized/layout.h"

#include <algorithm>
#include <cstring>

namespace ostinato::linear {

// Calls action(begin, size) for each run of bytes of a panel. A run has equally many bytes of each of the 32 columns,
// one column after the other.
template <class Action>
void for_each_run(const QuantizedShape& shape, const Action& action) {
  const QuantFormat& format = shape.format;
  const int64_t factors = kPanel * format.factor_bytes(), run = 4 * kPanel;
  for (int64_t group = 0; group < shape.groups; ++group) {
    int64_t place = shape.group_offset(group);
    const int64_t values = place + format.header_bytes();
    for (; place < values; place += factors) action(place, factors);
    const int64_t steps = std::min(shape.group_steps, shape.steps - group * shape.group_steps);
    const int64_t end = values + steps * format.step_bytes();
    for (; place < end; place += run) action(place, run);
  }
}

// Copies `count` columns, which are the first of panel `from`, to the columns from `column` on of panel `to`.
inline void copy_columns(const QuantizedShape& shape, const uint8_t* from, uint8_t* to, int column, int count) {
  for_each_run(shape, [&](int64_t begin, int64_t size) {
    const int64_t each = size / kPanel;
    std::memcpy(to + begin + column * each, from + begin, count * each);
  });
}

// Writes zeros to the columns from `column` on.
inline void zero_columns(const QuantizedShape& shape, uint8_t* panel, int column) {
  for_each_run(shape, [&](int64_t begin, int64_t size) {
    const int64_t used = size / kPanel * column;
    std::memset(panel + begin + used, 0, size - used);
  });
}

}  // namespace ostinato::linear
