// Tensors as kernels see them: address, dtype, sizes and strides, without torch's C++ headers.
//
// No header of torch is included: torch/library.h takes more than ten seconds to compile.
#pragma once

#include "core/torch_abi.h"

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>

namespace ostinato {

// A text or a number of an error's message. The text is borrowed.
struct MessagePart {
  MessagePart(const char* text) : text(text) {}
  MessagePart(const std::string& text) : text(text.c_str()) {}
  MessagePart(int64_t number) : text(nullptr), number(number) {}

  const char* text;  // null = the number
  int64_t number = 0;
};

// These throw. They are not inlined: a kernel has up to twenty checks. With the reading of arguments (core/call.cpp),
// the code that puts messages together was a seventh of a library.
[[noreturn]] void throw_invalid_argument(std::initializer_list<MessagePart> message);
[[noreturn]] void throw_torch_failed(const char* what);

inline void require_ok(AOTITorchError code, const char* what) {
  if (code != 0) throw_torch_failed(what);
}

// OSTINATO_CHECK(condition, message...) throws std::invalid_argument, which reaches Python as a ValueError. The message
// consists of texts and integers.
#define OSTINATO_CHECK(condition, ...)                                   \
  do {                                                                   \
    if (!(condition)) ::ostinato::throw_invalid_argument({__VA_ARGS__}); \
  } while (0)

// torch's codes of the dtypes that kernels take. abi.py compares them with the codes of torch and with its own.
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

// A borrowed tensor, valid until the Call from which it was read ends. If the argument is None, no field is set.
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

  int64_t num_elements() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dim; ++i) count *= sizes[i];
    return count;
  }
  int64_t num_bytes() const { return num_elements() * element_size(dtype); }
};

constexpr int kMaxRank = 5;  // for results of kernels and tensors of a CpuGraph

// A tensor that holds its own sizes and strides.
struct OwnedTensor {
  OwnedTensor() = default;
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  // Sets everything but the memory. Returns the number of bytes that the tensor takes.
  int64_t set_contiguous(const int64_t* new_sizes, int64_t dim, DType dtype);

  Tensor tensor;
  int64_t sizes[kMaxRank];
  int64_t strides[kMaxRank];
};

// Whether the elements of each index of the first `from` dimensions lie side by side, in order. With from = 1, the rows
// of a matrix are contiguous.
bool is_contiguous(const Tensor& x, int64_t from = 0);

// Address, sizes, strides and dtype of a torch tensor.
Tensor describe(AtenTensorHandle handle);

}  // namespace ostinato
