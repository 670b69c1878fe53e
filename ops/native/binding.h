// How a C++ kernel becomes an op's CPU implementation: argument reading, registration, threads.
//
// Only the C layer of torch's stable ABI is included (torch >= 2.11): it compiles in half a second where
// torch/library.h takes more than ten, and a call runs no Python. Threads are torch's own pool, or a crew's in small
// steps: no second OpenMP runtime is loaded, whatever the compiler, and torch.set_num_threads governs every kernel
// unless ostinato_set_threads gave the kernels a number of their own.
#pragma once

#include "crew.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace ostinato {

inline void require_ok(AOTITorchError code, const char* what) {
  if (code != 0) throw std::runtime_error(std::string("ostinato native: torch failed to ") + what);
}

#define OSTINATO_CHECK(condition, message) \
  do {                                     \
    if (!(condition)) throw std::invalid_argument(message); \
  } while (0)

enum class DType : int32_t {
  uint8 = 0,
  int8 = 1,
  int32 = 3,
  int64 = 4,
  float16 = 5,
  float32 = 6,
  float64 = 7,
  bfloat16 = 15
};

// A borrowed tensor; valid while the Call that it was read from lives. Of an argument that is None nothing is set.
struct Tensor {
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;
  const int64_t* sizes = nullptr;    // elements
  const int64_t* strides = nullptr;  // elements
  int64_t dim = 0;
  DType dtype = DType::float32;

  bool exists() const { return sizes != nullptr; }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

constexpr int kMaxRank = 4;  // of what kernels return and tapes hold

// A tensor with sizes and strides of its own.
struct OwnTensor {
  OwnTensor() = default;
  OwnTensor(const OwnTensor&) = delete;
  OwnTensor& operator=(const OwnTensor&) = delete;

  // Sets everything but the memory; returns the bytes that it takes.
  int64_t set_contiguous(const int64_t* new_sizes, int64_t dim, DType dtype);

  Tensor tensor;
  int64_t sizes[kMaxRank];
  int64_t strides[kMaxRank];
};

inline int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::uint8:
    case DType::int8: return 1;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::int32:
    case DType::float32: return 4;
    default: return 8;
  }
}

inline int64_t OwnTensor::set_contiguous(const int64_t* new_sizes, int64_t dim, DType dtype) {
  OSTINATO_CHECK(dim <= kMaxRank, "results have at most 4 dimensions");
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    sizes[i] = new_sizes[i];
    strides[i] = stride;
    stride *= new_sizes[i] > 1 ? new_sizes[i] : 1;
  }
  tensor.sizes = sizes;
  tensor.strides = strides;
  tensor.dim = dim;
  tensor.dtype = dtype;
  return stride * element_size(dtype);
}

// An argument of a recorded call (tape.cpp).
struct Argument {
  enum Kind : int64_t { none, tensor, integer, number, text };
  Kind kind;
  int64_t whole;  // of a tensor its slot; booleans are 0 and 1
  double real;
  const char* characters;
};

// Memory for the results of recorded calls, taken from front to back and given up all at once.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  void* take(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) {
      const int64_t size = bytes > total_ ? bytes : total_;  // at least doubles what there is
      void* memory = std::aligned_alloc(64, size);
      if (memory == nullptr) throw std::bad_alloc();
      chunks_.push_back({memory, size});
      total_ += size;
      used_ = 0;
    }
    char* result = static_cast<char*>(chunks_.back().memory) + used_;
    used_ += bytes;
    return result;
  }

  // Afterwards one chunk holds as much as all did.
  void reset() {
    used_ = 0;
    if (chunks_.size() < 2) return;
    const int64_t total = total_;
    release();
    take(total);
    used_ = 0;
  }

 private:
  struct Chunk {
    void* memory;
    int64_t bytes;
  };
  void release() {
    for (const Chunk& chunk : chunks_) std::free(chunk.memory);
    chunks_.clear();
    total_ = used_ = 0;
  }
  std::vector<Chunk> chunks_;
  int64_t total_ = 0;
  int64_t used_ = 0;
};

inline Tensor describe(AtenTensorHandle handle) {
  Tensor tensor;
  int64_t* sizes;
  int64_t* strides;
  int32_t dtype;
  tensor.handle = handle;
  require_ok(aoti_torch_get_data_ptr(handle, &tensor.data), "read a tensor's address");
  require_ok(aoti_torch_get_sizes(handle, &sizes), "read a tensor's sizes");
  require_ok(aoti_torch_get_strides(handle, &strides), "read a tensor's strides");
  require_ok(aoti_torch_get_dim(handle, &tensor.dim), "read a tensor's rank");
  require_ok(aoti_torch_get_dtype(handle, &dtype), "read a tensor's dtype");
  tensor.sizes = sizes;
  tensor.strides = strides;
  tensor.dtype = static_cast<DType>(dtype);
  return tensor;
}

// One call of a kernel, by torch's dispatcher (`stack`) or by a tape. Arguments are read in the schema's order, each
// exactly once and all of them before the first check; what was read is released with this object, also when the
// kernel throws.
class Call {
 public:
  explicit Call(StableIValue* stack) : stack_(stack) {}
  // `slots(i)` is the i-th tensor of the tape.
  Call(const Argument* arguments, const std::deque<OwnTensor>& slots, Arena& arena, OwnTensor& result)
      : arguments_(arguments), slots_(&slots), arena_(&arena), result_(&result) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ~Call() {
    for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  }

  Tensor tensor() {
    if (arguments_ != nullptr) return (*slots_)[next_argument().whole].tensor;
    auto handle = reinterpret_cast<AtenTensorHandle>(take());
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  // A `Tensor?` argument.
  Tensor optional_tensor() {
    if (arguments_ != nullptr) {
      const Argument& argument = next_argument();
      return argument.kind == Argument::none ? Tensor{} : (*slots_)[argument.whole].tensor;
    }
    auto* box = reinterpret_cast<StableIValue*>(take());
    if (box == nullptr) return Tensor{};
    auto handle = reinterpret_cast<AtenTensorHandle>(*box);
    delete box;
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  int64_t integer() { return arguments_ != nullptr ? next_argument().whole : static_cast<int64_t>(take()); }
  bool boolean() { return arguments_ != nullptr ? next_argument().whole != 0 : (take() & 0xff) != 0; }

  double number() {
    if (arguments_ != nullptr) return next_argument().real;
    const uint64_t bits = take();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  std::string text() {
    if (arguments_ != nullptr) return next_argument().characters;
    auto handle = reinterpret_cast<StringHandle>(take());
    const char* characters;
    size_t length;
    torch_string_c_str(handle, &characters);
    torch_string_length(handle, &length);
    std::string value(characters, length);
    torch_delete_string(handle);
    return value;
  }

  // An uninitialised contiguous CPU tensor for the result: once a call.
  Tensor empty(const int64_t* sizes, int64_t dim, DType dtype) {
    if (arguments_ != nullptr) {
      result_->tensor.data = arena_->take(result_->set_contiguous(sizes, dim, dtype));
      return result_->tensor;
    }
    OwnTensor shape;
    shape.set_contiguous(sizes, dim, dtype);
    AtenTensorHandle handle;
    require_ok(aoti_torch_empty_strided(dim, sizes, shape.strides, static_cast<int32_t>(dtype), 0, 0, &handle),
               "allocate a result");
    return describe(handle);
  }

  // The kernel's only result, which `empty` made; call it last.
  void give(const Tensor& result) {
    if (stack_ != nullptr) stack_[0] = reinterpret_cast<StableIValue>(result.handle);
  }

 private:
  uint64_t take() { return stack_[next_++]; }
  const Argument& next_argument() { return arguments_[next_++]; }

  StableIValue* stack_ = nullptr;
  const Argument* arguments_ = nullptr;
  const std::deque<OwnTensor>* slots_ = nullptr;
  Arena* arena_ = nullptr;
  OwnTensor* result_ = nullptr;
  uint64_t next_ = 0;
  AtenTensorHandle tensors_[16];
  int num_tensors_ = 0;
};

using Kernel = void (*)(Call& call);
using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// A kernel's entry in the list that install() walks; made by OSTINATO_KERNEL only.
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

// The same with a function of its own for torch's dispatcher.
#define OSTINATO_BOXED_KERNEL(name, boxed, kernel) \
  static ostinato::Registration registration_of_##name(#name, boxed, kernel)

// Threads that kernels may use; 0 = as many as torch has. Set by ostinato_set_threads.
inline int& thread_setting() {
  static int count = 0;
  return count;
}

inline int num_threads() {
  if (thread_setting() > 0) return thread_setting();
  uint32_t count;
  require_ok(torch_get_num_threads(&count), "read the number of threads");
  return static_cast<int>(count);
}

// The crew of this process: that of the library which was loaded first (ostinato_use_crew).
inline Crew*& crew_setting() {
  static Crew* crew = nullptr;
  return crew;
}

inline Crew& crew() {
  Crew*& crew = crew_setting();
  if (crew == nullptr) crew = new Crew;  // never deleted: its threads use it
  return *crew;
}

// Whether OpenMP has fewer threads than kernels have. The engine sets it to 1 around small steps, whose other loops
// are not worth a barrier. The function is that of the OpenMP runtime that torch has loaded.
inline bool openmp_is_held_back() {
  static const auto get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  return get != nullptr && get() < num_threads();
}

// Runs body(worker) for worker in [0, num_workers) and waits; workers may share a thread, so they must not wait for
// each other. In small steps on the crew, else on torch's threads: those of the loops before and after, which keep
// the cores for a while.
template <class Body>
void on_workers(int num_workers, Body&& body) {
  if (num_workers <= 1) {
    body(0);
    return;
  }
  using Function = std::remove_reference_t<Body>;
  if (openmp_is_held_back()) {
    crew().run(
        num_workers, [](void* context, int worker) { (*static_cast<Function*>(context))(worker); }, &body);
    return;
  }
  auto trampoline = [](int64_t begin, int64_t end, void* context) {
    for (int64_t worker = begin; worker < end; ++worker) {
      (*static_cast<Function*>(context))(static_cast<int>(worker));
    }
  };
  require_ok(torch_parallel_for(0, num_workers, 1, trampoline, &body), "run on its threads");
}

}  // namespace ostinato
