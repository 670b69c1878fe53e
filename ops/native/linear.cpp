// The packed linear op for CPUs: x @ weight.T + bias, with the weights laid out once in the order in which
// the kernel reads them. Layout and arithmetic of a tile are in linear_tiles.h.
//
// A call is cut into tasks of one weight panel times one group of row blocks. A few rows are one group, so
// the weights stream through once; many rows are grouped so that a group's activations stay in the second
// level cache while the panels pass by (the loop order of Goto and van de Geijn, "Anatomy of
// high-performance matrix multiplication", 2008). Each worker owns a contiguous range of tasks, hence of
// memory, and takes over others' tasks when it is done. Who computes an element does not change its value.
#include "linear_tiles.h"
#include "linear_transpose.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

namespace ostinato::linear {
namespace {

constexpr int64_t kStepsPerPass = 1024;        // of K at a time: 128 KiB of a panel
constexpr int64_t kGroupBytes = 384 << 10;     // packed activations of a group, to stay in a core's L2
constexpr int64_t kMaxGroupRows = 256;
constexpr int64_t kSlabBytes = 8 << 20;        // packed activations at a time
constexpr int64_t kBytesPerWorker = 96 << 10;  // of cache traffic that pay for waking one more thread

// Memory of the calling thread that grows and is kept: fresh pages every step would cost more than the packing.
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

// Runs body(task) for every task in [0, num_tasks).
template <class Body>
void for_each_task(int64_t num_tasks, int num_workers, const Body& body) {
  if (num_workers <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
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
    for (int i = 0; i < num_workers; ++i) {
      Range& range = ranges[(worker + i) % num_workers];
      int64_t task;
      while ((task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) body(task);
    }
  });
}

int workers_for(int64_t bytes) {
  const int64_t worth = bytes / kBytesPerWorker;
  return worth <= 1 ? 1 : static_cast<int>(std::min<int64_t>(worth, num_threads()));
}

struct Problem {
  const void* x;
  int64_t row_stride;  // elements of x
  int64_t rows;
  int64_t in_features;
  PackedWeight weight;
  const void* bias;  // null for none
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

// Lays steps [begin, end) of `rows` rows out as a tile reads them. The missing odd index of K is zero.
template <class Kind>
void pack_activations(const typename Kind::Element* x, int64_t row_stride, int rows, int64_t in_features,
                      int64_t begin, int64_t end, float* packed) {
  using Element = typename Kind::Element;
  const int64_t pitch = static_cast<int64_t>(rows) * Kind::kFloats;
  const int64_t whole = std::min(end, in_features / Kind::kElements);
  transpose_units(x + begin * Kind::kElements, row_stride * static_cast<int64_t>(sizeof(Element)), rows,
                  whole - begin, packed + begin * pitch, pitch);
  if (whole < end) {
    for (int r = 0; r < rows; ++r) {
      packed[whole * pitch + r] = 0.0f;
      std::memcpy(packed + whole * pitch + r, x + r * row_stride + in_features - 1, sizeof(Element));
    }
  }
  if constexpr (Kind::kFloats == 2) {
    for (int64_t step = begin; step < end; ++step) {
      float* even = packed + step * pitch;
      for (int r = 0; r < rows; ++r) {
        const auto pair = bit_cast<uint32_t>(even[r]);
        even[r] = bit_cast<float>(pair << 16);
        even[rows + r] = bit_cast<float>(pair & 0xffff0000u);
      }
    }
  }
}

// Writes a block's sums, plus bias, as rows of `out`; `columns` of the panel's 32 exist.
template <class Out>
void write_rows(const float* sums, int rows, const float* bias, int64_t columns, Out* out, int64_t row_stride) {
  for (int r = 0; r < rows; ++r) {
    Out line[kPanel];
    Out* target = columns == kPanel ? out + r * row_stride : line;
    for (int c = 0; c < kPanel; c += F32::width) store(target + c, load(sums + r * kPanel + c) + load(bias + c));
    if (target == line) std::memcpy(out + r * row_stride, line, columns * sizeof(Out));
  }
}

template <class Kind, class Out>
class Slab {
 public:
  using Element = typename Kind::Element;

  Slab(const Problem& problem, int64_t first_row, int64_t rows)
      : p_(problem), first_row_(first_row), blocks_(rows) {
    const int64_t block_bytes = p_.weight.steps * Kind::kFloats * 4 * kMaxRows;
    const int64_t fitting = std::min(kGroupBytes / std::max<int64_t>(block_bytes, 1), kMaxGroupRows / kMaxRows);
    groups_ = ceil_divide(blocks_.count, std::max<int64_t>(fitting, 1));
  }

  void run() {
    if (in_place()) {
      activations_ = reinterpret_cast<const float*>(rows_of(0));
    } else {
      pack();
    }
    for_each_task(groups_ * p_.weight.panels, workers_for(p_.weight.bytes() * blocks_.count),
                  [this](int64_t task) { compute(task / p_.weight.panels, task % p_.weight.panels); });
  }

 private:
  const Element* rows_of(int64_t row) const {
    return static_cast<const Element*>(p_.x) + (first_row_ + row) * p_.row_stride;
  }

  // One row of whole units already is in the packed order.
  bool in_place() const {
    return blocks_.rows == 1 && Kind::kFloats == 1 && p_.in_features % Kind::kElements == 0 &&
           reinterpret_cast<uintptr_t>(rows_of(0)) % alignof(float) == 0;
  }

  void pack() {
    constexpr int64_t kSteps = 256;
    const int64_t parts = ceil_divide(p_.weight.steps, kSteps);
    float* packed = scratch(blocks_.rows * p_.weight.steps * Kind::kFloats);
    activations_ = packed;
    for_each_task(blocks_.count * parts, workers_for(blocks_.rows * p_.weight.steps * 4), [&, this](int64_t task) {
      const int64_t block = task / parts;
      const int64_t begin = task % parts * kSteps;
      const int64_t row = blocks_.begin(block);
      pack_activations<Kind>(rows_of(row), p_.row_stride, blocks_.height(block), p_.in_features, begin,
                             std::min(p_.weight.steps, begin + kSteps), packed + row * p_.weight.steps * Kind::kFloats);
    });
  }

  void compute(int64_t group, int64_t panel) const {
    alignas(64) float sums[(kMaxGroupRows + kMaxRows) * kPanel];
    alignas(64) float bias[kPanel] = {};
    const int64_t column = panel * kPanel;
    const int64_t columns = std::min<int64_t>(kPanel, p_.out_features - column);
    if (p_.bias != nullptr) {
      for (int64_t c = 0; c < columns; ++c) bias[c] = to_float(static_cast<const Element*>(p_.bias)[column + c]);
    }
    const uint32_t* weight = p_.weight.panel(panel);
    const int64_t first = blocks_.count * group / groups_;
    const int64_t last = blocks_.count * (group + 1) / groups_;
    const int64_t first_row = blocks_.begin(first);
    for (int64_t step = 0; step < p_.weight.steps; step += kStepsPerPass) {
      const int64_t steps = std::min(kStepsPerPass, p_.weight.steps - step);
      for (int64_t block = first; block < last; ++block) {
        const int64_t row = blocks_.begin(block);
        const int rows = blocks_.height(block);
        float* block_sums = sums + (row - first_row) * kPanel;
        kTiles<Kind>[rows - 1](activations_ + (row * p_.weight.steps + step * rows) * Kind::kFloats,
                               weight + step * kPanel, steps, block_sums, step > 0);
        if (step + steps == p_.weight.steps) {
          write_rows(block_sums, rows, bias, columns,
                     static_cast<Out*>(p_.out) + (first_row_ + row) * p_.out_features + column, p_.out_features);
        }
      }
    }
  }

  const Problem& p_;
  int64_t first_row_;
  RowBlocks blocks_;
  int64_t groups_;
  const float* activations_ = nullptr;
};

template <class Kind, class Out>
void multiply(const Problem& problem) {
  const int64_t row_bytes = std::max<int64_t>(problem.weight.steps * Kind::kFloats * 4, 1);
  const int64_t slab_rows = std::max<int64_t>(kSlabBytes / row_bytes, kMaxRows);
  for (int64_t row = 0; row < problem.rows; row += slab_rows) {
    Slab<Kind, Out>(problem, row, std::min(slab_rows, problem.rows - row)).run();
  }
}

// packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, bool float32_output) -> Tensor
void packed_linear(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack);
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.optional_tensor();
  const int64_t out_features = call.integer();
  const bool float32_output = call.boolean();
  OSTINATO_CHECK(x.dim == 2 && (x.sizes[1] <= 1 || x.strides[1] == 1), "x must be a matrix with contiguous rows");
  OSTINATO_CHECK(x.dtype == weight.dtype, "x must have the dtype of the packed weight");
  const PackedWeight packed(weight, out_features, x.sizes[1]);
  if (bias.handle != nullptr) {
    OSTINATO_CHECK(bias.dtype == x.dtype && bias.dim == 1 && bias.sizes[0] == out_features &&
                       (out_features <= 1 || bias.strides[0] == 1),
                   "bias must be a contiguous vector of out_features values in x's dtype");
  }
  const int64_t sizes[] = {x.sizes[0], out_features};
  const Tensor out = empty(sizes, 2, float32_output ? DType::float32 : x.dtype);
  const Problem problem{x.data, x.strides[0], x.sizes[0], x.sizes[1], packed, bias.data, out_features, out.data};
  if (x.dtype == DType::float32) {
    multiply<Float32, float>(problem);
  } else if (float32_output) {
    multiply<BFloat16Pairs, float>(problem);
  } else {
    multiply<BFloat16Pairs, BFloat16>(problem);
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(packed_linear, packed_linear);

}  // namespace ostinato::linear
