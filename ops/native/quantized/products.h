// The products of the quantised linear op within a group of K: 8-bit activations of a few rows times 8-bit or 4-bit
// weights.
//
// All products are whole numbers. A sum and its start are at most 256 * (255 + 128) * 127 < 2**24, so even floats hold
// them exactly, in every order and on every instruction set. `sum_group` returns the sums as floats:
//   whole[R][V] = starts[R] + x * w over `steps` steps of 4 values, of V vectors of columns
//   x           [steps * quant_units][R], activations as the instruction set multiplies them (row_worker.h)
//   data        the group's steps (layout.h) from the first of the columns on
#pragma once

#include "quantized/layout.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace ostinato::linear {

#if OSTINATO_ISA >= 2 && defined(__AVX512VNNI__)

// One instruction multiplies and adds four bytes a lane: unsigned weights, signed activations.
constexpr int kQuantRows = 12;  // rows of the tallest tile
constexpr int quant_units(Widening) { return 1; }    // four-byte units of a row's activations for each step of 4 values
constexpr int quant_vectors(int) { return 2; }  // vectors of columns in a tile of this many rows
using Bytes = __m512i;
// A vector type with lanes of 32 bits. With casts around each product, compilers would copy the sums in every step.
typedef int32_t Sums __attribute__((vector_size(64)));
constexpr int kQuantWidth = 16;  // columns of a vector

OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
OSTINATO_INLINE Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
OSTINATO_INLINE Bytes high_halves(Bytes x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0f));
}
OSTINATO_INLINE Bytes from_table(Bytes x) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x);
}
using Start = int32_t;  // a lane of the sums
OSTINATO_INLINE Sums all_lanes(Start x) { return (Sums)_mm512_set1_epi32(x); }
OSTINATO_INLINE Sums add(Sums a, Sums b) { return a + b; }
OSTINATO_INLINE F32 as_floats(Sums x) { return {_mm512_cvtepi32_ps((__m512i)x)}; }

template <int R, int V>
OSTINATO_INLINE void add_step(Sums (&sum)[R][V], const uint32_t* x, const Bytes (&w)[V]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const __m512i value = _mm512_set1_epi32(static_cast<int>(x[r]));
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = (Sums)_mm512_dpbusd_epi32((__m512i)sum[r][v], w[v], value);
    }
  }
}

#elif OSTINATO_ISA >= 2

// Bytes widened to 16 bits, even and odd ones, times pairs of 16-bit activations.
constexpr int kQuantRows = 10;
constexpr int quant_units(Widening) { return 2; }
constexpr int quant_vectors(int) { return 2; }
using Sums = __m512i;
using Bytes = __m512i;
constexpr int kQuantWidth = 16;

OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
OSTINATO_INLINE Bytes masked(Bytes x, int16_t mask) { return _mm512_and_si512(x, _mm512_set1_epi16(mask)); }
template <int N>
OSTINATO_INLINE Bytes shifted(Bytes x) {
  return _mm512_srli_epi16(x, N);
}
OSTINATO_INLINE Bytes low_halves(Bytes x) { return masked(x, 0x0f0f); }
OSTINATO_INLINE Bytes high_halves(Bytes x) { return masked(shifted<4>(x), 0x0f0f); }
OSTINATO_INLINE Bytes from_table(Bytes x) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x);
}
using Start = int32_t;
OSTINATO_INLINE Sums all_lanes(Start x) { return _mm512_set1_epi32(x); }
OSTINATO_INLINE Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
OSTINATO_INLINE F32 as_floats(Sums x) { return {_mm512_cvtepi32_ps(x)}; }

template <int R, int V>
OSTINATO_INLINE void add_step(Sums (&sum)[R][V], const uint32_t* x, const Bytes (&w)[V]) {
  Bytes even[V];
  Bytes odd[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    even[v] = masked(w[v], 0xff);
    odd[v] = shifted<8>(w[v]);
  }
#pragma GCC unroll 10
  for (int r = 0; r < R; ++r) {
    const Sums x_even = all_lanes(static_cast<int32_t>(x[r]));
    const Sums x_odd = all_lanes(static_cast<int32_t>(x[R + r]));
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = add(sum[r][v], add(_mm512_madd_epi16(even[v], x_even), _mm512_madd_epi16(odd[v], x_odd)));
    }
  }
}

#elif OSTINATO_ISA == 1

// Weights of 8 bits: weights and activations are widened to pairs of 16 bits. Weights of 4 bits: bytes, whose products
// are added in 16 bits for eight steps. Their sum is at most 8 * 2 * 15 * 127 < 2**15, so no instruction saturates.
constexpr int kQuantRows = 6;
constexpr int quant_units(Widening bits) { return bits == kBytes ? 2 : 1; }
constexpr int quant_vectors(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int kQuantWidth = 8;
constexpr int64_t word_steps(Widening bits) { return bits == kTable ? 4 : 8; }  // the table has values of up to 24
// Vector types with lanes of 32 and of 16 bits. With casts around each product, compilers would copy the sums in every
// step.
typedef int32_t Sums __attribute__((vector_size(32)));
using Start = int32_t;
typedef int16_t Words __attribute__((vector_size(32)));

// One part of 4 bytes of each of 8 columns, as a product takes it. Weights of 8 bits: the even (part 0) or odd bytes,
// widened. Weights of 4 bits: the low (part 0) or high halves of all bytes.
OSTINATO_INLINE __m256i load_part(const uint8_t* data, Widening bits, int part) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  const __m256i mask = _mm256_set1_epi16(bits == kBytes ? 0x00ff : 0x0f0f);
  if (part == 1 && bits == kBytes) return _mm256_srli_epi16(x, 8);
  const __m256i values = _mm256_and_si256(part == 0 ? x : _mm256_srli_epi16(x, 4), mask);
  if (bits != kTable) return values;
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), values);
}

OSTINATO_INLINE __m256i multiply(const Sums&, __m256i w, __m256i x) { return _mm256_madd_epi16(w, x); }
OSTINATO_INLINE __m256i multiply(const Words&, __m256i w, __m256i x) { return _mm256_maddubs_epi16(w, x); }

template <class Lanes>
OSTINATO_INLINE void add_product(Lanes& sum, __m256i w, __m256i x) {
  sum += (Lanes)multiply(sum, w, x);
  asm volatile("" : "+x"(sum));  // otherwise compilers compute products of later steps early, and run out of registers
}

// Calls run(r, v) with each pair of constants. With a loop over r and v, the arrays of sums would stay in memory,
// because compilers unroll the loop after they have assigned registers.
template <int R, int V, class Run>
OSTINATO_INLINE void for_sums(const Run& run) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (run(std::integral_constant<int, kIndex / V>{}, std::integral_constant<int, kIndex % V>{}), ...);
  }(std::make_integer_sequence<int, R * V>{});
}

// sum[R][V] += products of one part of a line, which is 4 bytes of weights for each of 32 columns.
template <Widening Bits, int kPart, class Lanes, int R, int V>
OSTINATO_INLINE void add_part(Lanes (&sum)[R][V], const uint32_t* x, const uint8_t* data) {
  __m256i w[V];
  for_sums<1, V>([&](auto, auto v) __attribute__((always_inline)) {
    w[v] = load_part(data + v * 4 * kQuantWidth, Bits, kPart);
  });
  for_sums<R, V>([&](auto r, auto v) __attribute__((always_inline)) {
    add_product(sum[r][v], w[v], _mm256_set1_epi32(static_cast<int>(x[kPart * R + r])));
  });
}

template <Widening Bits, class Lanes, int R, int V>
OSTINATO_INLINE void sum_lines(Lanes (&sum)[R][V], const uint32_t* x, const uint8_t* data, int64_t lines) {
  for_sums<R, V>([&](auto r, auto v) __attribute__((always_inline)) { sum[r][v] = Lanes{}; });
  int64_t line = 0;
  do {  // at least once: with a branch around the loop, compilers keep its results in memory
    add_part<Bits, 0>(sum, x, data);
    add_part<Bits, 1>(sum, x, data);
    x += 2 * R;
    data += 4 * kPanel;
  } while (++line < lines);
}

template <Widening Bits, int R, int V>
OSTINATO_INLINE void sum_group(const uint32_t* x, const uint8_t* data, int64_t steps, const Start* starts,
                               F32 (&whole)[R][V]) {
  Sums sum[R][V];
  if constexpr (Bits == kBytes) {
    sum_lines<kBytes>(sum, x, data, steps);
  } else {
    const auto sum_words = [&](int64_t done, auto add) __attribute__((always_inline)) {
      Words words[R][V];
      sum_lines<Bits>(words, x + done * R, data + done / 2 * 4 * kPanel, std::min(word_steps(Bits), steps - done) / 2);
      for_sums<R, V>([&](auto r, auto v) __attribute__((always_inline)) {
        const auto wide = (Sums)_mm256_madd_epi16((__m256i)words[r][v], _mm256_set1_epi16(1));
        sum[r][v] = add ? sum[r][v] + wide : wide;
      });
    };
    sum_words(0, std::false_type{});
    for (int64_t done = word_steps(Bits); done < steps; done += word_steps(Bits)) sum_words(done, std::true_type{});
  }
  for_sums<R, V>([&](auto r, auto v) __attribute__((always_inline)) {
    whole[r][v].v = _mm256_cvtepi32_ps(_mm256_add_epi32((__m256i)sum[r][v], _mm256_set1_epi32(starts[r])));
  });
}

#else

// The products are computed in floats, which hold every sum exactly. The processors that use this code multiply vectors
// of integers slowly.
constexpr int kQuantRows = 4;
constexpr int quant_units(Widening) { return 4; }
constexpr int quant_vectors(int) { return 2; }
using Sums = F32;
struct Bytes {
  UintLanes v;
};
constexpr int kQuantWidth = 4;

OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  std::memcpy(&x.v, p, sizeof(x.v));
  return x;
}
OSTINATO_INLINE Bytes low_halves(Bytes x) { return {x.v & 0x0f0f0f0fu}; }
OSTINATO_INLINE Bytes high_halves(Bytes x) { return {(x.v >> 4) & 0x0f0f0f0fu}; }
OSTINATO_INLINE Bytes from_table(Bytes x) {
  uint8_t bytes[sizeof(x.v)];
  std::memcpy(bytes, &x.v, sizeof(x.v));
  for (uint8_t& byte : bytes) byte = kE2m1[byte];
  return load_bytes(bytes);
}
using Start = float;
OSTINATO_INLINE Sums all_lanes(Start x) { return broadcast(x); }
OSTINATO_INLINE Sums add(Sums a, Sums b) { return a + b; }
OSTINATO_INLINE F32 as_floats(Sums x) { return x; }

template <int R, int V>
OSTINATO_INLINE void add_step(Sums (&sum)[R][V], const uint32_t* x, const Bytes (&w)[V]) {
  for (int j = 0; j < 4; ++j) {
    F32 columns[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      columns[v].v = __builtin_convertvector((IntLanes)((w[v].v >> (8 * j)) & 0xff), FloatLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F32 value = broadcast(bit_cast<float>(x[j * R + r]));
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] = fma(value, columns[v], sum[r][v]);
    }
  }
}

#endif

#if OSTINATO_ISA != 1
template <Widening Bits, int R, int V>
OSTINATO_INLINE void sum_group(const uint32_t* x, const uint8_t* data, int64_t steps, const Start* starts,
                               F32 (&whole)[R][V]) {
  constexpr int kUnits = quant_units(Bits);
  // even and odd steps are summed apart, to hide the latency of products of few rows
  constexpr bool kTwoChains = R <= 3;
  Sums sum[R][V];
  [[maybe_unused]] Sums odd_sum[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = all_lanes(starts[r]);
      odd_sum[r][v] = all_lanes(0);
    }
  }
  int64_t step = 0;
  if constexpr (Bits == kBytes && !kTwoChains) {
    do {  // at least once: with a branch around the loop, compilers keep its results in memory
      Bytes values[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) values[v] = load_bytes(data + v * 4 * F32::width);
      add_step(sum, x, values);
      x += kUnits * R;
      data += 4 * kPanel;
    } while (++step < steps);
  } else {
    do {
      Bytes even[V];
      Bytes odd[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        even[v] = load_bytes(data + v * 4 * F32::width);
        if constexpr (Bits == kBytes) {
          odd[v] = load_bytes(data + 4 * kPanel + v * 4 * F32::width);
        } else {
          odd[v] = high_halves(even[v]);
          even[v] = low_halves(even[v]);
        }
        if constexpr (Bits == kTable) {
          odd[v] = from_table(odd[v]);
          even[v] = from_table(even[v]);
        }
      }
      add_step(sum, x, even);
      if constexpr (kTwoChains) {
        add_step(odd_sum, x + kUnits * R, odd);
      } else {
        add_step(sum, x + kUnits * R, odd);
      }
      x += 2 * kUnits * R;
      data += Bits == kBytes ? 8 * kPanel : 4 * kPanel;
    } while ((step += 2) < steps);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      if constexpr (kTwoChains) sum[r][v] = add(sum[r][v], odd_sum[r][v]);
      whole[r][v] = as_floats(sum[r][v]);
    }
  }
}
#endif

static_assert(kQuantWidth == F32::width);

}  // namespace ostinato::linear
