// Writes a step's keys and values into the paged cache, in the layout that attention/tile.h describes.
#pragma once

#include "attention/plan.h"
#include "core/division.h"
#include "core/elements.h"
#include "core/register_tiles.h"

namespace ostinato::attention {

constexpr int64_t kParallelWriteBytes = 1 << 18;  // with fewer bytes, one thread writes all

// Consecutive tokens of a step that lie side by side in one group of the cache.
struct Run {
  int64_t first;  // row of k and v
  int count;
  int place;      // index of the first token in the group
};

// Keys become columns of the group, in units of four bytes; whole vectors of columns are transposed in registers.
inline void write_keys(const uint32_t* rows, int64_t row_stride, const Run& run, int tokens, int num_units, uint32_t* group) {
  for (int i = 0; i < run.count;) {
    const int place = run.place + i;
    const uint32_t* row = rows + i * row_stride;
    int unit = 0;
    const bool is_vector = place % kWidth == 0 && run.count - i >= kWidth;
    for (; is_vector && unit + kWidth <= num_units; unit += kWidth) {
      F32 square[kWidth];
      for (int t = 0; t < kWidth; ++t) square[t] = load(reinterpret_cast<const float*>(row + t * row_stride + unit));
      transpose(square);
      float* into = reinterpret_cast<float*>(group + unit * tokens + place);
      for (int u = 0; u < kWidth; ++u) store(into + u * tokens, square[u]);
    }
    const int columns = is_vector ? kWidth : 1;
    for (int t = 0; t < columns; ++t) {
      for (int u = unit; u < num_units; ++u) group[u * tokens + place + t] = row[t * row_stride + u];
    }
    i += columns;
  }
}

// A row of a group holds the 16-bit values of two tokens, interleaved. If both are in the step, they are stored together.
inline void write_pairs(const uint16_t* rows, int64_t row_stride, const Run& run, int value_dim, uint16_t* group) {
  for (int i = 0; i < run.count;) {
    const int place = run.place + i;
    const uint16_t* row = rows + i * row_stride;
    uint16_t* into = group + place / 2 * 2 * value_dim + place % 2;
    if (place % 2 != 0 || i + 1 == run.count) {
      for (int d = 0; d < value_dim; ++d) into[2 * d] = row[d];
      ++i;
      continue;
    }
    const uint16_t* odd = row + row_stride;
    int d = 0;
    for (; d + kWidth <= value_dim; d += kWidth) {  // a load of BFloat16 moves any 16 bits unchanged
      const F32 pairs = pair_up(load(reinterpret_cast<const BFloat16*>(row + d)),
                                load(reinterpret_cast<const BFloat16*>(odd + d)));
      store(reinterpret_cast<float*>(into + 2 * d), pairs);
    }
    for (; d < value_dim; ++d) {
      into[2 * d] = row[d];
      into[2 * d + 1] = odd[d];
    }
    i += 2;
  }
}

// One token's keys or values as whole numbers from -127 to 127, and their scale: the largest magnitude / 127.
// Up to kWidth - 1 bytes after the `size` bytes of `out` are overwritten.
template <class T>
float quantise(const T* row, int size, int8_t* out) {
  const auto values_at = [&](int d) __attribute__((always_inline)) {
    return d + kWidth <= size ? load(row + d) : load_8(row + d);
  };
  F32 largest = broadcast(0.0f);
  for (int d = 0; d < size; d += kWidth) {
    const F32 x = values_at(d);
    largest = max(max(x, broadcast(0.0f) - x), largest);  // if x is NaN, `largest` stays
  }
  const float scale = reduce_max(largest) / 127.0f;
  if (!(scale > 0.0f)) {
    std::memset(out, 0, size);
    return scale;
  }
  for (int d = 0; d < size; d += kWidth) {
    // The bounds matter if the scale is subnormal, and therefore not exact.
    const F32 quotient = min(max(values_at(d) / broadcast(scale), broadcast(-127.0f)), broadcast(127.0f));
    store(out + d, round_to_integer(quotient));
  }
  return scale;
}

// kElements: elements of a step (tile.h).
template <class T, int kElements>
void write_byte_run(const Problem& p, const Run& run, int64_t block, int64_t offset) {
  const int tokens = group_tokens(p.block_size);
  const auto row_of = [&](const Rows& rows, int head, int i) {
    return reinterpret_cast<const T*>(rows.data) + (run.first + i) * rows.token_stride + head * rows.head_stride;
  };
  const auto group_of = [&](const Cache& cache, int head, int place_bytes) {
    return reinterpret_cast<int8_t*>(cache.data + block * cache.block_stride + head * cache.head_stride +
                                     offset * place_bytes);
  };
  int8_t bytes[kMaxHeadDim + kWidth];
  for (int head = 0; head < p.num_kv_heads; ++head) {
    int8_t* keys = group_of(p.k_cache, head, p.key_bytes);
    int8_t* values = group_of(p.v_cache, head, p.value_bytes);
    const auto set_scale = [&](int8_t* group, int size, int place, float scale) {
      std::memcpy(group + tokens * size + place * kScaleBytes, &scale, kScaleBytes);
    };
    for (int i = 0; i < run.count; ++i) {
      const int place = run.place + i;
      set_scale(keys, p.head_dim, place, quantise(row_of(p.k, head, i), p.head_dim, bytes));
      for (int d = 0; d < p.head_dim; d += kElements) {
        std::memcpy(keys + d * tokens + place * kElements, bytes + d, kElements);
      }
      set_scale(values, p.value_dim, place, quantise(row_of(p.v, head, i), p.value_dim, bytes));
      int8_t* into = values + place / kElements * kElements * p.value_dim + place % kElements;
      for (int d = 0; d < p.value_dim; ++d) into[d * kElements] = bytes[d];
    }
  }
}

inline void write_run(const Problem& p, const Run& run, int64_t block, int64_t offset) {
  const int tokens = group_tokens(p.block_size);
  const auto row_of = [&](const Rows& rows, int head) {
    return rows.data + (run.first * rows.token_stride + head * rows.head_stride) * p.element_bytes;
  };
  const auto group_of = [&](const Cache& cache, int head, int place_bytes) {
    return cache.data + block * cache.block_stride + head * cache.head_stride + offset * place_bytes;
  };
  const int units = 4 / p.element_bytes;  // elements of one unit
  for (int head = 0; head < p.num_kv_heads; ++head) {
    write_keys(reinterpret_cast<const uint32_t*>(row_of(p.k, head)), p.k.token_stride / units, run, tokens,
               p.head_dim / units, reinterpret_cast<uint32_t*>(group_of(p.k_cache, head, p.key_bytes)));
    char* values = group_of(p.v_cache, head, p.value_bytes);
    if (p.element_bytes == 2) {
      write_pairs(reinterpret_cast<const uint16_t*>(row_of(p.v, head)), p.v.token_stride, run, p.value_dim,
                  reinterpret_cast<uint16_t*>(values));
      continue;
    }
    const size_t row_bytes = static_cast<size_t>(p.value_dim) * p.element_bytes;
    for (int i = 0; i < run.count; ++i) {
      std::memcpy(values + (run.place + i) * row_bytes, row_of(p.v, head) + i * p.v.token_stride * p.element_bytes,
                  row_bytes);
    }
  }
}

template <class Write>
void write_tokens(const Problem& p, int64_t begin, int64_t end, const Write& write) {
  const int tokens = group_tokens(p.block_size);
  for (int64_t token = begin; token < end;) {
    const int64_t slot = p.slot_mapping[token];
    const int64_t offset = slot % p.block_size;
    Run run{token, 1, static_cast<int>(offset % tokens)};
    while (token + run.count < end && run.place + run.count < tokens &&
           p.slot_mapping[token + run.count] == slot + run.count) {
      ++run.count;
    }
    write(p, run, slot / p.block_size, offset - run.place);
    token += run.count;
  }
}

inline void write_cache(const Problem& p, DType dtype) {
  const int64_t bytes = p.num_tokens * p.num_kv_heads * (p.head_dim + p.value_dim) * p.element_bytes;
  const Division tokens{p.threads, NumParts{p.num_tokens}, bytes < kParallelWriteBytes ? 1 : p.threads.count()};
  tokens.run([&](int64_t begin, int64_t end) {
    if (!p.has_byte_cache) return write_tokens(p, begin, end, write_run);
#if OSTINATO_HAS(OSTINATO_BYTE_CACHE)
    if (dtype == DType::float32) {
      write_tokens(p, begin, end, write_byte_run<float, 1>);
    } else if (dtype == DType::float16) {
      write_tokens(p, begin, end, write_byte_run<Float16, 1>);
    } else {
      write_tokens(p, begin, end, write_byte_run<BFloat16, kBFloat16ByteElements>);
    }
#else
    throw_not_compiled();
#endif
  });
}

}  // namespace ostinato::attention
