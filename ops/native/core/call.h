// One call of a kernel: its arguments, its results, its threads.
#pragma once

#include "core/arena.h"
#include "core/tensor.h"
#include "core/threads.h"

#include <cstddef>
#include <deque>
#include <initializer_list>
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
// also if the kernel throws. core/call.cpp has the functions, so that no kernel has its own copy of them.
class Call {
 public:
  explicit Call(StableIValue* stack) : threads_(Threads::of_caller()), stack_(stack) {}
  // `slots[i]` is the i-th tensor of the graph. Results go to the slots from `result` on.
  Call(const Argument* arguments, std::deque<OwnedTensor>& slots, Arena& arena, int64_t result, const Threads& threads)
      : threads_(threads), arguments_(arguments), slots_(&slots), arena_(&arena), result_(result) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ~Call();

  const Threads& threads() const { return threads_; }

  Tensor tensor();
  Tensor optional_tensor();  // a `Tensor?` argument
  int64_t integer();
  bool boolean();
  double number();
  std::string text();

  // Allocates the next result: an uninitialised contiguous CPU tensor. Called once for each result of the op, in order.
  Tensor empty(const int64_t* sizes, int64_t dim, DType dtype);

  // Memory that lasts until the call ends: 64-byte aligned, uninitialised.
  template <class T>
  T* workspace(int64_t count) {
    return static_cast<T*>(allocate(count * static_cast<int64_t>(sizeof(T))));
  }

  // Returns results that `empty` allocated. A kernel calls this last.
  void give(const Tensor& result) { give({result}); }
  void give(std::initializer_list<Tensor> results);

 private:
  void* allocate(int64_t bytes);
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
