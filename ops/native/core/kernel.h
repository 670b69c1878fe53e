// Registration: how a C++ function becomes the CPU implementation of an op. Every kernel's source includes this.
#pragma once

#include "core/call.h"

namespace ostinato {

using Kernel = void (*)(Call& call);
using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// A kernel's entry in the list that install.cpp walks. OSTINATO_KERNEL makes it.
struct Registration {
  Registration(const char* name, BoxedKernel boxed, Kernel kernel);
  const char* name;
  BoxedKernel boxed;
  Kernel kernel;
  Registration* next;
};

// Makes `kernel` the CPU implementation of `<namespace>::name` when the library is installed.
#define OSTINATO_KERNEL(name, kernel)                                       \
  static void boxed_##name(StableIValue* stack, uint64_t, uint64_t) {       \
    ostinato::Call call(stack);                                             \
    kernel(call);                                                           \
  }                                                                         \
  OSTINATO_BOXED_KERNEL(name, boxed_##name, kernel)

// The same, with a separate function for torch's dispatcher.
#define OSTINATO_BOXED_KERNEL(name, boxed, kernel) \
  static ostinato::Registration registration_of_##name(#name, boxed, kernel)

// A function that Python calls through ctypes.
#define OSTINATO_EXPORT extern "C" __attribute__((visibility("default")))

}  // namespace ostinato
