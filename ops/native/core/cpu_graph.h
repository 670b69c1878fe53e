// A recorded list of kernel calls, replayed without Python or torch's dispatcher.
//
// A decode step of a small model spends as much time between its kernels as in them: a call through Python and the
// dispatcher costs microseconds, and a layer makes nine calls and some views. graphs/compiler/cpu_capture.py records
// the calls of the layers' programs, with weights and caches at fixed addresses. A replay walks the list, as a replay
// of a CUDA graph does on a GPU. Unlike in a CUDA graph, sizes stay symbolic: the sizes of the inputs follow from a
// step's numbers of tokens, sequences and rows that need logits.
//
// The list also has calls of the torch ops between our kernels. AOTInductor compiled these ops into libraries.
//
// Two arenas hold the results of alternating layers. So layer n + 2 overwrites the results of layer n.
#pragma once

#include "core/kernel.h"

#include <algorithm>
#include <vector>

namespace ostinato {

// Sizes of inputs that differ from step to step. abi.py has the same codes and compares them with these.
enum SymbolicSize : int64_t { tokens = -1, seqs = -2, seqs_and_one = -3, rows = -4 };

// The sizes of a step, and whether torch's profiler records its kernels.
struct ReplayOptions {
  int64_t num_tokens, num_seqs, num_rows;
  bool profile;
};

// AOTInductorModelContainerRunSingleThreaded of a library that AOTInductor made. It takes over the handles of the
// inputs, and the caller owns the handles of the outputs.
using CompiledEntry = int32_t (*)(void* container, AtenTensorHandle* inputs, size_t num_inputs,
                                  AtenTensorHandle* outputs, size_t num_outputs, void* stream, void* proxy_executor);

class CpuGraph {
 public:
  CpuGraph() = default;
  CpuGraph(const CpuGraph&) = delete;
  CpuGraph& operator=(const CpuGraph&) = delete;
  ~CpuGraph() {
    for (int arena = 0; arena < 2; ++arena) release_handles(arena);
  }

  // Adds a constant or an input, and returns its slot. A size of an input may be a SymbolicSize.
  int64_t add_tensor(void* data, DType dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
    OwnedTensor& slot = new_slot();
    slot.set_contiguous(sizes, dim, dtype);
    if (strides != nullptr) std::copy(strides, strides + dim, slot.strides);
    slot.tensor.data = data;
    return last_slot();
  }

  int64_t add_input(DType dtype, int64_t dim, const int64_t* sizes) {
    const int64_t slot = add_tensor(nullptr, dtype, dim, sizes, nullptr);
    inputs_.push_back(slot);
    input_sizes_.insert(input_sizes_.end(), sizes, sizes + dim);
    return slot;
  }

  // `name` is what torch's profiler shows. Returns the slot of the first result; the others follow.
  int64_t add_call(Kernel kernel, const char* name, const Argument* arguments, int64_t count, int64_t num_results) {
    Step step{Step::call};
    step.kernel = kernel;
    step.name = keep_text(name);
    step.first_argument = arguments_.size();
    for (int64_t i = 0; i < count; ++i) {
      arguments_.push_back(arguments[i]);
      if (arguments[i].kind == Argument::text) arguments_.back().text_value = keep_text(arguments[i].text_value);
    }
    const int64_t first = add_result(step);
    for (int64_t i = 1; i < num_results; ++i) new_slot();
    return first;
  }

  // Calls a compiled library. Returns the slot of its first output; the others follow.
  int64_t add_compiled(CompiledEntry entry, void* container, const char* name, const int64_t* inputs,
                       int64_t num_inputs, int64_t num_outputs) {
    OSTINATO_CHECK(num_inputs <= kMaxCompiledTensors && num_outputs <= kMaxCompiledTensors,
                   "a compiled library has at most 32 inputs and 32 outputs");
    Step step{Step::compiled};
    step.entry = entry;
    step.container = container;
    step.name = keep_text(name);
    step.first_argument = compiled_inputs_.size();
    compiled_inputs_.insert(compiled_inputs_.end(), inputs, inputs + num_inputs);
    step.sizes[0] = num_inputs;
    step.sizes[1] = num_outputs;
    step.result = last_slot() + 1;
    for (int64_t i = 0; i < num_outputs; ++i) new_slot();
    steps_.push_back(step);
    return step.result;
  }

  // A tensor with other sizes, of which one may be -1. Each row must be contiguous. If the number of rows changes and
  // the rows do not lie side by side, they are copied.
  int64_t add_view(int64_t source, const int64_t* sizes, int64_t dim) {
    Step step{Step::view};
    step.source = source;
    step.dim = dim;
    std::copy(sizes, sizes + dim, step.sizes);
    return add_result(step);
  }

  // Indices [first, first + length) of dimension 1, not copied.
  int64_t add_slice(int64_t source, int64_t first, int64_t length) {
    Step step{Step::slice};
    step.source = source;
    step.other = first;
    step.sizes[0] = length;
    return add_result(step);
  }

  // Rows of a matrix, copied.
  int64_t add_index_select(int64_t matrix, int64_t row_numbers) {
    Step step{Step::index_select};
    step.source = matrix;
    step.other = row_numbers;
    return add_result(step);
  }

  void begin_layer() { steps_.push_back(Step{Step::layer}); }

  void set_result(int64_t slot) { result_ = slot; }

  // Runs all calls on the threads that the calling thread has chosen, and copies the result to `out`.
  void replay(const ReplayOptions& options, void* const* inputs, void* out) {
    bind_inputs(options, inputs);
    const Threads threads = Threads::of_caller();
    for (const Step& step : steps_) run(step, threads, options.profile);
    const Tensor& result = slots_[result_].tensor;
    OSTINATO_CHECK(is_contiguous(result), "the result of a CPU graph must be contiguous");
    std::memcpy(out, result.data, result.num_bytes());
  }

 private:
  static constexpr int64_t kMaxCompiledTensors = 32;

  struct Step {
    enum Kind { layer, call, compiled, view, slice, index_select };
    Kind kind;
    int64_t result = 0;  // slot of the first result
    int64_t source = 0;  // slot of the tensor to view, to slice or to select rows from
    int64_t other = 0;   // slice: first index in dimension 1; index_select: slot of the row numbers
    // view: the shape, one size may be -1; slice: the length; compiled: the numbers of inputs and outputs.
    int64_t sizes[kMaxRank] = {};
    int64_t dim = 0;
    Kernel kernel = nullptr;
    CompiledEntry entry = nullptr;
    void* container = nullptr;
    const char* name = nullptr;
    size_t first_argument = 0;  // in arguments_ or compiled_inputs_
  };

  OwnedTensor& new_slot() { return slots_.emplace_back(); }
  int64_t last_slot() const { return static_cast<int64_t>(slots_.size()) - 1; }
  const char* keep_text(const char* text) { return texts_.emplace_back(text).c_str(); }

  int64_t add_result(Step& step) {
    new_slot();
    step.result = last_slot();
    steps_.push_back(step);
    return step.result;
  }

  void bind_inputs(const ReplayOptions& options, void* const* inputs) {
    const int64_t* written = input_sizes_.data();
    for (size_t i = 0; i < inputs_.size(); ++i) {
      OwnedTensor& slot = slots_[inputs_[i]];
      int64_t sizes[kMaxRank];
      for (int64_t d = 0; d < slot.tensor.dim; ++d, ++written) {
        sizes[d] = *written == tokens         ? options.num_tokens
                   : *written == seqs         ? options.num_seqs
                   : *written == seqs_and_one ? options.num_seqs + 1
                   : *written == rows         ? options.num_rows
                                              : *written;
      }
      slot.set_contiguous(sizes, slot.tensor.dim, slot.tensor.dtype);
      slot.tensor.data = inputs[i];
    }
  }

  void run(const Step& step, const Threads& threads, bool profile) {
    if (step.kind == Step::layer) {
      arena_ = (arena_ + 1) % 2;
      arenas_[arena_].reset();
      release_handles(arena_);
      return;
    }
    OwnedTensor& result = slots_[step.result];
    if (step.kind == Step::call || step.kind == Step::compiled) {
      const Recorded recorded(profile ? step.name : nullptr);
      if (step.kind == Step::compiled) {
        run_compiled(step);
        return;
      }
      Call call(arguments_.data() + step.first_argument, slots_, arenas_[arena_], step.result, threads);
      step.kernel(call);
    } else if (step.kind == Step::view) {
      view(slots_[step.source].tensor, step, result);
    } else if (step.kind == Step::slice) {
      slice(slots_[step.source].tensor, step, result);
    } else {
      index_select(slots_[step.source].tensor, slots_[step.other].tensor, result);
    }
  }

  void run_compiled(const Step& step) {
    AtenTensorHandle inputs[kMaxCompiledTensors];
    AtenTensorHandle outputs[kMaxCompiledTensors];
    for (int64_t i = 0; i < step.sizes[0]; ++i) {
      const Tensor& x = slots_[compiled_inputs_[step.first_argument + i]].tensor;
      require_ok(aoti_torch_create_tensor_from_blob(x.data, x.dim, x.sizes, x.strides, 0,
                                                    static_cast<int32_t>(x.dtype), 0, 0, &inputs[i]),
                 "describe an input of compiled code");
    }
    require_ok(step.entry(step.container, inputs, step.sizes[0], outputs, step.sizes[1], nullptr, nullptr),
               "run compiled code");
    for (int64_t i = 0; i < step.sizes[1]; ++i) {
      handles_[arena_].push_back(outputs[i]);
      const Tensor described = describe(outputs[i]);
      OwnedTensor& slot = slots_[step.result + i];
      slot.set_contiguous(described.sizes, described.dim, described.dtype);
      std::copy(described.strides, described.strides + described.dim, slot.strides);
      slot.tensor.data = described.data;
    }
  }

  void release_handles(int arena) {
    for (AtenTensorHandle handle : handles_[arena]) aoti_torch_delete_tensor_object(handle);
    handles_[arena].clear();
  }

  // A record of torch's profiler. It also ends if the kernel throws. Without a name nothing is recorded.
  struct Recorded {
    explicit Recorded(const char* name) {
      if (name != nullptr) {
        require_ok(aoti_record_function_start(name, nullptr, nullptr, 0, &handle), "record a kernel");
      }
    }
    ~Recorded() {
      if (handle != nullptr) aoti_record_function_end(handle);
    }
    AtenRecordFunctionHandle handle = nullptr;
  };

  void view(const Tensor& source, const Step& step, OwnedTensor& result) {
    int64_t sizes[kMaxRank];
    int64_t known = 1;
    for (int64_t d = 0; d < step.dim; ++d) known *= step.sizes[d] < 0 ? 1 : step.sizes[d];
    for (int64_t d = 0; d < step.dim; ++d) {
      sizes[d] = step.sizes[d] < 0 ? source.num_elements() / known : step.sizes[d];
    }
    const int64_t num_bytes = result.set_contiguous(sizes, step.dim, source.dtype);
    result.tensor.data = source.data;
    if (is_contiguous(source)) return;
    OSTINATO_CHECK(is_contiguous(source, 1), "a CPU graph can view only tensors whose rows are contiguous");
    if (sizes[0] == source.sizes[0]) {
      result.strides[0] = source.strides[0];
      return;
    }
    const int64_t row_bytes = source.num_bytes() / source.sizes[0];
    result.tensor.data = arenas_[arena_].allocate(num_bytes);
    for (int64_t row = 0; row < source.sizes[0]; ++row) {
      std::memcpy(result.tensor.as<char>() + row * row_bytes,
                  source.as<char>() + row * source.strides[0] * element_size(source.dtype), row_bytes);
    }
  }

  static void slice(const Tensor& source, const Step& step, OwnedTensor& result) {
    int64_t sizes[kMaxRank];
    std::copy(source.sizes, source.sizes + source.dim, sizes);
    sizes[1] = step.sizes[0];
    result.set_contiguous(sizes, source.dim, source.dtype);
    std::copy(source.strides, source.strides + source.dim, result.strides);
    result.tensor.data = source.as<char>() + step.other * source.strides[1] * element_size(source.dtype);
  }

  void index_select(const Tensor& matrix, const Tensor& row_numbers, OwnedTensor& result) {
    const int64_t sizes[] = {row_numbers.sizes[0], matrix.sizes[1]};
    result.tensor.data = arenas_[arena_].allocate(result.set_contiguous(sizes, 2, matrix.dtype));
    const int64_t row_bytes = sizes[1] * element_size(matrix.dtype);
    for (int64_t i = 0; i < sizes[0]; ++i) {
      const int64_t row = row_numbers.as<int64_t>()[i];
      OSTINATO_CHECK(row >= 0 && row < matrix.sizes[0], "a wanted row must be one of the step's tokens");
      std::memcpy(result.tensor.as<char>() + i * row_bytes,
                  matrix.as<char>() + row * matrix.strides[0] * element_size(matrix.dtype), row_bytes);
    }
  }

  std::deque<OwnedTensor> slots_;  // a deque, because a vector moves its elements and views point into them
  std::vector<int64_t> inputs_;
  std::vector<int64_t> input_sizes_;
  std::vector<Step> steps_;
  std::vector<Argument> arguments_;
  std::deque<std::string> texts_;
  std::vector<int64_t> compiled_inputs_;  // slots
  Arena arenas_[2];
  std::vector<AtenTensorHandle> handles_[2];  // results of compiled libraries, released like the arenas
  int arena_ = 0;
  int64_t result_ = 0;
};

}  // namespace ostinato
