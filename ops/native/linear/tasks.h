// Shared by the linear ops for all layouts of weights: a call's arguments, its division into tasks, the epilogue, and
// memory.
//
// A call is cut into tasks of one weight panel times one group of row blocks. A few rows are one group, so the weights
// are read once. Many rows are divided into groups whose activations stay in a core's second level cache while the
// panels are read (the loop order of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
// Each worker owns a contiguous range of tasks, hence of memory. When its tasks are done, it takes tasks of other
// workers. Which worker computes an element does not change its value.
//
// Each worker packs the activations of its own groups. A group that several workers share is packed by each of them.
// That costs less than the barrier that one packed copy would need.
#pragma once

#include "core/aligned_memory.h"
#include "core/division.h"
#include "core/huge_pages.h"
#include "core/simd.h"
#include "linear/layout.h"
#include "rows/activation_functions.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace ostinato::linear {

// Packed activations of a group: less than the second level cache, which has 1 MiB or more in the servers with AVX-512 on which this was measured.
constexpr int64_t kGroupBytes = (OSTINATO_ISA >= 2 ? 768 : 384) << 10;
constexpr int64_t kMaxGroupRows = 256;
constexpr int64_t kTrafficPerWorker = 96 << 10;  // bytes of cache traffic for which waking one more thread pays
constexpr int64_t kTrafficAtOnce = 48 << 10;     // bytes of cache traffic of the tasks that a worker takes at once
constexpr int64_t kStreamedBytes = 512 << 10;    // results of this size and above are streamed, see Problem::streams
constexpr int64_t kConvertedBytesPerWorker = 64 << 10;  // bytes to convert or copy for which one more worker pays

// Memory of the calling thread that grows and is kept: fresh pages every step would cost more than packing does.
inline float* scratch(int64_t floats) {
  thread_local AlignedMemory memory;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    const int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
    const int64_t page = bytes < kHugePage / 2 ? 4096 : kHugePage;
    const int64_t size = round_up(bytes, page);
    capacity = 0;  // if the allocation fails, the next call tries again
    memory.allocate(page, size);
    capacity = size / static_cast<int64_t>(sizeof(float));
    prefer_huge_pages(memory.data(), size);
  }
  return static_cast<float*>(memory.data());
}

// Divides parts that are converted to another layout or copied, `bytes` in all. What is left over after whole multiples
// of kConvertedBytesPerWorker has a worker too.
inline Division divide_conversion(const Threads& threads, NumParts parts, int64_t bytes) {
  return divide<kConvertedBytesPerWorker>(threads, parts, bytes + kConvertedBytesPerWorker);
}

// Runs all tasks. Each worker calls make_body() once, and then calls the returned function for every task that it
// takes. It takes `at_once` tasks with one atomic operation, which waits until the results of the tasks before it have
// left the store buffer: that takes as long as a small task.
template <class MakeBody>
void for_each_task(const Division& tasks, const MakeBody& make_body, int64_t at_once = 1) {
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Range> ranges(tasks.num_workers);
  for (int w = 0; w < tasks.num_workers; ++w) {
    ranges[w].next = tasks.begin(w);
    ranges[w].end = tasks.end(w);
  }
  tasks.threads.run(tasks.num_workers, [&](int worker) {
    auto body = make_body();
    for (int i = 0; i < tasks.num_workers; ++i) {
      Range& range = ranges[(worker + i) % tasks.num_workers];
      int64_t task;
      while ((task = range.next.fetch_add(at_once, std::memory_order_relaxed)) < range.end) {
        for (const int64_t last = std::min(task + at_once, range.end); task < last; ++task) body(task);
      }
    }
  });
}

// A call's arguments and result besides the weight.
struct Problem {
  const void* x;
  int64_t row_stride;  // elements of x
  int64_t rows;
  int64_t in_features;
  const void* bias;      // null for none
  const void* residual;  // null for none; else rows of the output's type
  int64_t residual_stride;
  int64_t out_features;
  void* out;
  Threads threads;
  const int32_t* out_rows = nullptr;  // for each row of x, the row of `out` for its result; null = the same row
  // for each column of the weight, the element of x that it multiplies; null = the same
  const int32_t* order = nullptr;
  // If not null, the result is activation(x * gates) * (x * factors). The weight of the call is the first half of a
  // matrix: the gates. As many panels of factors follow. `bias` has the biases of the gates and then of the factors.
  const activation::Activation* gated = nullptr;
  // Whole cache lines of the result are written to memory without being read first. A panel writes one line of each
  // row. The lines are a row apart, so the processor does not prefetch them, and a matrix unit that waits for them
  // loses a third of its rate (6144 columns of 512 rows). A worker that streams calls `fence_lines` at its end.
  bool streams = false;

  int64_t out_row(int64_t row) const { return out_rows == nullptr ? row : out_rows[row]; }
};

// Returns `problem` with `streams` set if the result is large, its rows begin at cache lines, and there is no residual,
// which would have to be read.
template <class Out>
Problem streamed(Problem problem) {
  const int64_t row_bytes = problem.out_features * static_cast<int64_t>(sizeof(Out));
  problem.streams = problem.residual == nullptr && row_bytes % 64 == 0 && problem.rows * row_bytes >= kStreamedBytes;
  return problem;
}

inline void check_bias(const Tensor& bias, const Tensor& x, int64_t out_features) {
  OSTINATO_CHECK(!bias.exists() || (bias.dtype == x.dtype && bias.dim == 1 && bias.sizes[0] == out_features &&
                                    is_contiguous(bias)),
                 "bias must be a contiguous vector of out_features values in x's dtype");
}

// The checked problem. `out` receives the result tensor of the call.
inline Problem make_problem(Call& call, const Tensor& x, const Tensor& bias, const Tensor& residual, int64_t out_features,
                            bool float32_output, Tensor& out) {
  check_bias(bias, x, out_features);
  if (residual.exists()) {
    OSTINATO_CHECK(!float32_output && residual.dtype == x.dtype && residual.dim == 2 &&
                       residual.sizes[0] == x.sizes[0] && residual.sizes[1] == out_features &&
                       is_contiguous(residual, 1),
                   "residual must be [T, out_features] in x's dtype with contiguous rows, without float32_output");
  }
  const int64_t sizes[] = {x.sizes[0], out_features};
  out = call.empty(sizes, 2, float32_output ? DType::float32 : x.dtype);
  return {x.data,        x.strides[0],
          x.sizes[0],    x.sizes[1],
          bias.data,     residual.data,
          !residual.exists() ? 0 : residual.strides[0],
          out_features,  out.data,
          call.threads()};
}

// Rows [0, rows) cut into `count` blocks of nearly equal height.
struct RowBlocks {
  RowBlocks(int64_t rows, int64_t max_rows) : rows(rows), count(ceil_divide(rows, max_rows)) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
  int height(int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
  int64_t rows;
  int64_t count;
};

// Row blocks of at most `max_rows` rows, divided into groups of nearly equal size. A packed row takes `row_bytes`.
struct RowGroups {
  RowGroups(int64_t rows, int64_t max_rows, int64_t row_bytes) : blocks(rows, max_rows) {
    const int64_t block_bytes = std::max<int64_t>(row_bytes * max_rows, 1);
    const int64_t fitting = std::min(kGroupBytes / block_bytes, kMaxGroupRows / max_rows);
    num_groups = ceil_divide(blocks.count, std::max<int64_t>(fitting, 1));
  }
  int64_t num_blocks() const { return blocks.count; }
  int64_t first_block(int64_t group) const { return blocks.count * group / num_groups; }
  int64_t first_row(int64_t group) const { return blocks.begin(first_block(group)); }
  RowBlocks blocks;
  int64_t num_groups;
};

// Runs tasks of one panel times one group of rows. Consecutive tasks of a group pack its activations once.
template <class Worker>
class PanelTasks {
 public:
  template <class Weight, class Groups>
  PanelTasks(const Problem& problem, const Weight& weight, const Groups& groups)
      : worker_(problem, weight, groups), panels_(weight.panels) {}

  void operator()(int64_t task) {
    const int64_t group = task / panels_;
    if (group != packed_group_) worker_.pack(group);
    packed_group_ = group;
    worker_.multiply(group, task % panels_);
  }

 private:
  Worker worker_;
  const int64_t panels_;
  int64_t packed_group_ = -1;
};

// Multiplies all groups of rows by all panels. Every thread makes a Worker(problem, weight, groups), which has two
// functions: pack(group), and multiply(group, panel).
template <class Worker, class Weight, class Groups>
void run_panels(const Problem& problem, const Weight& weight, const Groups& groups) {
  if (problem.rows == 0) return;
  const int64_t num_tasks = groups.num_groups * weight.panels;
  const int64_t traffic = std::max<int64_t>(weight.bytes() * groups.num_blocks(), 1);
  const int num_workers = workers_for<kTrafficPerWorker>(problem.threads, traffic);
  // At least eight times a worker, so that a worker that is done early can take some of another's tasks.
  const int64_t at_once = std::min(kTrafficAtOnce * num_tasks / traffic, num_tasks / (8 * num_workers));
  for_each_task(
      {problem.threads, NumParts{num_tasks}, num_workers}, [&] { return PanelTasks<Worker>(problem, weight, groups); },
      std::max<int64_t>(at_once, 1));
}

// The bias of a panel's columns as floats, zero past the last. The biases begin at element `first` of the call's.
template <class Element>
void load_bias(const Problem& problem, int64_t column, float* bias, int64_t first = 0) {
  for (int c = 0; c < kPanel; c += F32::width) store(bias + c, broadcast(0.0f));
  if (problem.bias == nullptr) return;
  const int64_t columns = std::min<int64_t>(kPanel, problem.out_features - column);
  const Element* from = static_cast<const Element*>(problem.bias) + first + column;
  for (int64_t c = 0; c < columns; ++c) bias[c] = to_float(from[c]);
}

// Writes a block's sums, plus bias and residual, as rows of the result from (row, column) on.
template <class Out>
void write_rows(const Problem& problem, const float* sums, int rows, const float* bias, int64_t row, int64_t column) {
  const int64_t columns = std::min<int64_t>(kPanel, problem.out_features - column);
  Out* out = static_cast<Out*>(problem.out) + column;
  const Out* residual = static_cast<const Out*>(problem.residual);
  if (residual != nullptr) residual += row * problem.residual_stride + column;
  for (int r = 0; r < rows; ++r) {
    // These are not initialised, because GCC would do it with `rep stos`: 30 cycles and more for each row.
    alignas(64) Out line[kPanel];
    Out rest[kPanel];
    Out* place = out + problem.out_row(row + r) * problem.out_features;
    const bool streams = problem.streams && columns == kPanel && reinterpret_cast<uintptr_t>(place) % 64 == 0;
    Out* target = columns == kPanel && !streams ? place : line;
    const Out* addend = residual == nullptr ? nullptr : residual + r * problem.residual_stride;
    if (residual != nullptr && columns < kPanel) {
      std::memset(rest, 0, sizeof rest);
      std::memcpy(rest, addend, columns * sizeof(Out));
      addend = rest;
    }
    if (residual == nullptr) {
#pragma GCC unroll 8
      for (int c = 0; c < kPanel; c += F32::width) store(target + c, load(sums + r * kPanel + c) + load(bias + c));
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < kPanel; c += F32::width) {
        store(target + c, load(sums + r * kPanel + c) + load(bias + c) + load(addend + c));
      }
    }
    if (streams) {
      for (int c = 0; c < kPanel; c += 64 / static_cast<int>(sizeof(Out))) stream_line(place + c, line + c);
    } else if (target == line) {
      std::memcpy(place, line, columns * sizeof(Out));
    }
  }
}

// A panel of a gated linear unit: the sums of its gates and factors, and their biases. Gates and factors are rounded to
// Out before the activation, as if a linear op had returned them.
template <class Out>
class GatedPanel {
 public:
  GatedPanel(const Problem& problem, int64_t column) : p_(problem), column_(column) {
    load_bias<Out>(problem, column, gate_bias_);
    load_bias<Out>(problem, column, factor_bias_, problem.out_features);
  }

  // Writes rows of the result from `row` on.
  void write(const float* gates, const float* factors, int rows, int64_t row) const {
    for (int r = 0; r < rows; ++r, gates += kPanel, factors += kPanel) {
      alignas(64) Out gate[kPanel];
      alignas(64) Out factor[kPanel];
      for (int c = 0; c < kPanel; c += F32::width) {
        store(gate + c, load(gates + c) + load(gate_bias_ + c));
        store(factor + c, load(factors + c) + load(factor_bias_ + c));
      }
      Out* place = static_cast<Out*>(p_.out) + (row + r) * p_.out_features + column_;
      if (!p_.streams || reinterpret_cast<uintptr_t>(place) % 64 != 0) {
        activation::activate_row(*p_.gated, gate, factor, kPanel, place);
        continue;
      }
      activation::activate_row(*p_.gated, gate, factor, kPanel, gate);
      for (int c = 0; c < kPanel; c += 64 / static_cast<int>(sizeof(Out))) stream_line(place + c, gate + c);
    }
  }

 private:
  const Problem& p_;
  const int64_t column_;
  alignas(64) float gate_bias_[kPanel];
  alignas(64) float factor_bias_[kPanel];
};

}  // namespace ostinato::linear
