// One tile of attention: 64 keys and values against blocks of query rows.
//
// A tile is re-laid once and then used by all rows: keys transposed to [step][key], values to [step][dim].
// A step is what one multiply-accumulate instruction consumes per lane: one float, or two bfloat16 for the
// AVX-512 dot product. Every score and every output element is a single chain over the steps in order, so
// a row's bits do not depend on the rows that are computed beside it.
#pragma once

#include "simd.h"

#include <type_traits>

namespace ostinato::attention {

constexpr int kTile = 64;         // keys per tile
constexpr int kGroup = 8;         // keys that share one address: block sizes are multiples of it
constexpr int kRowBlock = 6;      // query rows per register block
constexpr int kMaxHeadDim = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowest = -1e30f;  // the maximum over no keys: finite, so that differences are numbers
constexpr int kWidth = F32::width;

// Where a tile's keys and values lie: `count` tokens in groups of 8 consecutive rows.
template <class T>
struct TileSource {
  const T* keys[kTile / kGroup];
  const T* values[kTile / kGroup];
  int64_t key_stride;    // elements from one token to the next
  int64_t value_stride;
  int count;             // of kTile; the others are taken as zero
};

// Memory that the next tile needs, asked for a few cache lines at a time in between the work on this one:
// blocks lie scattered, so the hardware does not foresee the next, and one burst would fill its queues.
class Ahead {
 public:
  void add(const void* run, int bytes) {
    runs_[num_runs_++] = static_cast<const char*>(run);
    bytes_ = bytes;
  }
  OSTINATO_INLINE void fetch(int lines) {
    while (lines > 0 && run_ < num_runs_) {
      const int left = (bytes_ - byte_ + 63) / 64;
      const int count = lines < left ? lines : left;
      const char* from = runs_[run_] + byte_;
      for (int i = 0; i < count; ++i) __builtin_prefetch(from + 64 * i, 0, 2);  // into the second-level cache
      lines -= count;
      byte_ += 64 * count;
      if (byte_ >= bytes_) {
        byte_ = 0;
        ++run_;
      }
    }
  }

 private:
  const char* runs_[2 * kTile / kGroup];
  int num_runs_ = 0;
  int bytes_ = 0;
  int run_ = 0;
  int byte_ = 0;
};

alignas(64) inline const uint32_t kZeros[kMaxHeadDim] = {};

template <class T>
OSTINATO_INLINE const T* token_row(const T* const* groups, int64_t stride, int count, int token) {
  if (token >= count) return reinterpret_cast<const T*>(kZeros);
  return groups[token / kGroup] + (token % kGroup) * stride;
}

// ---- multiply-accumulate ---------------------------------------------------------------------------------

struct FloatStep {
  using Step = float;
  static constexpr int elements = 1;
  OSTINATO_INLINE static F32 load_steps(const float* p) { return load(p); }
  OSTINATO_INLINE static F32 broadcast_step(const float* p) { return broadcast(*p); }
  OSTINATO_INLINE static F32 accumulate(F32 sum, F32 a, F32 b) { return fma(a, b, sum); }
};

#if OSTINATO_ISA >= 3
struct PairStep {
  using Step = uint32_t;  // two bfloat16, the earlier one in the low half
  static constexpr int elements = 2;
  OSTINATO_INLINE static __m512bh load_steps(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  OSTINATO_INLINE static __m512bh broadcast_step(const uint32_t* p) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*p));
  }
  OSTINATO_INLINE static F32 accumulate(F32 sum, __m512bh a, __m512bh b) {
    return {_mm512_dpbf16_ps(sum.v, a, b)};
  }
};
#endif

// out[row][vector] = scale[row] * out[row][vector] + sum over steps of left[row][step] * right[step][vector];
// without `scale` the old value of `out` counts as zero.
template <class S, int kRows, int kVectors>
void multiply(const typename S::Step* left, int left_stride, const typename S::Step* right, int right_stride,
              int num_steps, float* out, int out_stride, const float* scale) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      sum[r][c] = broadcast(0.0f);
      if (scale != nullptr) sum[r][c] = broadcast(scale[r]) * load(out + r * out_stride + c * kWidth);
    }
  }
  for (int step = 0; step < num_steps; ++step) {
    decltype(S::load_steps(right)) columns[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) columns[c] = S::load_steps(right + c * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto factor = S::broadcast_step(left + r * left_stride + step);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) sum[r][c] = S::accumulate(sum[r][c], columns[c], factor);
    }
    right += right_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(out + r * out_stride + c * kWidth, sum[r][c]);
  }
}

// The largest number of rows that `multiply` is made for and that are not more than `remaining`.
OSTINATO_INLINE int rows_per_block(int remaining) {
  return remaining >= kRowBlock ? kRowBlock : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

// `multiply` for 1, 2, 4 or 6 rows and any number of vectors: as many columns at once as registers allow.
template <class S>
void multiply_columns(int num_rows, int num_vectors, const typename S::Step* left, int left_stride,
                      const typename S::Step* right, int right_stride, int num_steps, float* out,
                      int out_stride, const float* scale) {
  using Kernel = decltype(&multiply<S, 1, 1>);
  Kernel four_columns = nullptr;
  Kernel two_columns = multiply<S, 1, 2>;
  Kernel one_column = multiply<S, 1, 1>;
  if (num_rows == 1) {
    four_columns = multiply<S, 1, 4>;
  } else if (num_rows == 2) {
    four_columns = multiply<S, 2, 4>;
    two_columns = multiply<S, 2, 2>;
    one_column = multiply<S, 2, 1>;
  } else if (num_rows == 4) {
    two_columns = multiply<S, 4, 2>;
    one_column = multiply<S, 4, 1>;
  } else {
    two_columns = multiply<S, 6, 2>;
    one_column = multiply<S, 6, 1>;
  }
#if OSTINATO_ISA >= 2  // 32 registers; with 16, four columns leave room for two rows only
  if (num_rows == 4) four_columns = multiply<S, 4, 4>;
  if (num_rows == 6) four_columns = multiply<S, 6, 4>;
#endif
  for (int c = 0; c < num_vectors;) {
    const int remaining = num_vectors - c;
    const int step = remaining >= 4 && four_columns != nullptr ? 4 : remaining >= 2 ? 2 : 1;
    const Kernel kernel = step == 4 ? four_columns : step == 2 ? two_columns : one_column;
    kernel(left, left_stride, right + c * kWidth, right_stride, num_steps, out + c * kWidth, out_stride, scale);
    c += step;
  }
}

// ---- layouts ---------------------------------------------------------------------------------------------

// Everything in float32; for any cache type and level.
template <class T>
struct FloatLayout {
  using Element = T;
  using Multiply = FloatStep;
  using Step = float;
  static constexpr int kDirectRows = 0;

  static int padded_dim(int head_dim) { return (head_dim + kWidth - 1) / kWidth * kWidth; }

  static void queries(const T* row, int head_dim, Step* out) {
    for (int d = 0; d < head_dim; ++d) out[d] = to_float(row[d]);
  }

  OSTINATO_INLINE static F32 load_some(const T* p, int remaining) {
    return kWidth > 8 && remaining < kWidth ? load_8(p) : load(p);
  }

  // out [head_dim][kTile]; columns past source.count are left alone, and nobody reads them
  static void keys(const TileSource<T>& source, int head_dim, Step* out, Ahead& ahead) {
    constexpr int kBlockLines = (kWidth * kWidth * static_cast<int>(sizeof(T)) + 63) / 64;
    for (int first = 0; first < source.count; first += kWidth) {
      const T* rows[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        rows[i] = token_row(source.keys, source.key_stride, source.count, first + i);
      }
      int d = 0;
      if constexpr (std::is_same_v<T, BFloat16>) {
        for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
          ahead.fetch(2 * kBlockLines);
          F32 block[kWidth];
          for (int i = 0; i < kWidth; ++i) block[i] = load(reinterpret_cast<const float*>(rows[i] + d));
          transpose(block);
          for (int i = 0; i < kWidth; ++i) {
            store(out + (d + 2 * i) * kTile + first, low_of_pairs(block[i]));
            store(out + (d + 2 * i + 1) * kTile + first, high_of_pairs(block[i]));
          }
        }
      }
      for (; d < head_dim; d += kWidth) {
        ahead.fetch(kBlockLines);
        F32 block[kWidth];
        for (int i = 0; i < kWidth; ++i) block[i] = load_some(rows[i] + d, head_dim - d);
        transpose(block);
        const int valid = head_dim - d < kWidth ? head_dim - d : kWidth;
        for (int i = 0; i < valid; ++i) store(out + (d + i) * kTile + first, block[i]);
      }
    }
  }

  // out [kTile][padded_dim]; rows past source.count are left alone
  static void values(const TileSource<T>& source, int head_dim, Step* out, Ahead& ahead) {
    const int stride = padded_dim(head_dim);
    const int row_lines = (head_dim * static_cast<int>(sizeof(T)) + 63) / 64;
    for (int token = 0; token < source.count; ++token) {
      ahead.fetch(row_lines);
      const T* row = token_row(source.values, source.value_stride, source.count, token);
      for (int d = 0; d < head_dim; d += kWidth) {
        store(out + token * stride + d, load_some(row + d, head_dim - d));
      }
    }
  }

  OSTINATO_INLINE static void weights(const F32* p, Step* out) {
    for (int i = 0; i < kTile / kWidth; ++i) store(out + i * kWidth, p[i]);
  }

  // accumulator [padded_dim] times factor -> T [head_dim]
  static void output(const float* accumulator, float factor, int head_dim, T* out) {
    alignas(64) T rounded[kMaxHeadDim + kWidth];
    for (int d = 0; d < head_dim; d += kWidth) {
      store(rounded + d, load(accumulator + d) * broadcast(factor));
    }
    std::memcpy(out, rounded, head_dim * sizeof(T));
  }
};

#if OSTINATO_ISA >= 3
// bfloat16 through the dot-product instruction. Values are interleaved by pairs of keys with unpack
// instructions, which leaves the dimensions of each 32 in the order 0-3 8-11 16-19 24-27, 4-7 12-15 20-23
// 28-31; the accumulator keeps that order and `output` undoes it.
struct PairLayout {
  using Element = BFloat16;
  using Multiply = PairStep;
  using Step = uint32_t;
  static constexpr int kDirectRows = 4;  // up to which tiles are not re-laid

  static int padded_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

  static void queries(const BFloat16* row, int head_dim, Step* out) {
    std::memcpy(out, row, head_dim * sizeof(BFloat16));
  }

  // 32 elements of a row, zero past its end
  OSTINATO_INLINE static __m512i load_row(const BFloat16* p, int remaining) {
    if (remaining >= 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi32((1u << (remaining / 2)) - 1, p);
  }

  // out [head_dim / 2][kTile]; columns past source.count are left alone, and nobody reads them
  static void keys(const TileSource<BFloat16>& source, int head_dim, Step* out, Ahead& ahead) {
    for (int first = 0; first < source.count; first += 16) {
      const BFloat16* rows[16];
      for (int i = 0; i < 16; ++i) {
        rows[i] = token_row(source.keys, source.key_stride, source.count, first + i);
      }
      for (int d = 0; d < head_dim; d += 32) {
        ahead.fetch(16);  // as many as are read here
        F32 block[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) block[i].v = _mm512_castsi512_ps(load_row(rows[i] + d, head_dim - d));
        transpose(block);
        const int valid = head_dim - d < 32 ? (head_dim - d) / 2 : 16;
        for (int i = 0; i < valid; ++i) _mm512_storeu_ps(out + (d / 2 + i) * kTile + first, block[i].v);
      }
    }
  }

  // out [kTile / 2][padded_dim]; pairs past source.count are left alone
  static void values(const TileSource<BFloat16>& source, int head_dim, Step* out, Ahead& ahead) {
    const int stride = padded_dim(head_dim);
    const int row_lines = stride / 32;
    for (int token = 0; token < source.count; token += 2, out += stride) {
      ahead.fetch(2 * row_lines);
      const BFloat16* even = token_row(source.values, source.value_stride, source.count, token);
      const BFloat16* odd = token_row(source.values, source.value_stride, source.count, token + 1);
      for (int d = 0; d < head_dim; d += 32) {
        const __m512i a = load_row(even + d, head_dim - d);
        const __m512i b = load_row(odd + d, head_dim - d);
        _mm512_storeu_si512(out + d, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(out + d + 16, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  OSTINATO_INLINE static void weights(const F32* p, Step* out) {
    for (int i = 0; i < kTile / 32; ++i) {
      _mm512_storeu_si512(out + i * 16, (__m512i)_mm512_cvtne2ps_pbh(p[2 * i + 1].v, p[2 * i].v));
    }
  }

  // What re-laying the keys and multiplying them gives, for so few rows that storing them in between would cost
  // more than the multiplication: scores [kRows][kTile] against the first `last_seen` keys.
  template <int kRows>
  static void direct_scores(const Step* queries, int num_steps, const TileSource<BFloat16>& source, int head_dim,
                            int last_seen, float* scores, Ahead& ahead) {
    for (int first = 0; first < last_seen; first += 16) {
      const BFloat16* rows[16];
      for (int i = 0; i < 16; ++i) {
        rows[i] = token_row(source.keys, source.key_stride, source.count, first + i);
      }
      F32 sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = broadcast(0.0f);
      for (int d = 0; d < head_dim; d += 32) {
        ahead.fetch(16);
        F32 block[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) block[i].v = _mm512_castsi512_ps(load_row(rows[i] + d, head_dim - d));
        transpose(block);
        const int valid = head_dim - d < 32 ? (head_dim - d) / 2 : 16;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          if (i >= valid) break;
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            sum[r] = Multiply::accumulate(sum[r], (__m512bh)_mm512_castps_si512(block[i].v),
                                          Multiply::broadcast_step(queries + r * num_steps + d / 2 + i));
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(scores + r * kTile + first, sum[r]);
    }
  }

  // The same for values: accumulator [kRows][padded_dim] = rescale * accumulator + weights * values.
  template <int kRows>
  static void add_values(const Step* weights, const TileSource<BFloat16>& source, int head_dim, int num_key_steps,
                         float* accumulator, const float* rescale, Ahead& ahead) {
    const int stride = padded_dim(head_dim);
    int d = 0;
    for (; d + 32 < head_dim; d += 64) {
      add_columns<kRows, 2>(weights, source, d, head_dim, num_key_steps, accumulator + d, stride, rescale, ahead);
    }
    if (d < head_dim) {
      add_columns<kRows, 1>(weights, source, d, head_dim, num_key_steps, accumulator + d, stride, rescale, ahead);
    }
  }

  // kHalves times 32 columns, from column d on.
  template <int kRows, int kHalves>
  static void add_columns(const Step* weights, const TileSource<BFloat16>& source, int d, int head_dim,
                          int num_key_steps, float* accumulator, int stride, const float* rescale, Ahead& ahead) {
    constexpr int kWeightStride = kTile / 2;
    F32 sum[kRows][2 * kHalves];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < 2 * kHalves; ++c) {
        sum[r][c] = broadcast(rescale[r]) * load(accumulator + r * stride + c * 16);
      }
    }
    for (int step = 0; step < num_key_steps; ++step) {
      ahead.fetch(2 * kHalves);
      const BFloat16* even = token_row(source.values, source.value_stride, source.count, 2 * step);
      const BFloat16* odd = token_row(source.values, source.value_stride, source.count, 2 * step + 1);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        const int column = d + 32 * h;
        const __m512i a = load_row(even + column, head_dim - column);
        const __m512i b = load_row(odd + column, head_dim - column);
        const auto low = (__m512bh)_mm512_unpacklo_epi16(a, b);
        const auto high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const auto weight = Multiply::broadcast_step(weights + r * kWeightStride + step);
          sum[r][2 * h] = Multiply::accumulate(sum[r][2 * h], low, weight);
          sum[r][2 * h + 1] = Multiply::accumulate(sum[r][2 * h + 1], high, weight);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < 2 * kHalves; ++c) store(accumulator + r * stride + c * 16, sum[r][c]);
    }
  }

  static void output(const float* accumulator, float factor, int head_dim, BFloat16* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int d = 0; d < head_dim; d += 32) {
      const __m512 low = (load(accumulator + d) * broadcast(factor)).v;
      const __m512 high = (load(accumulator + d + 16) * broadcast(factor)).v;
      const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(low, second, high),
                                                           _mm512_permutex2var_ps(low, first, high));
      const int pairs = head_dim - d < 32 ? (head_dim - d) / 2 : 16;
      _mm512_mask_storeu_epi32(out + d, static_cast<__mmask16>((1u << pairs) - 1), rounded);
    }
  }
};
#endif

// ---- online softmax --------------------------------------------------------------------------------------

struct LogitScaling {
  float factor;    // to base-2 logits, or to the soft cap's unit
  float soft_cap;  // in base-2 logits; 0 = none
};

// Keys of a tile that one row sees.
struct Visible {
  int first;
  int last;  // exclusive
};

// Turns a block's scores into weights against the running maximum.
//   scores [num_rows][kTile] in and scratch; weights [num_rows][kTile steps] out;
//   maximum [num_rows], total [num_rows][kWidth] updated; rescale [num_rows] out: what the accumulators
//   must be multiplied by.
template <class Layout>
void softmax_block(int num_rows, const Visible* visible, LogitScaling scaling, float* scores,
                   typename Layout::Step* weights, float* maximum, float* total, float* rescale) {
  constexpr int kVectors = kTile / kWidth;
  constexpr int kWeightStride = kTile / Layout::Multiply::elements;
  alignas(64) float difference[16] = {};
  for (int r = 0; r < num_rows; ++r) {
    float* row = scores + r * kTile;
    const bool partial = visible[r].first > 0 || visible[r].last < kTile;
    F32 highest = broadcast(kLowest);
    for (int i = 0; i < kVectors; ++i) {
      F32 logit = load(row + i * kWidth) * broadcast(scaling.factor);
      if (scaling.soft_cap != 0.0f) logit = tanh(logit) * broadcast(scaling.soft_cap);
      if (partial) {
        logit = keep_range(logit, visible[r].first - i * kWidth, visible[r].last - i * kWidth,
                           broadcast(kMinusInfinity));
      }
      store(row + i * kWidth, logit);
      highest = max(highest, logit);
    }
    const float previous = maximum[r];
    const float current = reduce_max(highest);
    maximum[r] = current > previous ? current : previous;
    difference[r] = previous - maximum[r];
  }
  for (int r = 0; r < num_rows; r += kWidth) store(rescale + r, exp2(load(difference + r)));
  for (int r = 0; r < num_rows; ++r) {
    F32 p[kVectors];
    F32 sum = load(total + r * kWidth) * broadcast(rescale[r]);
    for (int i = 0; i < kVectors; ++i) {
      p[i] = exp2(load(scores + r * kTile + i * kWidth) - broadcast(maximum[r]));
      sum = sum + p[i];
    }
    store(total + r * kWidth, sum);
    Layout::weights(p, weights + r * kWeightStride);
  }
}

}  // namespace ostinato::attention
