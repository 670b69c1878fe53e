// Register tiles of the packed linear op: a few rows of activations times one panel of packed weights.
//
// Activations are packed to [steps][rows] in the weights' four-byte units, or widened to float where the CPU
// has no bfloat16 dot product. Every output element is one float accumulator that runs over K in ascending
// order, in every tile height and width: a row's result never depends on which rows are computed beside it.
#pragma once

#include "linear_layout.h"
#include "linear_transpose.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#if OSTINATO_ISA > 0
#include <immintrin.h>
#endif

namespace ostinato::linear {

#if OSTINATO_ISA >= 2

using Floats = __m512;
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats broadcast(const float* p) { return _mm512_set1_ps(*p); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats low_half(const uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline Floats high_half(const uint32_t* p) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask));
}
constexpr int kMaxRows = 14;
constexpr int vectors_for(int) { return 2; }

#elif OSTINATO_ISA == 1

using Floats = __m256;
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats broadcast(const float* p) { return _mm256_broadcast_ss(p); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256i load_units(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Floats low_half(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(load_units(p), 16));
}
inline Floats high_half(const uint32_t* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm256_castsi256_ps(_mm256_and_si256(load_units(p), mask));
}
constexpr int kMaxRows = 6;
constexpr int vectors_for(int rows) { return rows <= 2 ? 4 : 2; }

#else

typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Units __attribute__((vector_size(16)));
inline Floats zero() { return Floats{0, 0, 0, 0}; }
inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Floats broadcast(const float* p) { return Floats{*p, *p, *p, *p}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Units load_units(const uint32_t* p) {
  Units v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats low_half(const uint32_t* p) { return reinterpret_cast<Floats>(load_units(p) << 16); }
inline Floats high_half(const uint32_t* p) {
  return reinterpret_cast<Floats>(load_units(p) & 0xffff0000u);
}
constexpr int kMaxRows = 4;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

#endif

constexpr int kWidth = sizeof(Floats) / sizeof(float);

// float32 weights: a unit is one float.
struct Float32 {
  using Element = float;
  static constexpr int kElements = 1;  // of K in a weight unit
  static constexpr int kFloats = 1;    // four-byte values of a packed activation row per weight unit

  template <int R, int V>
  static inline void step(Floats (&sum)[R][V], const float* x, const uint32_t* w) {
    Floats columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = load(reinterpret_cast<const float*>(w) + v * kWidth);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const Floats value = broadcast(x + r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(value, columns[v], sum[r][v]);
    }
  }

  static constexpr auto pack = transpose_to;
};

#if OSTINATO_ISA >= 3

// bfloat16 pairs, multiplied and added by the CPU's dot product.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kElements = 2;
  static constexpr int kFloats = 1;

  template <int R, int V>
  static inline void step(Floats (&sum)[R][V], const float* x, const uint32_t* w) {
    __m512i columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = _mm512_loadu_si512(w + v * kWidth);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const __m512i pair = _mm512_castps_si512(broadcast(x + r));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sum[r][v] = _mm512_dpbf16_ps(
          sum[r][v], reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(columns[v]));
      }
    }
  }

  static constexpr auto pack = transpose_to;
};

#else

// bfloat16 pairs, widened to float: the even index of K first, then the odd one.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kElements = 2;
  static constexpr int kFloats = 2;

  template <int R, int V>
  static inline void step(Floats (&sum)[R][V], const float* x, const uint32_t* w) {
    Floats columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = low_half(w + v * kWidth);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const Floats value = broadcast(x + r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(value, columns[v], sum[r][v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = high_half(w + v * kWidth);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const Floats value = broadcast(x + R + r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(value, columns[v], sum[r][v]);
    }
  }

  static constexpr auto pack = widen_to;
};

#endif

// sums[R][32] = x[steps][R] * w[steps][32], added to what is there when `add` is set.
template <class Kind, int R>
void tile(const float* x, const uint32_t* w, int64_t steps, float* sums, bool add) {
  constexpr int V = vectors_for(R);
  for (int column = 0; column < kPanel; column += V * kWidth) {
    Floats sum[R][V];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = zero();
    }
    const float* values = x;
    const uint32_t* units = w + column;
    for (int64_t step = 0; step < steps; ++step) {
      Kind::template step<R, V>(sum, values, units);
      values += R * Kind::kFloats;
      units += kPanel;
    }
    float* out = sums + column;
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* target = out + r * kPanel + v * kWidth;
        store(target, add ? load(target) + sum[r][v] : sum[r][v]);
      }
    }
  }
}

using Tile = void (*)(const float*, const uint32_t*, int64_t, float*, bool);

template <class Kind, int... R>
constexpr std::array<Tile, sizeof...(R)> make_tiles(std::integer_sequence<int, R...>) {
  return {&tile<Kind, R + 1>...};
}

// Index `rows - 1`.
template <class Kind>
constexpr std::array<Tile, kMaxRows> kTiles = make_tiles<Kind>(std::make_integer_sequence<int, kMaxRows>{});

}  // namespace ostinato::linear
