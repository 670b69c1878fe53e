// The collectives of tensor-parallel ranks. ops/parallel/collectives.py defines them.
#include "collectives/arguments.h"
#include "core/division.h"
#include "core/elements.h"
#include "core/kernel.h"
#include "core/simd.h"

#include <cstring>

namespace ostinato::collectives {
namespace {

constexpr int64_t kPieceBytesPerWorker = 64 << 10;  // bytes of a piece for which waking one more thread pays

// out = parts[0] + parts[1] + ... + residual, in this order, in float32.
template <class T, class Out>
void sum_parts(const T* const* parts, int num_parts, const Out* residual, int64_t count, Out* out) {
  int64_t i = 0;
  for (; i + F32::width <= count; i += F32::width) {
    F32 sum = load(parts[0] + i);
    for (int part = 1; part < num_parts; ++part) sum = sum + load(parts[part] + i);
    if (residual != nullptr) sum = sum + load(residual + i);
    store(out + i, sum);
  }
  for (; i < count; ++i) {
    float sum = to_float(parts[0][i]);
    for (int part = 1; part < num_parts; ++part) sum += to_float(parts[part][i]);
    if (residual != nullptr) sum += to_float(residual[i]);
    from_float(sum, out + i);
  }
}

template <class T, class Out>
void reduce(Group& group, const Threads& threads, const Tensor& partial, const Tensor& residual, const Tensor& out) {
  const T* own = partial.as<T>();
  const Out* added = residual.exists() ? residual.as<Out>() : nullptr;
  const auto divided = [&](int64_t size) {
    return divide<kPieceBytesPerWorker>(threads, NumParts{size}, size * static_cast<int64_t>(sizeof(T)));
  };
  const auto write = [&](int64_t first, int64_t size, char* slot) {
    divided(size).run([&](int64_t begin, int64_t end) {
      std::memcpy(slot + begin * sizeof(T), own + first + begin, (end - begin) * sizeof(T));
    });
  };
  const auto read = [&](int64_t first, int64_t size, const auto& slot_of) {
    divided(size).run([&](int64_t begin, int64_t end) {
      const T* parts[kMaxRanks];
      for (int rank = 0; rank < group.world(); ++rank) {
        const T* part = rank == group.rank() ? own + first : reinterpret_cast<const T*>(slot_of(rank));
        parts[rank] = part + begin;
      }
      const int64_t at = first + begin;
      sum_parts(parts, group.world(), added == nullptr ? nullptr : added + at, end - begin, out.as<Out>() + at);
    });
  };
  group.exchange(partial.num_elements(), sizeof(T), write, read);
}

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  throw_invalid_argument({"dtype must be float32, bfloat16 or float16, got ", name});
}

// all_reduce(Tensor partial, Tensor? residual, Tensor group, str dtype) -> Tensor
void all_reduce(Call& call) {
  const Tensor partial = call.tensor();
  const Tensor residual = call.optional_tensor();
  const Tensor handle = call.tensor();
  const DType dtype = dtype_named(call.text());
  Group& group = group_of(handle);
  OSTINATO_CHECK(partial.dtype == DType::float32 || partial.dtype == dtype, "partial must be float32 or of the result's dtype");
  OSTINATO_CHECK(is_contiguous_matrix(partial), "partial must be a contiguous matrix");
  OSTINATO_CHECK(!residual.exists() || (residual.dtype == dtype && is_contiguous_matrix(residual) &&
                                        residual.sizes[0] == partial.sizes[0] && residual.sizes[1] == partial.sizes[1]),
                 "residual must be a contiguous matrix of partial's shape, of the result's dtype");
  const Tensor out = call.empty(partial.sizes, 2, dtype);
  with_element(dtype, [&]<class Out>(Out) {
    if (partial.dtype == DType::float32) return reduce<float, Out>(group, call.threads(), partial, residual, out);
    reduce<Out, Out>(group, call.threads(), partial, residual, out);
  });
  call.give(out);
}

// gather_vocab(Tensor part, Tensor group, int world) -> Tensor
void gather_vocab(Call& call) {
  const Tensor part = call.tensor();
  const Tensor handle = call.tensor();
  const int64_t world = call.integer();
  Group& group = group_of(handle);
  OSTINATO_CHECK(world == group.world(), "world must be the number of the group's ranks");
  OSTINATO_CHECK(part.dtype == DType::float32 && is_contiguous_matrix(part),
                 "part must be a contiguous float32 matrix");
  const int64_t width = part.sizes[1];
  const int64_t sizes[] = {part.sizes[0], width * world};
  const Tensor out = call.empty(sizes, 2, part.dtype);
  const auto write = [&](int64_t first, int64_t size, char* slot) {
    std::memcpy(slot, part.as<float>() + first, size * sizeof(float));
  };
  const auto read = [&](int64_t first, int64_t size, const auto& slot_of) {
    for (int rank = 0; rank < world; ++rank) {
      const auto* from = reinterpret_cast<const float*>(slot_of(rank));
      for (int64_t at = first; at < first + size;) {  // row by row
        const int64_t row = at / width, column = at % width;
        const int64_t count = std::min(width - column, first + size - at);
        std::memcpy(out.as<float>() + row * sizes[1] + rank * width + column, from + (at - first), count * sizeof(float));
        at += count;
      }
    }
  };
  group.exchange(part.num_elements(), sizeof(float), write, read);
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(all_reduce, all_reduce);
OSTINATO_KERNEL(gather_vocab, gather_vocab);

}  // namespace ostinato::collectives

// Maps the segment of a group. Returns null if the system refuses; errno then holds the reason, and `notify` stays
// open.
OSTINATO_EXPORT void* ostinato_group_open(int fd, int64_t bytes, int rank, int64_t spin_us, int64_t timeout_ms,
                                          int notify) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return new ostinato::collectives::Group(memory, bytes, rank, std::chrono::microseconds(spin_us),
                                          std::chrono::milliseconds(timeout_ms), notify);
}
OSTINATO_EXPORT void ostinato_group_abort(void* group) { static_cast<ostinato::collectives::Group*>(group)->abort(); }
OSTINATO_EXPORT void ostinato_group_close(void* group) { delete static_cast<ostinato::collectives::Group*>(group); }
