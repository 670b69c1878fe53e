// One call of a kernel: its arguments, its results, its threads.
#pragma once

#include "core/arena.h"
#include "core/tensor.h"
#include "core/threads.h"

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <initializer_list>
#include <new>
#include <vector>

namespace ostinato {

// An argument of a call in a CpuGraph. abi.py defines the same layout in Python and compares the two.
struct Argument {
  enum Kind : int64_t { none, tensor, integer, number, text };
  Kind kind;
  int64_t integer_value;  // a tensor's slot; a boolean as 0 or 1
  double number_value;
  const char* text_value;
};
static_assert(sizeof(Argument) == 32 && offsetof(Argument, integer_value) == 8 &&
                  offsetof(Argument, number_value) == 16 && offsetof(Argument, text_value) == 24,
              "ctypes lays the fields of abi.py's Argument out one after the other, eight bytes each");

// One call of a kernel, made by torch's dispatcher or by a CpuGraph. The kernel reads the arguments in the schema's
// order, each exactly once, and all of them before its first check. This object releases the arguments that were read,
// also if the kernel throws.
class Call {
 public:
  explicit Call(StableIValue* stack) : threads_(Threads::of_caller()), stack_(stack) {}
  // `slots[i]` is the i-th tensor of the graph. Results go to the slots from `result` on.
  Call(const Argument* arguments, std::deque<OwnedTensor>& slots, Arena& arena, int64_t result, const Threads& threads)
      : threads_(threads), arguments_(arguments), slots_(&slots), arena_(&arena), result_(result) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ~Call() {
    for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
    for (void* memory : workspaces_) std::free(memory);
  }

  const Threads& threads() const { return threads_; }

  Tensor tensor() {
    if (arguments_ != nullptr) return (*slots_)[next_argument().integer_value].tensor;
    auto handle = reinterpret_cast<AtenTensorHandle>(next_value());
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  // A `Tensor?` argument.
  Tensor optional_tensor() {
    if (arguments_ != nullptr) {
      const Argument& argument = next_argument();
      return argument.kind == Argument::none ? Tensor{} : (*slots_)[argument.integer_value].tensor;
    }
    auto* box = reinterpret_cast<StableIValue*>(next_value());
    if (box == nullptr) return Tensor{};
    auto handle = reinterpret_cast<AtenTensorHandle>(*box);
    delete box;
    tensors_[num_tensors_++] = handle;
    return describe(handle);
  }

  int64_t integer() {
    return arguments_ != nullptr ? next_argument().integer_value : static_cast<int64_t>(next_value());
  }
  bool boolean() {
    return arguments_ != nullptr ? next_argument().integer_value != 0 : (next_value() & 0xff) != 0;
  }

  double number() {
    if (arguments_ != nullptr) return next_argument().number_value;
    const uint64_t bits = next_value();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  std::string text() {
    if (arguments_ != nullptr) return next_argument().text_value;
    auto handle = reinterpret_cast<StringHandle>(next_value());
    const char* characters;
    size_t length;
    torch_string_c_str(handle, &characters);
    torch_string_length(handle, &length);
    std::string value(characters, length);
    torch_delete_string(handle);
    return value;
  }

  // Allocates the next result: an uninitialised contiguous CPU tensor. Called once for each result of the op, in order.
  Tensor empty(const int64_t* sizes, int64_t dim, DType dtype) {
    if (arguments_ != nullptr) {
      OwnedTensor& result = (*slots_)[result_++];
      result.tensor.data = arena_->allocate(result.set_contiguous(sizes, dim, dtype));
      return result.tensor;
    }
    OwnedTensor shape;
    shape.set_contiguous(sizes, dim, dtype);
    AtenTensorHandle handle;
    require_ok(aoti_torch_empty_strided(dim, sizes, shape.strides, static_cast<int32_t>(dtype), 0, 0, &handle),
               "allocate a result");
    return describe(handle);
  }

  // Memory that lasts until the call ends: 64-byte aligned, uninitialised.
  template <class T>
  T* workspace(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (arguments_ != nullptr) return static_cast<T*>(arena_->allocate(bytes));
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (memory == nullptr) throw std::bad_alloc();
    workspaces_.push_back(memory);
    return static_cast<T*>(memory);
  }

  // Returns a result that `empty` allocated. A kernel calls this last.
  void give(const Tensor& result) { give({result}); }
  void give(std::initializer_list<Tensor> results) {
    if (stack_ == nullptr) return;
    int place = 0;
    for (const Tensor& result : results) stack_[place++] = reinterpret_cast<StableIValue>(result.handle);
  }

 private:
  uint64_t next_value() { return stack_[next_++]; }
  const Argument& next_argument() { return arguments_[next_++]; }

  Threads threads_;
  StableIValue* stack_ = nullptr;
  const Argument* arguments_ = nullptr;
  std::deque<OwnedTensor>* slots_ = nullptr;
  Arena* arena_ = nullptr;
  int64_t result_ = 0;  // slot of the next result
  uint64_t next_ = 0;
  AtenTensorHandle tensors_[16];
  int num_tensors_ = 0;
  std::vector<void*> workspaces_;
};

}  // namespace ostinato
