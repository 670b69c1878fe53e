// Recorded calls of kernels, played back without Python or torch's dispatcher.
//
// A decode step of a small model spends as much time between its kernels as in them: a call through Python and the
// dispatcher costs microseconds, and a layer makes nine and some views. graphs/tape.py records what the layers' programs
// call, with weights and caches at their fixed places; here the list is walked. It is to a CPU what a CUDA graph is to a
// GPU, except that sizes stay free: those of the inputs follow from a step's tokens, sequences and wanted rows.
//
// Results of a layer are dead when the next but one begins, so two arenas in turns hold them.
#include "binding.h"

#include <algorithm>

namespace ostinato::tape {

// Sizes of inputs that a step decides.
enum FreeSize : int64_t { tokens = -1, seqs = -2, seqs_and_one = -3, rows = -4 };

struct Step {
  enum Kind { layer, call, view, part, gather };
  Kind kind;
  int64_t result = 0;               // slot
  int64_t source = 0;               // slot: of a view, a part, a matrix to gather from
  int64_t other = 0;                // of a part the first index of dimension 1, of a gather the slot of row numbers
  int64_t sizes[kMaxRank] = {};     // of a view, one may be -1; of a part its length
  int64_t dim = 0;
  Kernel kernel = nullptr;
  size_t first_argument = 0;
};

class Tape {
 public:
  // Constants and inputs are slots too; `sizes` of inputs may be a FreeSize.
  int64_t add_tensor(void* data, DType dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
    OwnTensor& slot = new_slot();
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

  int64_t add_call(Kernel kernel, const Argument* arguments, int64_t count) {
    Step step{Step::call};
    step.kernel = kernel;
    step.first_argument = arguments_.size();
    for (int64_t i = 0; i < count; ++i) {
      arguments_.push_back(arguments[i]);
      if (arguments[i].kind == Argument::text) {
        texts_.emplace_back(arguments[i].characters);
        arguments_.back().characters = texts_.back().c_str();
      }
    }
    return add_result(step);
  }

  int64_t add_view(int64_t source, const int64_t* sizes, int64_t dim) {
    Step step{Step::view};
    step.source = source;
    step.dim = dim;
    std::copy(sizes, sizes + dim, step.sizes);
    return add_result(step);
  }

  // Indices [first, first + length) of dimension 1.
  int64_t add_part(int64_t source, int64_t first, int64_t length) {
    Step step{Step::part};
    step.source = source;
    step.other = first;
    step.sizes[0] = length;
    return add_result(step);
  }

  int64_t add_gather(int64_t row_numbers, int64_t matrix) {
    Step step{Step::gather};
    step.source = matrix;
    step.other = row_numbers;
    return add_result(step);
  }

  void begin_layer() { steps_.push_back(Step{Step::layer}); }

  void set_result(int64_t slot) { result_ = slot; }

  void play(int64_t num_tokens, int64_t num_seqs, int64_t num_rows, void* const* inputs, void* out) {
    bind_inputs(num_tokens, num_seqs, num_rows, inputs);
    for (const Step& step : steps_) run(step);
    const Tensor& result = slots_[result_].tensor;
    std::memcpy(out, result.data, bytes_of(result));
  }

 private:
  OwnTensor& new_slot() { return slots_.emplace_back(); }
  int64_t last_slot() const { return static_cast<int64_t>(slots_.size()) - 1; }

  int64_t add_result(Step& step) {
    new_slot();
    step.result = last_slot();
    steps_.push_back(step);
    return step.result;
  }

  static int64_t count_elements(const Tensor& tensor) {
    int64_t count = 1;
    for (int64_t i = 0; i < tensor.dim; ++i) count *= tensor.sizes[i];
    return count;
  }

  static int64_t bytes_of(const Tensor& tensor) { return count_elements(tensor) * element_size(tensor.dtype); }

  void bind_inputs(int64_t num_tokens, int64_t num_seqs, int64_t num_rows, void* const* inputs) {
    const int64_t* written = input_sizes_.data();
    for (size_t i = 0; i < inputs_.size(); ++i) {
      OwnTensor& slot = slots_[inputs_[i]];
      int64_t sizes[kMaxRank];
      for (int64_t d = 0; d < slot.tensor.dim; ++d, ++written) {
        sizes[d] = *written == tokens         ? num_tokens
                   : *written == seqs         ? num_seqs
                   : *written == seqs_and_one ? num_seqs + 1
                   : *written == rows         ? num_rows
                                              : *written;
      }
      slot.set_contiguous(sizes, slot.tensor.dim, slot.tensor.dtype);
      slot.tensor.data = inputs[i];
    }
  }

  void run(const Step& step) {
    if (step.kind == Step::layer) {
      arena_ = (arena_ + 1) % 2;
      arenas_[arena_].reset();
      return;
    }
    OwnTensor& result = slots_[step.result];
    if (step.kind == Step::call) {
      Call call(arguments_.data() + step.first_argument, slots_, arenas_[arena_], result);
      step.kernel(call);
    } else if (step.kind == Step::view) {
      view(slots_[step.source].tensor, step, result);
    } else if (step.kind == Step::part) {
      part(slots_[step.source].tensor, step, result);
    } else {
      gather(slots_[step.other].tensor, slots_[step.source].tensor, result);
    }
  }

  static void view(const Tensor& source, const Step& step, OwnTensor& result) {
    int64_t sizes[kMaxRank];
    int64_t known = 1;
    for (int64_t d = 0; d < step.dim; ++d) known *= step.sizes[d] < 0 ? 1 : step.sizes[d];
    for (int64_t d = 0; d < step.dim; ++d) {
      sizes[d] = step.sizes[d] < 0 ? count_elements(source) / known : step.sizes[d];
    }
    result.set_contiguous(sizes, step.dim, source.dtype);
    result.tensor.data = source.data;
  }

  static void part(const Tensor& source, const Step& step, OwnTensor& result) {
    int64_t sizes[kMaxRank];
    std::copy(source.sizes, source.sizes + source.dim, sizes);
    sizes[1] = step.sizes[0];
    result.set_contiguous(sizes, source.dim, source.dtype);
    std::copy(source.strides, source.strides + source.dim, result.strides);
    result.tensor.data = source.as<char>() + step.other * source.strides[1] * element_size(source.dtype);
  }

  void gather(const Tensor& row_numbers, const Tensor& matrix, OwnTensor& result) {
    const int64_t sizes[] = {row_numbers.sizes[0], matrix.sizes[1]};
    result.tensor.data = arenas_[arena_].take(result.set_contiguous(sizes, 2, matrix.dtype));
    const int64_t row_bytes = sizes[1] * element_size(matrix.dtype);
    for (int64_t i = 0; i < sizes[0]; ++i) {
      const int64_t row = row_numbers.as<int64_t>()[i];
      OSTINATO_CHECK(row >= 0 && row < matrix.sizes[0], "a wanted row must be one of the step's tokens");
      std::memcpy(result.tensor.as<char>() + i * row_bytes,
                  matrix.as<char>() + row * matrix.strides[0] * element_size(matrix.dtype), row_bytes);
    }
  }

  std::deque<OwnTensor> slots_;  // views point into them: no vector, which moves its elements
  std::vector<int64_t> inputs_;
  std::vector<int64_t> input_sizes_;
  std::vector<Step> steps_;
  std::vector<Argument> arguments_;
  std::deque<std::string> texts_;
  Arena arenas_[2];
  int arena_ = 0;
  int64_t result_ = 0;
};

// What the last failed call on this thread was about.
inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

}  // namespace ostinato::tape

#define OSTINATO_TAPE_FUNCTION extern "C" __attribute__((visibility("default")))

using ostinato::tape::Tape;

OSTINATO_TAPE_FUNCTION Tape* ostinato_tape_new() { return new Tape; }
OSTINATO_TAPE_FUNCTION void ostinato_tape_delete(Tape* tape) { delete tape; }
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_constant(Tape* tape, void* data, int32_t dtype, int64_t dim,
                                                      const int64_t* sizes, const int64_t* strides) {
  return tape->add_tensor(data, static_cast<ostinato::DType>(dtype), dim, sizes, strides);
}
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_input(Tape* tape, int32_t dtype, int64_t dim, const int64_t* sizes) {
  return tape->add_input(static_cast<ostinato::DType>(dtype), dim, sizes);
}
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_call(Tape* tape, ostinato::Kernel kernel,
                                                  const ostinato::Argument* arguments, int64_t count) {
  return tape->add_call(kernel, arguments, count);
}
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_view(Tape* tape, int64_t source, const int64_t* sizes, int64_t dim) {
  return tape->add_view(source, sizes, dim);
}
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_part(Tape* tape, int64_t source, int64_t first, int64_t length) {
  return tape->add_part(source, first, length);
}
OSTINATO_TAPE_FUNCTION int64_t ostinato_tape_gather(Tape* tape, int64_t row_numbers, int64_t matrix) {
  return tape->add_gather(row_numbers, matrix);
}
OSTINATO_TAPE_FUNCTION void ostinato_tape_begin_layer(Tape* tape) { tape->begin_layer(); }
OSTINATO_TAPE_FUNCTION void ostinato_tape_result(Tape* tape, int64_t slot) { tape->set_result(slot); }

// Returns null, or why it failed.
OSTINATO_TAPE_FUNCTION const char* ostinato_tape_play(Tape* tape, int64_t num_tokens, int64_t num_seqs, int64_t num_rows,
                                                      void* const* inputs, void* out) {
  try {
    tape->play(num_tokens, num_seqs, num_rows, inputs, out);
    return nullptr;
  } catch (const std::exception& error) {
    ostinato::tape::last_error() = error.what();
    return ostinato::tape::last_error().c_str();
  }
}
