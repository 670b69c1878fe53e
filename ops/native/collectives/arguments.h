// How the collectives read their arguments.
#pragma once

#include "collectives/group.h"
#include "core/tensor.h"

namespace ostinato::collectives {

// The group of a handle: [1] int64.
inline Group& group_of(const Tensor& handle) {
  OSTINATO_CHECK(handle.dtype == DType::int64 && handle.dim == 1 && handle.sizes[0] == 1, "group must be [1] int64");
  auto* group = reinterpret_cast<Group*>(*handle.as<int64_t>());
  OSTINATO_CHECK(group != nullptr, "the model has not joined its group of ranks");
  return *group;
}

inline bool is_contiguous_matrix(const Tensor& x) { return x.dim == 2 && is_contiguous(x); }

}  // namespace ostinato::collectives
