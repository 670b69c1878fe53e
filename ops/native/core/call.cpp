// The functions of Call, Tensor and Threads, and the errors of kernels.
#include "core/call.h"

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace ostinato {

void throw_invalid_argument(std::initializer_list<MessagePart> message) {
  std::string text;
  for (const MessagePart& part : message) text += part.text != nullptr ? part.text : std::to_string(part.number);
  throw std::invalid_argument(text);
}

void throw_torch_failed(const char* what) {
  throw std::runtime_error(std::string("ostinato native: torch failed to ") + what);
}

int64_t OwnedTensor::set_contiguous(const int64_t* new_sizes, int64_t dim, DType dtype) {
  OSTINATO_CHECK(dim <= kMaxRank, "results have at most 5 dimensions");
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

bool is_contiguous(const Tensor& x, int64_t from) {
  int64_t stride = 1;
  for (int64_t i = x.dim; i-- > from;) {
    if (x.sizes[i] > 1 && x.strides[i] != stride) return false;
    stride *= x.sizes[i];
  }
  return true;
}

Tensor describe(AtenTensorHandle handle) {
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

Threads Threads::of_caller() {
  Threads threads;
  const ThreadState& state = *thread_state();
  threads.count_ = state.num_pool_threads();
  if (threads.count_ > 0) {
    threads.pool_ = state.pool;
    return threads;
  }
  uint32_t count;
  require_ok(torch_get_num_threads(&count), "read the number of threads");
  threads.count_ = static_cast<int>(count);
  return threads;
}

void Threads::run_parts(int num_workers, ThreadPool::Part part, void* context) const {
  if (num_workers <= 1) return part(context, 0);
  if (pool_ != nullptr) return pool_->run(num_workers, part, context);
  struct Parts {
    ThreadPool::Part part;
    void* context;
  } parts{part, context};
  const auto run_range = [](int64_t begin, int64_t end, void* range_context) {
    const Parts& all = *static_cast<Parts*>(range_context);
    for (int64_t worker = begin; worker < end; ++worker) all.part(all.context, static_cast<int>(worker));
  };
  require_ok(torch_parallel_for(0, num_workers, 1, run_range, &parts), "run on its threads");
}

Call::~Call() {
  for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  for (void* memory : workspaces_) std::free(memory);
}

Tensor Call::tensor() {
  if (arguments_ != nullptr) return (*slots_)[next_argument().integer_value].tensor;
  auto handle = reinterpret_cast<AtenTensorHandle>(next_value());
  tensors_[num_tensors_++] = handle;
  return describe(handle);
}

Tensor Call::optional_tensor() {
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

int64_t Call::integer() {
  return arguments_ != nullptr ? next_argument().integer_value : static_cast<int64_t>(next_value());
}

bool Call::boolean() {
  return arguments_ != nullptr ? next_argument().integer_value != 0 : (next_value() & 0xff) != 0;
}

double Call::number() {
  if (arguments_ != nullptr) return next_argument().number_value;
  const uint64_t bits = next_value();
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::string Call::text() {
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

Tensor Call::empty(const int64_t* sizes, int64_t dim, DType dtype) {
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

void* Call::allocate(int64_t bytes) {
  if (arguments_ != nullptr) return arena_->allocate(bytes);
  void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (memory == nullptr) throw std::bad_alloc();
  workspaces_.push_back(memory);
  return memory;
}

void Call::give(std::initializer_list<Tensor> results) {
  if (stack_ == nullptr) return;
  int place = 0;
  for (const Tensor& result : results) stack_[place++] = reinterpret_cast<StableIValue>(result.handle);
}

}  // namespace ostinato
