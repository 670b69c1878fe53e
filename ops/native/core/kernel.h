// Registration: how a C++ function becomes the CPU implementation of an op. Every kernel's source includes this.
#pragma once

#include "core/call.h"

#include <atomic>

namespace ostinato {

using Kernel = void (*)(Call& call);
using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// A kernel's entry in the list that install.cpp walks. OSTINATO_KERNEL makes it.
struct Registration {
  Registration(const char* name, BoxedKernel boxed, Kernel kernel);
  const char* name;
  BoxedKernel boxed;
  std::atomic<Kernel> kernel;  // a library that is loaded later can replace it (ostinato_replace)
  Registration* next;
};

// Makes `function` the CPU implementation of `<namespace>::name` when the library is installed.
#define OSTINATO_KERNEL(name, function)                                  \
  static void boxed_##name(StableIValue* stack, uint64_t, uint64_t);     \
  OSTINATO_BOXED_KERNEL(name, boxed_##name, function);                   \
  static void boxed_##name(StableIValue* stack, uint64_t, uint64_t) {    \
    ostinato::Call call(stack);                                          \
    registration_of_##name.kernel.load(std::memory_order_relaxed)(call); \
  }                                                                      \
  static_assert(true)  // needs a semicolon after the macro

// The same, with a separate function for torch's dispatcher. It calls the kernel of `registration_of_<name>`.
#define OSTINATO_BOXED_KERNEL(name, boxed, function) \
  static ostinato::Registration registration_of_##name(#name, boxed, function)

// A function that Python calls through ctypes.
#define OSTINATO_EXPORT extern "C" __attribute__((visibility("default")))

}  // namespace ostinato
