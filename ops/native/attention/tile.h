// One tile of attention: up to 64 keys and values against blocks of query rows.
//
// Keys and values are stored in the cache in the order in which this kernel reads them. A step is four bytes, that is
// one float32 or two 16-bit elements: one lane of a multiply-accumulate instruction. A group is 16 consecutive tokens
// of a head (8 if the block size is not a multiple of 16). It holds
//   keys   [head_dim / elements][tokens][elements]  and
//   values [tokens / elements][value_dim][elements].
// In a cache of 8 bits, a step is one element, or four elements for matrix tiles of bytes (amx_bytes.h). After the elements
// of each group comes a float32 scale for each token.
// So the lanes of a vector are 16 keys in the product with a query, and 16 dimensions in the sum of values.
// Keys are transposed once, when they are written. Every later engine step reads them without rearranging them.
//
// Every score and every output element is one chain of additions over the steps in order. So a row's bits do not depend
// on the rows that are computed with it.
#pragma once

#include "attention/steps.h"
#include "core/simd.h"

#include <type_traits>

namespace ostinato::attention {

constexpr int kTile = 64;         // keys per tile
constexpr int kMaxGroup = 16;     // tokens of a group
constexpr int kMinGroup = 8;
constexpr int kRowBlock = 6;      // query rows per register block
constexpr int kMaxHeadDim = 256;
alignas(64) inline constexpr char kZeroGroup[kMaxGroup * kMaxHeadDim * sizeof(float)] = {};  // keys or values
#if OSTINATO_AMX
constexpr int kBFloat16ByteElements = 4;  // of a step in a cache of 8 bits of a bfloat16 model
#else
constexpr int kBFloat16ByteElements = 1;
#endif
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowest = -1e30f;  // the maximum of no scores; finite, so that differences of maxima are not NaN
constexpr int kWidth = F32::width;

// Tokens of a group in blocks of `block_size`.
inline int group_tokens(int block_size) { return block_size % kMaxGroup == 0 ? kMaxGroup : kMinGroup; }

// Pointers to the groups of a tile. Pointers past the group of the last token repeat the first pointer.
template <class Unit>
struct TileGroups {
  const Unit* keys[kTile / kMinGroup];
  const Unit* values[kTile / kMinGroup];
};

// Pointers to the keys of each vector of scores. A vector of 16 lanes over groups of 8 tokens has two pointers: one for
// each half.
template <class Step>
struct KeyColumns {
  KeyColumns(const TileGroups<Step>& groups, int tokens) {
    const int lanes = tokens < kWidth ? tokens : kWidth;
    for (int i = 0; i * lanes < kTile; ++i) columns[i] = groups.keys[i * lanes / tokens] + i * lanes % tokens;
  }
  const Step* columns[kTile / (kWidth < kMinGroup ? kWidth : kMinGroup)];
};

// Prefetches the cache line of the steps at index `place` of a group or a row, if these steps begin the line.
template <class Step>
OSTINATO_INLINE void prefetch_line(const Step* steps, int place) {
  // A tile of 8-bit elements fits into the first-level cache, other tiles into the second.
  if (place * sizeof(Step) % 64 == 0) __builtin_prefetch(steps, 0, sizeof(Step) == 1 ? 3 : 2);
}

// out [kRows][kVectors] = queries times the keys of kVectors vectors. The steps of the next tile with the same indices
// are prefetched, because blocks are scattered and the hardware does not prefetch them.
//   queries [kRows][num_steps * parts]; columns, next: kVectors * kHalves pointers to [num_steps][tokens]
template <class S, int kRows, int kVectors, int kHalves>
void score(const typename S::Factor* queries, int num_steps, const typename S::Step* const* columns,
           const typename S::Step* const* next, int tokens, float* out) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) sum[r][c] = broadcast(0.0f);
  }
  for (int step = 0, offset = 0; step < num_steps; ++step, offset += tokens) {
    if (next != nullptr) {
#pragma GCC unroll 8
      for (int c = 0; c < kVectors * kHalves; ++c) {
        prefetch_line(next[c] + offset, offset + (kHalves == 1 ? c * kWidth & (tokens - 1) : 0));
      }
    }
    for_parts<S>([&]<int kPart>(std::integral_constant<int, kPart>) __attribute__((always_inline)) {
      decltype(S::template load<kPart>(*columns)) keys[kVectors];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) {
        if constexpr (kHalves == 1) {
          keys[c] = S::template load<kPart>(columns[c] + offset);
        } else {
          keys[c] = S::template load_halves<kPart>(columns[2 * c] + offset, columns[2 * c + 1] + offset);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto factor = S::broadcast(queries + (r * num_steps + step) * S::kParts + kPart);
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; ++c) S::accumulate(sum[r][c], keys[c], factor);
      }
    });
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(out + r * kTile + c * kWidth, sum[r][c]);
  }
}

// The arguments of `add_values`, except the choice of columns.
template <class S>
struct ValueRows {
  const typename S::Factor* weights;        // [rows][num_factors(kTile)]
  const typename S::Step* const* groups;    // [tokens / elements][value_dim] each
  const typename S::Step* const* next;      // the steps of the next tile, or null
  int tokens;                               // tokens of a group
  int num_keys;                             // keys of the tile; the values of other tokens count as zeros
  int value_dim;
};

// out [kRows][kVectors] = scale[row] * out + weights times values, for the columns from `column` on. The last vector
// holds 8 columns when kEndsIn8 is set.
template <class S, int kRows, int kVectors, bool kEndsIn8>
void add_values(const ValueRows<S>& values, int column, float* out, int out_stride, const float* scale) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) sum[r][c] = broadcast(scale[r]) * load(out + r * out_stride + c * kWidth);
  }
  const typename S::Factor* weights = values.weights;
  const auto add = [&](const typename S::Step* row, auto is_half) __attribute__((always_inline)) {
    for_parts<S>([&]<int kPart>(std::integral_constant<int, kPart>) __attribute__((always_inline)) {
      if constexpr (is_half && kPart == 1) return;
      decltype(S::template load<kPart>(row)) columns[kVectors];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) {
        columns[c] = kEndsIn8 && c == kVectors - 1 ? S::template load_first_8<kPart>(row + c * kWidth)
                                                 : S::template load<kPart>(row + c * kWidth);
        if constexpr (is_half && S::kParts == 1) columns[c] = S::without_odd(columns[c]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto factor = S::broadcast(weights + r * num_factors<S>(kTile) + kPart);
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; ++c) S::accumulate(sum[r][c], columns[c], factor);
      }
    });
    weights += S::kParts;
  };
  const int per_group = values.tokens / S::elements;
  int remaining = values.num_keys / S::elements;
  const bool odd = values.num_keys % S::elements != 0;
  for (int group = 0; remaining > 0 || odd; ++group) {
    const typename S::Step* row = values.groups[group] + column;
    const typename S::Step* next = values.next == nullptr ? nullptr : values.next[group] + column;
    const int whole = remaining < per_group ? remaining : per_group;
    for (int step = 0; step < whole; ++step, row += values.value_dim) {
      if (next != nullptr) {
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; ++c) prefetch_line(next + c * kWidth, c * kWidth);
        next += values.value_dim;
      }
      add(row, std::false_type{});
    }
    remaining -= whole;
    if (whole < per_group) {
      if (odd) add(row, std::true_type{});
      break;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(out + r * out_stride + c * kWidth, sum[r][c]);
  }
}

// The most rows, up to `remaining`, for which there is a kernel.
OSTINATO_INLINE int rows_per_block(int remaining) {
  return remaining >= kRowBlock ? kRowBlock : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

// Calls run(vectors, first) for consecutive columns, with the most vectors that the registers allow for kRows, at most
// kMost.
template <int kRows, int kMost, class Run>
OSTINATO_INLINE void for_columns(int num_vectors, const Run& run) {
  constexpr bool kFour = kMost >= 4 && (OSTINATO_ISA >= 2 || kRows <= 2);  // 32 registers, else 16
  constexpr bool kTwo = kMost >= 2;
  for (int c = 0; c < num_vectors;) {
    const int remaining = num_vectors - c;
    if (kFour && remaining >= 4) {
      run(std::integral_constant<int, kFour ? 4 : 1>{}, c);
      c += 4;
    } else if (kTwo && remaining >= 2) {
      run(std::integral_constant<int, kTwo ? 2 : 1>{}, c);
      c += 2;
    } else {
      run(std::integral_constant<int, 1>{}, c);
      c += 1;
    }
  }
}

// Calls run(rows) with a constant: 1, 2, 4 or 6.
template <class Run>
OSTINATO_INLINE void with_rows(int rows, const Run& run) {
  if (rows == 1) run(std::integral_constant<int, 1>{});
  if (rows == 2) run(std::integral_constant<int, 2>{});
  if (rows == 4) run(std::integral_constant<int, 4>{});
  if (rows == 6) run(std::integral_constant<int, 6>{});
}

// `score` for 1, 2, 4 or 6 rows and any number of vectors.
template <class S>
void score_keys(int num_rows, int num_vectors, const typename S::Factor* queries, int num_steps,
                const typename S::Step* const* columns, const typename S::Step* const* next, int tokens, float* out) {
  const auto run_all = [&]<int kHalves>(std::integral_constant<int, kHalves>) {
    with_rows(num_rows, [&]<int kRows>(std::integral_constant<int, kRows>) {
      // blocks of 8 tokens are rare, so fewer kernels are compiled for them
      constexpr int kMost = kHalves == 1 ? 4 : 1;
      for_columns<kRows, kMost>(num_vectors, [&]<int kVectors>(std::integral_constant<int, kVectors>, int c) {
        score<S, kRows, kVectors, kHalves>(queries, num_steps, columns + c * kHalves,
                                           next == nullptr ? nullptr : next + c * kHalves, tokens, out + c * kWidth);
      });
    });
  };
  if constexpr (kWidth > kMinGroup) {
    if (tokens < kWidth) {
      run_all(std::integral_constant<int, 2>{});
      return;
    }
  }
  run_all(std::integral_constant<int, 1>{});
}

// `add_values` for 1, 2, 4 or 6 rows and all columns; out [rows][padded_dim].
template <class S>
void add_all_values(int num_rows, const ValueRows<S>& values, float* out, int padded_dim,
                    const float* scale) {
  const int whole = values.value_dim / kWidth;
  with_rows(num_rows, [&]<int kRows>(std::integral_constant<int, kRows>) {
    for_columns<kRows, 4>(whole, [&]<int kVectors>(std::integral_constant<int, kVectors>, int c) {
      add_values<S, kRows, kVectors, false>(values, c * kWidth, out + c * kWidth, padded_dim, scale);
    });
    if constexpr (kWidth > 8) {
      if (whole * kWidth < values.value_dim) {
        add_values<S, kRows, 1, true>(values, whole * kWidth, out + whole * kWidth, padded_dim, scale);
      }
    }
  });
}

// ---- layouts ---------------------------------------------------------------------------------------------

#if OSTINATO_AMX
constexpr int kPadding = 16;  // columns of a matrix tile
#else
constexpr int kPadding = kWidth;
#endif

inline int padded_dim(int value_dim) { return (value_dim + kPadding - 1) / kPadding * kPadding; }

// accumulator [padded_dim] times factor -> T [value_dim]
template <class T>
void write_output_row(const float* accumulator, float factor, int value_dim, T* out) {
  alignas(64) T rounded[kMaxHeadDim + kWidth];
  for (int d = 0; d < value_dim; d += kWidth) store(rounded + d, load(accumulator + d) * broadcast(factor));
  std::memcpy(out, rounded, value_dim * sizeof(T));
}

// Queries and the softmax's weights in float32.
template <class T>
struct FloatFactors {
  static void queries(const T* row, int head_dim, float* out) {
    for (int d = 0; d < head_dim; ++d) out[d] = to_float(row[d]);
  }
  OSTINATO_INLINE static void weights(const F32* p, float* out) {
    for (int i = 0; i < kTile / kWidth; ++i) store(out + i * kWidth, p[i]);
  }
};

// Keys and values in 8 bits, multiplied in float32. Matrix tiles have a layout for bfloat16 of their own (amx_bytes.h).
template <class T>
struct ByteLayout : FloatFactors<T> {
  using Element = T;
  using Multiply = ByteStep;
  using Unit = int8_t;
  static constexpr bool kWidens = false;
  static constexpr bool kHasMatrixTiles = false;
  static constexpr int kRows = kRowBlock;
};

// float32; float16 is widened to a tile of floats in the same order.
template <class T>
struct FloatLayout : FloatFactors<T> {
  using Element = T;
  using Multiply = FloatStep;
  using Unit = std::conditional_t<sizeof(T) == 4, float, uint32_t>;
  static constexpr bool kWidens = sizeof(T) < 4;
  static constexpr bool kHasMatrixTiles = false;
  static constexpr int kRows = kRowBlock;

  // Turns lanes of two 16-bit elements into floats.
  OSTINATO_INLINE static void widen(const uint32_t* pairs, F32* even, F32* odd) {
    T low[kWidth], high[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      low[i].bits = static_cast<uint16_t>(pairs[i]);
      high[i].bits = static_cast<uint16_t>(pairs[i] >> 16);
    }
    *even = load(low);
    *odd = load(high);
  }

  // Pairs [rows][units] become floats [2 * rows][units]. `next` is the address of the pairs that will be widened next,
  // in the same layout, or null.
  static void widen_rows(const uint32_t* pairs, const uint32_t* next, int rows, int units, float* out) {
    uint32_t rest[kWidth] = {};
    for (int row = 0; row < rows; ++row, out += 2 * units) {
      for (int i = 0; i < units; i += kWidth) {
        const uint32_t* from = pairs + row * units + i;
        if (next != nullptr) __builtin_prefetch(next + row * units + i, 0, 2);
        const int count = units - i < kWidth ? units - i : kWidth;
        if (count < kWidth) {
          std::memcpy(rest, from, count * sizeof(uint32_t));
          from = rest;
        }
        F32 even, odd;
        widen(from, &even, &odd);
        alignas(64) float line[2][kWidth];
        store(line[0], even);
        store(line[1], odd);
        std::memcpy(out + i, line[0], count * sizeof(float));
        std::memcpy(out + units + i, line[1], count * sizeof(float));
      }
    }
  }

  // The groups of a tile's first `count` tokens as floats: keys [groups][head_dim][tokens], values
  // [groups][tokens][value_dim].
  static void widen_tile(const TileGroups<uint32_t>& groups, const TileGroups<uint32_t>* next, int tokens, int count,
                         int head_dim, int value_dim, float* keys, float* values, TileGroups<float>& out) {
    const int key_size = tokens * head_dim, value_size = tokens * value_dim;
    for (int i = 0; i < kTile / tokens; ++i) {
      const bool is_read = i * tokens < count;
      out.keys[i] = keys + (is_read ? i * key_size : 0);
      out.values[i] = values + (is_read ? i * value_size : 0);
      if (!is_read) continue;
      widen_rows(groups.keys[i], next == nullptr ? nullptr : next->keys[i], head_dim / 2, tokens, keys + i * key_size);
      widen_rows(groups.values[i], next == nullptr ? nullptr : next->values[i], tokens / 2, value_dim,
                 values + i * value_size);
    }
  }
};

#if OSTINATO_ISA < 3
// bfloat16, widened to floats in registers.
struct WideningLayout : FloatFactors<BFloat16> {
  using Element = BFloat16;
  using Multiply = WideningStep;
  using Unit = uint32_t;
  static constexpr bool kWidens = false;
  static constexpr bool kHasMatrixTiles = false;
  static constexpr int kRows = kRowBlock;
};
#endif

#if OSTINATO_ISA >= 3 && !OSTINATO_AMX
// bfloat16 through the dot-product instruction.
struct PairLayout {
  using Element = BFloat16;
  using Multiply = PairStep;
  using Unit = uint32_t;
  static constexpr bool kWidens = false;
  static constexpr bool kHasMatrixTiles = false;
  static constexpr int kRows = kRowBlock;

  static void queries(const BFloat16* row, int head_dim, uint32_t* out) {
    std::memcpy(out, row, head_dim * sizeof(BFloat16));
  }

  OSTINATO_INLINE static void weights(const F32* p, uint32_t* out) {
    for (int i = 0; i < kTile / 32; ++i) {
      _mm512_storeu_si512(out + i * 16, (__m512i)_mm512_cvtne2ps_pbh(p[2 * i + 1].v, p[2 * i].v));
    }
  }
};
#endif

}  // namespace ostinato::attention
