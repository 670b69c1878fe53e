// What kernels over rows share: the division among threads, and checks.
#pragma once

#include "core/division.h"
#include "core/elements.h"
#include "core/kernel.h"
#include "core/simd.h"

namespace ostinato {

constexpr int64_t kRowBytesPerWorker = 64 << 10;  // bytes of rows for which waking one more thread pays

// Calls body(row) for every row. The number of threads grows with the bytes of the rows.
template <class Body>
void for_each_row(const Threads& threads, NumParts rows, int64_t bytes, const Body& body) {
  divide<kRowBytesPerWorker>(threads, rows, bytes).for_each(body);
}

inline void check_element(const Tensor& x) {
  OSTINATO_CHECK(x.dtype == DType::float32 || x.dtype == DType::bfloat16 || x.dtype == DType::float16,
                 "x must be float32, bfloat16 or float16");
}

inline void check_matrix(const Tensor& x) {
  check_element(x);
  OSTINATO_CHECK(x.dim == 2 && is_contiguous(x, 1), "x must be a matrix with contiguous rows");
}

// Calls vector(column) for each whole vector of columns, then single(column) for each column that is left.
template <class Vector, class Single>
OSTINATO_INLINE void columns(int64_t count, const Vector& vector, const Single& single) {
  int64_t c = 0;
  for (; c + F32::width <= count; c += F32::width) vector(c);
  for (; c < count; ++c) single(c);
}

}  // namespace ostinato
