// The packed linear op for CPUs: x @ weight.T + bias + residual, with the weights laid out once in the order in which
// the kernel reads them. Layout and arithmetic of a tile are in linear_tiles.h.
//
// A call is cut into tasks of one weight panel times one group of row blocks. A few rows are one group, so
// the weights stream through once; many rows are grouped so that a group's activations stay in a core's
// second level cache while the panels pass by (the loop order of Goto and van de Geijn, "Anatomy of
// high-performance matrix multiplication", 2008). Each worker owns a contiguous range of tasks, hence of
// memory, and takes over others' tasks when it is done. Who computes an element does not change its value.
//
// Each worker packs the activations of its own groups. Groups that several workers share are packed more
// than once, which costs less than the barrier that sharing them would need.
#include "linear_tiles.h"
#include "linear_transpose.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

namespace ostinato::linear {
namespace {

constexpr int64_t kStepsPerPass = 512;         // of K at a time, hence terms that one float sums up
constexpr int64_t kGroupBytes = 384 << 10;     // packed activations of a group
constexpr int64_t kMaxGroupRows = 256;
constexpr int64_t kBytesPerWorker = 96 << 10;  // of cache traffic that pay for waking one more thread

// Memory of the calling thread that grows and is kept: fresh pages every step would cost more than packing does.
float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    capacity = ceil_divide(floats, 1024) * 1024;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, capacity * sizeof(float))));
    if (!memory) {
      capacity = 0;
      throw std::bad_alloc();
    }
  }
  return memory.get();
}

// Runs all tasks in [0, num_tasks); each worker calls make_body() once and the result with every task it takes.
template <class MakeBody>
void for_each_task(int64_t num_tasks, int num_workers, const MakeBody& make_body) {
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Range> ranges(num_workers);
  for (int w = 0; w < num_workers; ++w) {
    ranges[w].next = num_tasks * w / num_workers;
    ranges[w].end = num_tasks * (w + 1) / num_workers;
  }
  on_workers(num_workers, [&](int worker) {
    auto body = make_body();
    for (int i = 0; i < num_workers; ++i) {
      Range& range = ranges[(worker + i) % num_workers];
      int64_t task;
      while ((task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) body(task);
    }
  });
}

struct Problem {
  const void* x;
  int64_t row_stride;  // elements of x
  int64_t rows;
  int64_t in_features;
  PackedWeight weight;
  const void* bias;      // null for none
  const void* residual;  // null for none; else rows of the output's type
  int64_t residual_stride;
  int64_t out_features;
  void* out;
};

// Rows [0, rows) cut into `count` blocks of nearly equal height.
struct RowBlocks {
  explicit RowBlocks(int64_t rows) : rows(rows), count(ceil_divide(rows, kMaxRows)) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
  int height(int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
  int64_t rows;
  int64_t count;
};

// Lays `rows` rows out as a tile reads them. The missing odd index of K is zero.
template <class Kind>
void pack_activations(const typename Kind::Element* x, int64_t row_stride, int rows, int64_t in_features,
                      float* packed) {
  using Element = typename Kind::Element;
  const int64_t pitch = static_cast<int64_t>(rows) * Kind::kFloats;
  const int64_t steps = ceil_divide(in_features, Kind::kElements);
  const int64_t whole = in_features / Kind::kElements;
  transpose_units(x, row_stride * static_cast<int64_t>(sizeof(Element)), rows, whole, packed, pitch);
  if (whole < steps) {
    for (int r = 0; r < rows; ++r) {
      packed[whole * pitch + r] = 0.0f;
      std::memcpy(packed + whole * pitch + r, x + r * row_stride + in_features - 1, sizeof(Element));
    }
  }
  if constexpr (Kind::kFloats == 2) {
    for (int64_t step = 0; step < steps; ++step) {
      float* even = packed + step * pitch;
      for (int r = 0; r < rows; ++r) {
        const auto pair = bit_cast<uint32_t>(even[r]);
        even[r] = bit_cast<float>(pair << 16);
        even[rows + r] = bit_cast<float>(pair & 0xffff0000u);
      }
    }
  }
}

// Writes a block's sums, plus bias and residual, as rows of `out`; `columns` of the panel's 32 exist.
template <class Out>
void write_rows(const float* sums, int rows, const float* bias, const Out* residual, int64_t residual_stride,
                int64_t columns, Out* out, int64_t row_stride) {
  for (int r = 0; r < rows; ++r) {
    Out line[kPanel];
    Out rest[kPanel] = {};
    Out* target = columns == kPanel ? out + r * row_stride : line;
    const Out* addend = residual == nullptr ? rest : residual + r * residual_stride;
    if (residual != nullptr && columns < kPanel) {
      std::memcpy(rest, addend, columns * sizeof(Out));
      addend = rest;
    }
    for (int c = 0; c < kPanel; c += F32::width) {
      const F32 sum = load(sums + r * kPanel + c) + load(bias + c);
      store(target + c, residual == nullptr ? sum : sum + load(addend + c));
    }
    if (target == line) std::memcpy(out + r * row_stride, line, columns * sizeof(Out));
  }
}

// Row blocks [0, blocks.count) cut into groups of nearly equal size.
template <class Kind>
struct Groups {
  explicit Groups(const Problem& problem) : blocks(problem.rows) {
    const int64_t block_bytes = std::max<int64_t>(problem.weight.steps * Kind::kFloats * 4 * kMaxRows, 1);
    const int64_t fitting = std::min(kGroupBytes / block_bytes, kMaxGroupRows / kMaxRows);
    count = ceil_divide(blocks.count, std::max<int64_t>(fitting, 1));
  }
  int64_t first_block(int64_t group) const { return blocks.count * group / count; }
  int64_t first_row(int64_t group) const { return blocks.begin(first_block(group)); }
  RowBlocks blocks;
  int64_t count;
};

template <class Kind, class Out>
class Worker {
 public:
  Worker(const Problem& problem, const Groups<Kind>& groups) : p_(problem), groups_(groups) {}

  void operator()(int64_t task) {
    const int64_t group = task / p_.weight.panels;
    if (group != packed_group_) pack(group);
    multiply(group, task % p_.weight.panels);
  }

 private:
  using Element = typename Kind::Element;

  const Element* rows_from(int64_t row) const { return static_cast<const Element*>(p_.x) + row * p_.row_stride; }
  int64_t packed_floats(int64_t rows) const { return rows * p_.weight.steps * Kind::kFloats; }

  void pack(int64_t group) {
    packed_group_ = group;
    if (p_.rows == 1 && Kind::kFloats == 1 && p_.in_features % Kind::kElements == 0 &&
        reinterpret_cast<uintptr_t>(p_.x) % alignof(float) == 0) {
      activations_ = static_cast<const float*>(p_.x);  // already in the packed order
      return;
    }
    const int64_t first_row = groups_.first_row(group);
    float* packed = scratch(packed_floats(groups_.first_row(group + 1) - first_row));
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      pack_activations<Kind>(rows_from(row), p_.row_stride, groups_.blocks.height(block), p_.in_features,
                             packed + packed_floats(row - first_row));
    }
    activations_ = packed;
  }

  void multiply(int64_t group, int64_t panel) const {
    alignas(64) float sums[kMaxGroupRows * kPanel];
    alignas(64) float bias[kPanel] = {};
    const int64_t column = panel * kPanel;
    const int64_t columns = std::min<int64_t>(kPanel, p_.out_features - column);
    if (p_.bias != nullptr) {
      for (int64_t c = 0; c < columns; ++c) bias[c] = to_float(static_cast<const Element*>(p_.bias)[column + c]);
    }
    const uint32_t* weight = p_.weight.panel(panel);
    const int64_t first_row = groups_.first_row(group);
    for (int64_t step = 0; step < p_.weight.steps; step += kStepsPerPass) {
      const int64_t steps = std::min(kStepsPerPass, p_.weight.steps - step);
      for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
        const int64_t row = groups_.blocks.begin(block);
        const int rows = groups_.blocks.height(block);
        float* block_sums = sums + (row - first_row) * kPanel;
        const float* values = activations_ + packed_floats(row - first_row) + step * rows * Kind::kFloats;
        kTiles<Kind>[rows - 1](values, weight + step * kPanel, steps, block_sums, step > 0);
        if (step + steps == p_.weight.steps) {
          const Out* residual = static_cast<const Out*>(p_.residual);
          if (residual != nullptr) residual += row * p_.residual_stride + column;
          write_rows(block_sums, rows, bias, residual, p_.residual_stride, columns,
                     static_cast<Out*>(p_.out) + row * p_.out_features + column, p_.out_features);
        }
      }
    }
  }

  const Problem& p_;
  const Groups<Kind>& groups_;
  int64_t packed_group_ = -1;
  const float* activations_ = nullptr;
};

template <class Kind, class Out>
void run(const Problem& problem) {
  const Groups<Kind> groups(problem);
  const int64_t traffic = problem.weight.bytes() * groups.blocks.count;
  const int64_t worth = std::max<int64_t>(traffic / kBytesPerWorker, 1);
  const int workers = static_cast<int>(std::min<int64_t>(worth, num_threads()));
  for_each_task(groups.count * problem.weight.panels, workers,
                [&] { return Worker<Kind, Out>(problem, groups); });
}

// packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output,
//               Tensor? residual=None) -> Tensor
void packed_linear(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack);
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  const Tensor residual = call.optional_tensor();
  OSTINATO_CHECK(x.dim == 2 && (x.sizes[1] <= 1 || x.strides[1] == 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == weight.dtype, "x must have the dtype of the packed weight");
  const PackedWeight packed(weight, out_features, x.sizes[1]);
  if (bias.handle != nullptr) {
    OSTINATO_CHECK(bias.dtype == x.dtype && bias.dim == 1 && bias.sizes[0] == out_features &&
                       (out_features <= 1 || bias.strides[0] == 1),
                   "bias must be a contiguous vector of out_features values in x's dtype");
  }
  if (residual.handle != nullptr) {
    OSTINATO_CHECK(!float32_output && residual.dtype == x.dtype && residual.dim == 2 &&
                       residual.sizes[0] == x.sizes[0] && residual.sizes[1] == out_features &&
                       (out_features <= 1 || residual.strides[1] == 1),
                   "residual must be [T, out_features] with contiguous rows, in x's dtype, which the result then has");
  }
  const int64_t sizes[] = {x.sizes[0], out_features};
  const Tensor out = empty(sizes, 2, float32_output ? DType::float32 : x.dtype);
  const Problem problem{x.data,        x.strides[0],  x.sizes[0],
                        x.sizes[1],    packed,        bias.data,
                        residual.data, residual.handle == nullptr ? 0 : residual.strides[0],
                        out_features,  out.data};
  if (x.dtype == DType::float32) {
    run<Float32, float>(problem);
  } else if (float32_output) {
    run<BFloat16Pairs, float>(problem);
  } else {
    run<BFloat16Pairs, BFloat16>(problem);
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(packed_linear, packed_linear);

}  // namespace ostinato::linear
