// Returns rows of a packed, compressed or quantised matrix by their numbers, for embeddings.
#pragma once

#include "linear/tasks.h"

#include <atomic>

namespace ostinato::linear {

// Gives the matrix [ids, in_features] of the call. copy(id, target) writes a row, which takes as long as copying
// `row_traffic` bytes.
template <class Copy>
void give_rows(Call& call, const Tensor& ids, int64_t out_features, int64_t in_features, DType dtype, int64_t row_traffic,
               const Copy& copy) {
  const bool wide = ids.dtype == DType::int64;
  OSTINATO_CHECK(ids.dim == 1 && (wide || ids.dtype == DType::int32), "ids must be an int64 or int32 vector");
  const auto id_at = [&](int64_t row) {
    const int64_t offset = row * ids.strides[0];
    return wide ? ids.as<int64_t>()[offset] : ids.as<int32_t>()[offset];
  };
  const int64_t num_rows = ids.sizes[0], row_bytes = in_features * element_size(dtype);
  const int64_t sizes[] = {num_rows, in_features};
  const Tensor out = call.empty(sizes, 2, dtype);
  std::atomic<int64_t> wrong_row{-1};
  divide_conversion(call.threads(), NumParts{num_rows}, num_rows * row_traffic).run([&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t id = id_at(row);
      if (id < 0 || id >= out_features) {
        wrong_row = row;
        return;
      }
      copy(id, out.as<char>() + row * row_bytes);
    }
  });
  if (wrong_row >= 0) {
    if (out.handle != nullptr) aoti_torch_delete_tensor_object(out.handle);
    OSTINATO_CHECK(false, "ids[", wrong_row.load(), "] is ", id_at(wrong_row), ", not a row of the weight: 0 to ", out_features - 1);
  }
  call.give(out);
}

}  // namespace ostinato::linear
