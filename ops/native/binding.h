// How a C++ kernel becomes an op's CPU implementation: argument reading, registration, threads.
//
// Only the C layer of torch's stable ABI is included (torch >= 2.11): it compiles in half a second where
// torch/library.h takes more than ten, and a call runs no Python. Threads are torch's own pool: no second
// OpenMP runtime is loaded, whatever the compiler, and torch.set_num_threads governs every kernel unless
// ostinato_set_threads gave the kernels a number of their own.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

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

// A borrowed tensor; valid while the Call that it was read from lives.
struct Tensor {
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;
  const int64_t* sizes = nullptr;    // elements
  const int64_t* strides = nullptr;  // elements
  int64_t dim = 0;
  DType dtype = DType::float32;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
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

// An uninitialised contiguous CPU tensor, given to the caller with Call::give.
inline Tensor empty(const int64_t* sizes, int64_t dim, DType dtype) {
  int64_t strides[8];
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle handle;
  require_ok(aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype), 0, 0, &handle),
             "allocate a result");
  return describe(handle);
}

// One call of a boxed kernel. Arguments are read in the schema's order, each exactly once and all of them
// before the first check; what was read is released with this object, also when the kernel throws.
class Call {
 public:
  explicit Call(StableIValue* stack) : stack_(stack) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ~Call() {
    for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  }

  Tensor tensor() {
    auto handle = reinterpret_cast<AtenTensorHandle>(take());
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  // A `Tensor?` argument; its handle is null when it is None.
  Tensor optional_tensor() {
    auto* box = reinterpret_cast<StableIValue*>(take());
    if (box == nullptr) return Tensor{};
    auto handle = reinterpret_cast<AtenTensorHandle>(*box);
    delete box;
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  int64_t integer() { return static_cast<int64_t>(take()); }
  bool boolean() { return (take() & 0xff) != 0; }

  double number() {
    const uint64_t bits = take();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  std::string text() {
    auto handle = reinterpret_cast<StringHandle>(take());
    const char* characters;
    size_t length;
    torch_string_c_str(handle, &characters);
    torch_string_length(handle, &length);
    std::string value(characters, length);
    torch_delete_string(handle);
    return value;
  }

  // The kernel's only result; call it last.
  void give(const Tensor& result) { stack_[0] = reinterpret_cast<StableIValue>(result.handle); }

 private:
  uint64_t take() { return stack_[next_++]; }

  StableIValue* stack_;
  uint64_t next_ = 0;
  AtenTensorHandle tensors_[16];
  int num_tensors_ = 0;
};

using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// A kernel's entry in the list that install() walks; made by OSTINATO_KERNEL only.
struct Registration {
  Registration(const char* name, BoxedKernel kernel);
  const char* name;
  BoxedKernel kernel;
  Registration* next;
};

// Makes `kernel` the CPU implementation of `<namespace>::name` when the library is installed.
#define OSTINATO_KERNEL(name, kernel) static ostinato::Registration registration_of_##name(#name, kernel)

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

// OpenMP's own number of threads, which torch_parallel_for obeys. The engine sets it to 1 around small steps, so
// that loops which are not worth a barrier run on one thread; kernels decide for themselves and lift it while they
// run. The functions are those of the OpenMP runtime that torch has loaded; without one nothing is changed.
class ThreadsLifted {
 public:
  explicit ThreadsLifted(int count) {
    static const auto get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    static const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (get == nullptr || set == nullptr || get() >= count) return;
    set_ = set;
    before_ = get();
    set(count);
  }
  ThreadsLifted(const ThreadsLifted&) = delete;
  ThreadsLifted& operator=(const ThreadsLifted&) = delete;

  ~ThreadsLifted() {
    if (set_ != nullptr) set_(before_);
  }

 private:
  void (*set_)(int) = nullptr;
  int before_ = 0;
};

// Runs body(worker) for worker in [0, num_workers) on torch's threads and waits; workers may share a thread,
// so they must not wait for each other.
template <class Body>
void on_workers(int num_workers, Body&& body) {
  if (num_workers <= 1) {
    body(0);
    return;
  }
  auto trampoline = [](int64_t begin, int64_t end, void* context) {
    for (int64_t worker = begin; worker < end; ++worker) {
      (*static_cast<std::remove_reference_t<Body>*>(context))(static_cast<int>(worker));
    }
  };
  const ThreadsLifted lifted(num_threads());
  require_ok(torch_parallel_for(0, num_workers, 1, trampoline, &body), "run on its threads");
}

}  // namespace ostinato
