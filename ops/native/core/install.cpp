// The exports of every library to library.py: its kernels, the sizes and codes that Python relies on, and its threads.
#include "core/cpu_graph.h"
#include "core/kernel.h"

#include <torch/headeronly/version.h>

namespace ostinato {
namespace {

Registration* first_registration = nullptr;

// A number that Python code relies on, by the name that abi.py has for it.
struct AbiValue {
  const char* name;
  int64_t value;
};

constexpr int64_t code(DType dtype) { return static_cast<int64_t>(dtype); }

// torch's dtype codes are known only when the library runs. The other numbers are known when it is compiled.
const AbiValue kAbi[] = {
    {"bytes of Argument", sizeof(Argument)},
    {"offset of Argument.kind", offsetof(Argument, kind)},
    {"offset of Argument.integer_value", offsetof(Argument, integer_value)},
    {"offset of Argument.number_value", offsetof(Argument, number_value)},
    {"offset of Argument.text_value", offsetof(Argument, text_value)},
    {"ArgumentKind.none", Argument::none},
    {"ArgumentKind.tensor", Argument::tensor},
    {"ArgumentKind.integer", Argument::integer},
    {"ArgumentKind.number", Argument::number},
    {"ArgumentKind.text", Argument::text},
    {"SymbolicSize.tokens", SymbolicSize::tokens},
    {"SymbolicSize.seqs", SymbolicSize::seqs},
    {"SymbolicSize.seqs_and_one", SymbolicSize::seqs_and_one},
    {"SymbolicSize.rows", SymbolicSize::rows},
    {"most dimensions", kMaxRank},
    {"dtype uint8", code(DType::uint8)},
    {"dtype int8", code(DType::int8)},
    {"dtype int32", code(DType::int32)},
    {"dtype int64", code(DType::int64)},
    {"dtype float16", code(DType::float16)},
    {"dtype float32", code(DType::float32)},
    {"dtype float64", code(DType::float64)},
    {"dtype bfloat16", code(DType::bfloat16)},
    {"torch's dtype uint8", aoti_torch_dtype_uint8()},
    {"torch's dtype int8", aoti_torch_dtype_int8()},
    {"torch's dtype int32", aoti_torch_dtype_int32()},
    {"torch's dtype int64", aoti_torch_dtype_int64()},
    {"torch's dtype float16", aoti_torch_dtype_float16()},
    {"torch's dtype float32", aoti_torch_dtype_float32()},
    {"torch's dtype float64", aoti_torch_dtype_float64()},
    {"torch's dtype bfloat16", aoti_torch_dtype_bfloat16()},
};

}  // namespace

Registration::Registration(const char* kernel_name, BoxedKernel boxed_kernel, Kernel bare_kernel)
    : name(kernel_name), boxed(boxed_kernel), kernel(bare_kernel), next(first_registration) {
  first_registration = this;
}

}  // namespace ostinato

// The name of the index-th kernel, null past the last.
OSTINATO_EXPORT const char* ostinato_kernel_name(int index) {
  auto* entry = ostinato::first_registration;
  while (entry != nullptr && index-- > 0) entry = entry->next;
  return entry == nullptr ? nullptr : entry->name;
}

// The kernel called `name` for a CpuGraph, null when it is not in this library.
OSTINATO_EXPORT void* ostinato_kernel(const char* name) {
  for (auto* entry = ostinato::first_registration; entry != nullptr; entry = entry->next) {
    if (std::strcmp(entry->name, name) == 0) return reinterpret_cast<void*>(entry->kernel.load());
  }
  return nullptr;
}

// The name of the index-th number that Python relies on, null past the last; `value` receives the number.
OSTINATO_EXPORT const char* ostinato_abi_value(int index, int64_t* value) {
  if (index < 0 || index >= static_cast<int>(sizeof(ostinato::kAbi) / sizeof(ostinato::kAbi[0]))) return nullptr;
  *value = ostinato::kAbi[index].value;
  return ostinato::kAbi[index].name;
}

// From now on, calls of the op `name` run `kernel`, which another library has. Returns 0 when this library has no such
// op, else 1.
OSTINATO_EXPORT int ostinato_replace(const char* name, ostinato::Kernel kernel) {
  for (auto* entry = ostinato::first_registration; entry != nullptr; entry = entry->next) {
    if (std::strcmp(entry->name, name) != 0) continue;
    entry->kernel = kernel;
    return 1;
  }
  return 0;
}

// Makes all kernels the CPU implementations of `<namespace>::<name>`. `replace` is null, or `ostinato_replace` of a
// library that was installed before with some of the same ops: their calls then run the kernels of this library.
// Returns 0, or 1 when torch refused.
OSTINATO_EXPORT int ostinato_install(const char* name_space, int (*replace)(const char*, ostinato::Kernel)) {
  TorchLibraryHandle library;  // never deleted, because that would deregister the kernels
  if (aoti_torch_library_init_impl(name_space, "CPU", __FILE__, __LINE__, &library) != 0) return 1;
  for (auto* entry = ostinato::first_registration; entry != nullptr; entry = entry->next) {
    if (replace != nullptr && replace(entry->name, entry->kernel)) continue;
    if (torch_library_impl(library, entry->name, entry->boxed, TORCH_ABI_VERSION) != 0) return 1;
  }
  return 0;
}

// Kernel calls of the calling thread use up to `count` threads of the ThreadPool from now on; 0 = torch's threads.
OSTINATO_EXPORT void ostinato_set_pool_threads(int count) { ostinato::thread_state()->num_pool_threads() = count; }

// The first function returns this library's thread state. The second makes this library use the state of another
// library.
OSTINATO_EXPORT void* ostinato_thread_state() { return ostinato::thread_state(); }
OSTINATO_EXPORT void ostinato_share_threads(void* state) {
  ostinato::thread_state() = static_cast<ostinato::ThreadState*>(state);
}
