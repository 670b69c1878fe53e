// Writes rows of a matrix as columns of a panel (layout.h).
#pragma once

#include "linear/layout.h"
#include "linear/transpose.h"

namespace ostinato::linear {

// Writes rows [0, columns) of a row-major matrix as columns of one panel.
inline void pack_columns(const char* rows, int64_t row_bytes, int columns, int64_t in_bytes, int64_t steps, uint32_t* panel) {
  const int64_t whole = in_bytes / 4;
  transpose_units(rows, row_bytes, columns, whole, panel, kPanel);
  if (whole < steps) {
    for (int column = 0; column < columns; ++column) {
      uint32_t unit = 0;
      std::memcpy(&unit, rows + column * row_bytes + whole * 4, in_bytes - whole * 4);
      panel[whole * kPanel + column] = unit;
    }
  }
}

}  // namespace ostinato::linear
