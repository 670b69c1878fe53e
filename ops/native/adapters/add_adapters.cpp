// Adds the products of low-rank adapters (LoRA, arXiv:2106.09685) to the result of a linear layer, several adapters in
// one call. A row names the slot of its adapter.
//
// Two passes: `shrink` multiplies each row by A of its adapter, which gives `rank` numbers, and `expand` multiplies
// these by B and adds the result. Every sum is a float32 sum in one order, by K and then by rank, whatever the other
// rows are. So the bits of a row depend on its own adapter only. Rows without an adapter are not touched.
#include "core/division.h"
#include "core/elements.h"
#include "core/kernel.h"
#include "core/simd.h"

#include <algorithm>

// Without this, g++ keeps arrays of sums in memory.
#define OSTINATO_UNROLL _Pragma("GCC unroll 8")

namespace ostinato::adapters {
namespace {

constexpr int kRows = 8;                          // rows that are multiplied together by a part of a matrix
constexpr int64_t kRanks = 8;                     // ranks in a task of `shrink`, if there are few rows
constexpr int64_t kPanel = 64;                    // columns of B that are stored together
constexpr int64_t kPanelsTogether = 4;            // panels in a task of `expand`, if there are many rows
constexpr int64_t kGroups = 16;                   // groups of rows in a task of `expand`, at most
constexpr int64_t kProductsPerWorker = 16 << 10;  // with fewer products, waking one more thread takes longer
constexpr int64_t kLine = 64;                     // bytes that a prefetch brings to the cache
constexpr int64_t kAhead = 1024;                  // bytes of B that are prefetched ahead

// Rows with the same slot, at most kRows of them.
struct Group {
  int32_t slot;
  int count;
  int64_t rows[kRows];
};

struct Problem {
  int64_t in_features, out_features, max_rank, outputs, panels;
  int64_t x_stride, y_stride;
  const int32_t* ranks;   // [slots, outputs]
  const float* scales;    // [slots, outputs]
  const int32_t* bounds;  // [outputs + 1]
  const Group* groups;
  int64_t num_groups;
  const int64_t* runs;  // [num_runs + 1]: the first group of each run of groups with the same slot
  int64_t num_runs;
  float* hidden;   // [groups, kRows, outputs, max_rank]
  float* widened;  // [workers, widened_floats]: rows of x, and later parts of B, as float32
  int64_t widened_floats;

  int64_t rank(const Group& group, int64_t output) const { return ranks[group.slot * outputs + output]; }
  float* hidden_of(int64_t group, int row, int64_t output) const {
    return hidden + ((group * kRows + row) * outputs + output) * max_rank;
  }
};

// a * b + c of one lane of `fma`. Without a fused instruction, `fma` rounds the product.
OSTINATO_INLINE float multiply_add(float a, float b, float c) {
#if OSTINATO_ISA >= 1 || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T>
void widen(const T* from, int64_t count, float* to) {
  int64_t k = 0;
  for (; k + F32::width <= count; k += F32::width) store(to + k, load(from + k));
  for (; k < count; ++k) to[k] = to_float(from[k]);
}

// hidden[r][i] = scale * the product of row r of x and row i of A. Each product has one vector of sums. Meanwhile, as many
// bytes at `next` are prefetched as the rows of A have, if it is not null.
template <int Rows, int Ranks, class T>
void dot(const float* const* x, const T* a, int64_t count, float scale, const char* next, float* const* hidden) {
  F32 sums[Rows][Ranks];
  OSTINATO_UNROLL
  for (int r = 0; r < Rows; ++r) {
    OSTINATO_UNROLL
    for (int i = 0; i < Ranks; ++i) sums[r][i] = broadcast(0.0f);
  }
  int64_t k = 0;
  for (; k + F32::width <= count; k += F32::width) {
    F32 weights[Ranks];
    OSTINATO_UNROLL
    for (int i = 0; i < Ranks; ++i) weights[i] = load(a + i * count + k);
    if (next != nullptr) {
      constexpr int64_t kBytes = Ranks * F32::width * static_cast<int64_t>(sizeof(T));
      const char* place = next + k / F32::width * kBytes;
      for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(place + line);
    }
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const F32 values = load(x[r] + k);
      OSTINATO_UNROLL
      for (int i = 0; i < Ranks; ++i) sums[r][i] = fma(values, weights[i], sums[r][i]);
    }
  }
  OSTINATO_UNROLL
  for (int r = 0; r < Rows; ++r) {
    OSTINATO_UNROLL
    for (int i = 0; i < Ranks; ++i) {
      float rest = 0.0f;
      for (int64_t j = k; j < count; ++j) rest += x[r][j] * to_float(a[i * count + j]);
      hidden[r][i] = (reduce_sum(sums[r][i]) + rest) * scale;
    }
  }
}

// The numbers of `ranks` ranks for some rows.
template <int Rows, class T>
void shrink_rows(const float* const* x, const T* a, int64_t ranks, int64_t count, float scale, const T* next,
                 float* const* to) {
  constexpr int kTogether = Rows == 1 ? 8 : 1;  // eight sums hide the latency of a fused multiply-add
  float* hidden[Rows];
  int64_t i = 0;
  for (; i + kTogether <= ranks; i += kTogether) {
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) hidden[r] = to[r] + i;
    const bool has_more = i + 2 * kTogether <= ranks;
    const T* following = has_more ? a + (i + kTogether) * count : next;
    dot<Rows, kTogether>(x, a + i * count, count, scale, reinterpret_cast<const char*>(following), hidden);
  }
  for (; i < ranks; ++i) {
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) hidden[r] = to[r] + i;
    dot<Rows, 1>(x, a + i * count, count, scale, nullptr, hidden);
  }
}

// The numbers of ranks [first, stop) of a group's rows, for all outputs.
template <class T>
void shrink(const Problem& p, const T* x, const T* a, int64_t group, int64_t first, int64_t stop, float* memory) {
  const Group& rows = p.groups[group];
  const float* from[kRows];
  for (int r = 0; r < rows.count; ++r) {
    const T* row = x + rows.rows[r] * p.x_stride;
    if constexpr (sizeof(T) == sizeof(float)) {
      from[r] = row;
    } else {
      widen(row, p.in_features, memory + r * p.in_features);
      from[r] = memory + r * p.in_features;
    }
  }
  for (int64_t output = 0; output < p.outputs; ++output) {
    const int64_t ranks = std::min(stop, p.rank(rows, output)) - first;
    if (ranks <= 0) continue;
    const float scale = p.scales[rows.slot * p.outputs + output];
    const T* matrix = a + ((rows.slot * p.outputs + output) * p.max_rank + first) * p.in_features;
    const bool has_next = output + 1 < p.outputs && p.rank(rows, output + 1) > first;
    const T* next = has_next ? matrix + p.max_rank * p.in_features : nullptr;
    float* to[kRows];
    for (int r = 0; r < rows.count; ++r) to[r] = p.hidden_of(group, r, output) + first;
    int r = 0;
    for (; r + 8 <= rows.count; r += 8) shrink_rows<8>(from + r, matrix, ranks, p.in_features, scale, next, to + r);
    for (; r + 4 <= rows.count; r += 4) shrink_rows<4>(from + r, matrix, ranks, p.in_features, scale, next, to + r);
    for (; r < rows.count; ++r) shrink_rows<1>(from + r, matrix, ranks, p.in_features, scale, next, to + r);
  }
}

// Adds the product of `Rows` rows of numbers and B [rank, kPanel] to `count` columns of y.
template <int Rows, class B, class Y>
void expand_rows(const float* const* hidden, const B* b, int64_t rank, int64_t count, Y* const* y) {
  // Eight sums hide the latency of a fused multiply-add.
  constexpr int kVectors = Rows == 1 ? std::min<int>(8, kPanel / F32::width) : 2;
  constexpr int64_t kBytes = kVectors * F32::width * static_cast<int64_t>(sizeof(B));
  int64_t c = 0;
  for (; c + kVectors * F32::width <= count; c += kVectors * F32::width) {
    F32 sums[Rows][kVectors];
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) {
      OSTINATO_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = broadcast(0.0f);
    }
    for (int64_t i = 0; i < rank; ++i) {
      F32 weights[kVectors];
      OSTINATO_UNROLL
      for (int v = 0; v < kVectors; ++v) weights[v] = load(b + i * kPanel + c + v * F32::width);
      if (Rows == 1) {
        const char* ahead = reinterpret_cast<const char*>(b + i * kPanel + c) + kAhead;
        for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(ahead + line);
      }
      OSTINATO_UNROLL
      for (int r = 0; r < Rows; ++r) {
        const F32 value = broadcast(hidden[r][i]);
        OSTINATO_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value, weights[v], sums[r][v]);
      }
    }
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) {
      OSTINATO_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        Y* to = y[r] + c + v * F32::width;
        store(to, load(to) + sums[r][v]);
      }
    }
  }
  for (; c < count; ++c) {
    OSTINATO_UNROLL
    for (int r = 0; r < Rows; ++r) {
      float sum = 0.0f;
      for (int64_t i = 0; i < rank; ++i) {
        sum = multiply_add(hidden[r][i], to_float(b[i * kPanel + c]), sum);
      }
      from_float(to_float(y[r][c]) + sum, y[r] + c);
    }
  }
}

template <class B, class Y>
void expand_group(const Problem& p, int64_t group, int64_t output, const B* b, int64_t first, int64_t count, Y* y) {
  const Group& rows = p.groups[group];
  const int64_t rank = p.rank(rows, output);
  const float* hidden[kRows];
  Y* to[kRows];
  for (int r = 0; r < rows.count; ++r) {
    hidden[r] = p.hidden_of(group, r, output);
    to[r] = y + rows.rows[r] * p.y_stride + first;
  }
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) expand_rows<4>(hidden + r, b, rank, count, to + r);
  for (; r < rows.count; ++r) expand_rows<1>(hidden + r, b, rank, count, to + r);
}

// Adds the products of a group and of one panel of columns, which are those of B from `columns` on.
template <class B, class Y>
void expand_panel(const Problem& p, int64_t group, int64_t panel, const B* columns, Y* y) {
  const int64_t first = panel * kPanel, stop = std::min(first + kPanel, p.out_features);
  for (int64_t output = 0; output < p.outputs; ++output) {
    const int64_t from = std::max<int64_t>(first, p.bounds[output]);
    const int64_t count = std::min<int64_t>(stop, p.bounds[output + 1]) - from;
    if (count <= 0 || p.rank(p.groups[group], output) == 0) continue;
    expand_group(p, group, output, columns + from - first, from, count, y);
  }
}

// Adds the products of the groups [begin, end), which have the same slot, and of the panels [first, stop).
template <class T, class Y>
void expand(const Problem& p, const T* b, Y* y, int64_t begin, int64_t end, int64_t first, int64_t stop,
            float* memory) {
  const int32_t slot = p.groups[begin].slot;
  const int64_t size = p.max_rank * kPanel;  // of a panel
  const T* panels = b + slot * p.panels * size;
  if (sizeof(T) == sizeof(float) || end - begin == 1) {
    for (int64_t g = begin; g < end; ++g) {
      for (int64_t panel = first; panel < stop; ++panel) expand_panel(p, g, panel, panels + panel * size, y);
    }
    return;
  }
  int64_t most = 0;
  for (int64_t output = 0; output < p.outputs; ++output) most = std::max(most, p.rank(p.groups[begin], output));
  for (int64_t panel = first; panel < stop; ++panel) {
    widen(panels + panel * size, most * kPanel, memory + (panel - first) * size);
  }
  for (int64_t g = begin; g < end; ++g) {
    for (int64_t panel = first; panel < stop; ++panel) {
      expand_panel(p, g, panel, static_cast<const float*>(memory + (panel - first) * size), y);
    }
  }
}

// Calls task(index, memory) for every index, on as many threads as the products are worth.
template <class Task>
void for_each_task(const Problem& p, const Threads& threads, NumParts tasks, int64_t products, const Task& task) {
  const Division division = divide<kProductsPerWorker>(threads, tasks, products);
  threads.run(division.num_workers, [&](int worker) {
    float* memory = p.widened + worker * p.widened_floats;
    for (int64_t index = division.begin(worker); index < division.end(worker); ++index) task(index, memory);
  });
}

template <class T, class Y>
void run(const Problem& p, const Threads& threads, const T* x, const T* a, const T* b, Y* y) {
  int64_t most = 0, rows = 0, products = 0;  // the largest rank of this call; its rows; products of a pass
  for (int64_t g = 0; g < p.num_groups; ++g) {
    rows += p.groups[g].count;
    for (int64_t output = 0; output < p.outputs; ++output) {
      const int64_t rank = p.rank(p.groups[g], output);
      most = std::max(most, rank);
      products += p.groups[g].count * rank * p.in_features;
    }
  }
  if (most == 0) return;
  const int64_t ranks = p.num_groups >= 4 * threads.count() ? most : kRanks;
  const int64_t blocks = ceil_divide(most, ranks);
  for_each_task(p, threads, NumParts{p.num_groups * blocks}, products, [&](int64_t index, float* memory) {
    const int64_t first = index % blocks * ranks;
    shrink(p, x, a, index / blocks, first, first + ranks, memory);
  });
  // With many rows, several panels in turn: the lines of y next to each other are then read and written together.
  const int64_t together = p.num_groups > 2 * p.num_runs ? kPanelsTogether : 1;
  const int64_t parts = ceil_divide(p.panels, together);
  products = rows * most * p.out_features;
  for_each_task(p, threads, NumParts{p.num_runs * parts}, products, [&](int64_t index, float* memory) {
    const int64_t run = index / parts, first = index % parts * together;
    expand(p, b, y, p.runs[run], p.runs[run + 1], first, std::min(first + together, p.panels), memory);
  });
}

// Groups the rows by slot; rows of a slot keep their order. Returns the number of groups.
int64_t group_rows(const Tensor& slots, int64_t rows, int64_t num_slots, int64_t* places, Group* groups) {
  const int32_t* slot_of = slots.as<int32_t>();
  std::fill(places, places + num_slots, -1);  // the unfinished group of each slot
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slot_of[row * slots.strides[0]];
    if (slot < 0) continue;
    if (places[slot] < 0) {
      groups[count].slot = static_cast<int32_t>(slot);
      groups[count].count = 0;
      places[slot] = count++;
    }
    Group& group = groups[places[slot]];
    group.rows[group.count++] = row;
    if (group.count == kRows) places[slot] = -1;
  }
  return count;
}

// Divides the groups into runs with the same slot, of at most kGroups groups. Returns the number of runs.
int64_t find_runs(const Group* groups, int64_t num_groups, int64_t* runs) {
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const bool goes_on = group > 0 && groups[group].slot == groups[group - 1].slot && group - runs[count - 1] < kGroups;
    if (!goes_on) runs[count++] = group;
  }
  runs[count] = num_groups;
  return count;
}

// add_adapters(Tensor(a!) y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor ranks, Tensor scales,
//              Tensor bounds) -> ()
void add_adapters(Call& call) {
  const Tensor y = call.tensor();
  const Tensor x = call.tensor();
  const Tensor slots = call.tensor();
  const Tensor a = call.tensor();
  const Tensor b = call.tensor();
  const Tensor ranks = call.tensor();
  const Tensor scales = call.tensor();
  const Tensor bounds = call.tensor();
  OSTINATO_CHECK((x.dtype == DType::float32 || x.dtype == DType::bfloat16 || x.dtype == DType::float16) && x.dim == 2 &&
                     is_contiguous(x, 1),
                 "add_adapters: x must be float32, bfloat16 or float16 [T, K] with contiguous rows");
  OSTINATO_CHECK((y.dtype == x.dtype || y.dtype == DType::float32) && y.dim == 2 && y.sizes[0] == x.sizes[0] &&
                     is_contiguous(y, 1),
                 "add_adapters: y must be [T, N] with contiguous rows, in x's dtype or float32");
  OSTINATO_CHECK(slots.dtype == DType::int32 && slots.dim == 2 && slots.sizes[0] == x.sizes[0] && slots.sizes[1] == 1,
                 "add_adapters: slots must be int32 [T, 1]");
  OSTINATO_CHECK(a.dtype == x.dtype && a.dim == 4 && a.sizes[3] == x.sizes[1] && is_contiguous(a),
                 "add_adapters: a must be contiguous [slots, outputs, R, K] in x's dtype");
  const int64_t num_slots = a.sizes[0], outputs = a.sizes[1], max_rank = a.sizes[2];
  const int64_t panels = ceil_divide(y.sizes[1], kPanel);
  OSTINATO_CHECK(b.dtype == x.dtype && b.dim == 4 && b.sizes[0] == num_slots && b.sizes[1] == panels &&
                     b.sizes[2] == max_rank && b.sizes[3] == kPanel && is_contiguous(b),
                 "add_adapters: b must be contiguous [slots, ceil(N / 64), R, 64] in x's dtype");
  OSTINATO_CHECK(ranks.dtype == DType::int32 && ranks.num_elements() == num_slots * outputs && is_contiguous(ranks),
                 "add_adapters: ranks must be contiguous int32 [slots, outputs]");
  OSTINATO_CHECK(scales.dtype == DType::float32 && scales.num_elements() == num_slots * outputs &&
                     is_contiguous(scales),
                 "add_adapters: scales must be contiguous float32 [slots, outputs]");
  OSTINATO_CHECK(bounds.dtype == DType::int32 && bounds.num_elements() == outputs + 1 && is_contiguous(bounds),
                 "add_adapters: bounds must be contiguous int32 [outputs + 1]");
  const int64_t rows = x.sizes[0];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots.as<int32_t>()[row * slots.strides[0]];
    OSTINATO_CHECK(slot < num_slots, "add_adapters: slots[", row, "] = ", slot, " must be below ", num_slots);
  }
  Problem p{};
  p.in_features = x.sizes[1];
  p.out_features = y.sizes[1];
  p.max_rank = max_rank;
  p.outputs = outputs;
  p.panels = panels;
  p.x_stride = x.strides[0];
  p.y_stride = y.strides[0];
  p.ranks = ranks.as<int32_t>();
  p.scales = scales.as<float>();
  p.bounds = bounds.as<int32_t>();
  Group* groups = call.workspace<Group>(rows);
  p.num_groups = group_rows(slots, rows, num_slots, call.workspace<int64_t>(num_slots), groups);
  p.groups = groups;
  if (p.num_groups > 0) {
    int64_t* runs = call.workspace<int64_t>(p.num_groups + 1);
    p.num_runs = find_runs(groups, p.num_groups, runs);
    p.runs = runs;
    p.hidden = call.workspace<float>(p.num_groups * kRows * outputs * max_rank);
    p.widened_floats = std::max(kRows * p.in_features, max_rank * kPanel * kPanelsTogether);
    p.widened = call.workspace<float>(p.widened_floats * call.threads().count());
    with_element(x.dtype, [&]<class T>(T) {
      if (y.dtype == DType::float32) {
        run(p, call.threads(), x.as<T>(), a.as<T>(), b.as<T>(), y.as<float>());
      } else {
        run(p, call.threads(), x.as<T>(), a.as<T>(), b.as<T>(), y.as<T>());
      }
    });
  }
  call.give({});
}

}  // namespace

OSTINATO_KERNEL(add_adapters, add_adapters);

}  // namespace ostinato::adapters
