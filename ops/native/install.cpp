// The library's one entry point: hands every registered kernel to torch's dispatcher.
#include "binding.h"

namespace ostinato {
namespace {

Registration* first_registration = nullptr;

}  // namespace

Registration::Registration(const char* kernel_name, BoxedKernel boxed_kernel, Kernel bare_kernel)
    : name(kernel_name), boxed(boxed_kernel), kernel(bare_kernel), next(first_registration) {
  first_registration = this;
}

}  // namespace ostinato

#define OSTINATO_EXPORT extern "C" __attribute__((visibility("default")))

// The name of the index-th kernel, null past the last.
OSTINATO_EXPORT const char* ostinato_kernel_name(int index) {
  auto* entry = ostinato::first_registration;
  while (entry != nullptr && index-- > 0) entry = entry->next;
  return entry == nullptr ? nullptr : entry->name;
}

// The kernel called `name` for tapes, null when it is not in this library.
OSTINATO_EXPORT void* ostinato_kernel(const char* name) {
  for (auto* entry = ostinato::first_registration; entry != nullptr; entry = entry->next) {
    if (std::strcmp(entry->name, name) == 0) return reinterpret_cast<void*>(entry->kernel);
  }
  return nullptr;
}

// Registers all kernels as the CPU implementations of `<namespace>::<name>`; returns 0, or 1 when torch refused.
OSTINATO_EXPORT int ostinato_install(const char* name_space) {
  TorchLibraryHandle library;  // never deleted: deleting would deregister
  if (aoti_torch_library_init_impl(name_space, "CPU", __FILE__, __LINE__, &library) != 0) return 1;
  for (auto* entry = ostinato::first_registration; entry != nullptr; entry = entry->next) {
    if (torch_library_impl(library, entry->name, entry->boxed, TORCH_ABI_VERSION) != 0) return 1;
  }
  return 0;
}

// Kernels use up to `count` threads from now on, whatever OpenMP's own number is; 0 = as many as that.
OSTINATO_EXPORT void ostinato_set_threads(int count) { ostinato::thread_setting() = count; }

// The crew of this library's kernels, and that they shall use another library's: one per process.
OSTINATO_EXPORT void* ostinato_crew() { return &ostinato::crew(); }
OSTINATO_EXPORT void ostinato_use_crew(void* crew) { ostinato::crew_setting() = static_cast<ostinato::Crew*>(crew); }
