// The element types that a library has kernels for.
//
// A dense decoder usually has one type of activations, weights and cache. At its first start only the kernels for that
// type are compiled (PARTS in build.py). OSTINATO_ELEMENTS is the sum of the bits below. Without it, a library has the
// kernels for all types.
#pragma once

#define OSTINATO_FLOAT32 1
#define OSTINATO_BFLOAT16 2
#define OSTINATO_FLOAT16 4
#define OSTINATO_BYTE_CACHE 8  // 8-bit keys and values

#ifndef OSTINATO_ELEMENTS
#define OSTINATO_ELEMENTS 15
#endif

#define OSTINATO_HAS(bits) ((OSTINATO_ELEMENTS & (bits)) == (bits))

#include "core/simd.h"
#include "core/tensor.h"

namespace ostinato {

// library.py loads a library that has the kernels of a model, so no step gets here.
[[noreturn]] inline void throw_not_compiled() {
  throw_invalid_argument({"the loaded kernels were compiled for another element type; load the library core"});
}

// Calls kernel(T{}) with the element type that `dtype` names.
template <class Kernel>
void with_element(DType dtype, const Kernel& kernel) {
#if OSTINATO_HAS(OSTINATO_FLOAT32)
  if (dtype == DType::float32) return kernel(float{});
#endif
#if OSTINATO_HAS(OSTINATO_BFLOAT16)
  if (dtype == DType::bfloat16) return kernel(BFloat16{});
#endif
#if OSTINATO_HAS(OSTINATO_FLOAT16)
  if (dtype == DType::float16) return kernel(Float16{});
#endif
  throw_not_compiled();
}

}  // namespace ostinato
