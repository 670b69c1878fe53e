// Register tiles of the quantised linear op: a few rows of 8-bit activations times one panel of quantised weights.
//
// Within a group of K the products are whole numbers and their sum is exact, in every order and on every instruction
// set: at most 256 * 255 * 127 < 2**24, so even floats hold it. The group's sum then becomes a float, is scaled and
// added to the result's float32 accumulator, groups in ascending order. So the bits of a row do not depend on other rows.
#pragma once

#include "quantized/layout.h"

#include <array>
#include <utility>

namespace ostinato::linear {

// A block of quantised activations as tiles read it; R rows.
struct QuantizedRows {
  const uint32_t* units;  // [steps * kQuantUnits][R]
  const float* scales;    // [groups][R]
  const float* sums;      // [groups][R], of the group's values
};

#if OSTINATO_ISA >= 2 && defined(__AVX512VNNI__)

// One instruction multiplies and adds four bytes a lane: unsigned weights, signed activations.
constexpr int kQuantRows = 12;  // of the tallest tile
constexpr int kQuantUnits = 1;  // four-byte units of a row's activations for each step of 4 values
using Bytes = __m512i;
// of 32 bits in name too: with casts around each product, compilers copy the sums in every step
typedef int32_t Sums __attribute__((vector_size(64)));
constexpr int kQuantWidth = 16;  // columns of a vector

OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
OSTINATO_INLINE Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
OSTINATO_INLINE Bytes high_halves(Bytes x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0f));
}
OSTINATO_INLINE Sums all_lanes(int32_t x) { return (Sums)_mm512_set1_epi32(x); }
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

#elif OSTINATO_ISA >= 1

// Bytes widened to 16 bits, even and odd ones, times pairs of 16-bit activations.
constexpr int kQuantUnits = 2;
#if OSTINATO_ISA >= 2
constexpr int kQuantRows = 10;
using Sums = __m512i;
using Bytes = __m512i;
constexpr int kQuantWidth = 16;
OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
OSTINATO_INLINE Bytes masked(Bytes x, int16_t mask) { return _mm512_and_si512(x, _mm512_set1_epi16(mask)); }
template <int N>
OSTINATO_INLINE Bytes shifted(Bytes x) {
  return _mm512_srli_epi16(x, N);
}
OSTINATO_INLINE Sums all_lanes(int32_t x) { return _mm512_set1_epi32(x); }
OSTINATO_INLINE Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
OSTINATO_INLINE Sums multiply_pairs(Bytes a, Sums b) { return _mm512_madd_epi16(a, b); }
OSTINATO_INLINE F32 as_floats(Sums x) { return {_mm512_cvtepi32_ps(x)}; }
#else
constexpr int kQuantRows = 4;
using Sums = __m256i;
using Bytes = __m256i;
constexpr int kQuantWidth = 8;
OSTINATO_INLINE Bytes load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
OSTINATO_INLINE Bytes masked(Bytes x, int16_t mask) { return _mm256_and_si256(x, _mm256_set1_epi16(mask)); }
template <int N>
OSTINATO_INLINE Bytes shifted(Bytes x) {
  return _mm256_srli_epi16(x, N);
}
OSTINATO_INLINE Sums all_lanes(int32_t x) { return _mm256_set1_epi32(x); }
OSTINATO_INLINE Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
OSTINATO_INLINE Sums multiply_pairs(Bytes a, Sums b) { return _mm256_madd_epi16(a, b); }
OSTINATO_INLINE F32 as_floats(Sums x) { return {_mm256_cvtepi32_ps(x)}; }
#endif
OSTINATO_INLINE Bytes low_halves(Bytes x) { return masked(x, 0x0f0f); }
OSTINATO_INLINE Bytes high_halves(Bytes x) { return masked(shifted<4>(x), 0x0f0f); }

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
      sum[r][v] = add(sum[r][v], add(multiply_pairs(even[v], x_even), multiply_pairs(odd[v], x_odd)));
    }
  }
}

#else

// Floats, which hold every sum exactly: vectors of integers multiply slowly where this is used.
constexpr int kQuantRows = 4;
constexpr int kQuantUnits = 4;
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
OSTINATO_INLINE Sums all_lanes(int32_t x) { return broadcast(static_cast<float>(x)); }
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

static_assert(kQuantWidth == F32::width);

// sums[R][32] = x[groups][R] * w[groups][32] for the groups that `steps` steps make, the last one possibly shorter;
// added to what is there when `added` is set.
template <int Bits, int R>
void quantized_tile(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape, float* sums,
                    bool added) {
  constexpr int V = 2;
  constexpr bool kTwoChains = R <= 2;  // even and odd steps apart, to hide the latency of a few rows' products
  const QuantFormat& format = shape.format;
  for (int column = 0; column < kPanel; column += V * F32::width) {
    const uint32_t* units = x.units;
    const uint8_t* panel = w;
    bool add_before = added;
    int64_t group = 0;
    for (int64_t done = 0; done < steps; done += shape.group_steps, ++group) {
      const int64_t count = std::min(shape.group_steps, steps - done);
      const auto* scales = reinterpret_cast<const BFloat16*>(panel) + column;
      const uint8_t* data = panel + format.header_bytes() + column * 4;
      const float* row_sums = x.sums + group * R;
      Sums sum[R][V];
      [[maybe_unused]] Sums odd_sum[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sum[r][v] = odd_sum[r][v] = all_lanes(0);
      }
      if constexpr (Bits == 8 && !kTwoChains) {
        int64_t step = 0;
        do {  // at least once: with a branch around the loop, compilers keep its results in memory
          Bytes values[V];
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) values[v] = load_bytes(data + v * 4 * F32::width);
          add_step(sum, units, values);
          units += kQuantUnits * R;
          data += 4 * kPanel;
        } while (++step < count);
      } else {
        int64_t step = 0;
        do {
          Bytes even[V];
          Bytes odd[V];
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            even[v] = load_bytes(data + v * 4 * F32::width);
            if constexpr (Bits == 8) {
              odd[v] = load_bytes(data + 4 * kPanel + v * 4 * F32::width);
            } else {
              odd[v] = high_halves(even[v]);
              even[v] = low_halves(even[v]);
            }
          }
          add_step(sum, units, even);
          if constexpr (kTwoChains) {
            add_step(odd_sum, units + kQuantUnits * R, odd);
          } else {
            add_step(sum, units + kQuantUnits * R, odd);
          }
          units += 2 * kQuantUnits * R;
          data += Bits == 8 ? 8 * kPanel : 4 * kPanel;
        } while ((step += 2) < count);
      }
      F32 scale[V];
      F32 zero[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        scale[v] = load(scales + v * F32::width);
        zero[v] = broadcast(static_cast<float>(1 << (Bits - 1)));
        if (!format.symmetric) zero[v] = zero[v] + load(scales + kPanel + v * F32::width);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 row_scale = broadcast(x.scales[group * R + r]);
        const F32 row_sum = broadcast(-row_sums[r]);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          Sums whole = sum[r][v];
          if constexpr (kTwoChains) whole = add(whole, odd_sum[r][v]);
          const F32 exact = fma(zero[v], row_sum, as_floats(whole));
          float* target = sums + r * kPanel + column + v * F32::width;
          store(target, fma(exact, scale[v] * row_scale, add_before ? load(target) : broadcast(0.0f)));
        }
      }
      add_before = true;
      panel += format.header_bytes() + count * format.step_bytes();
    }
  }
}

using QuantizedTile = void (*)(const QuantizedRows& x, const uint8_t* w, int64_t steps, const QuantizedShape& shape,
                               float* sums, bool added);

template <int Bits, int... R>
constexpr std::array<QuantizedTile, sizeof...(R)> make_quantized_tiles(std::integer_sequence<int, R...>) {
  return {&quantized_tile<Bits, R + 1>...};
}

// Index `rows - 1`.
template <int Bits>
constexpr std::array<QuantizedTile, kQuantRows> kQuantizedTiles =
    make_quantized_tiles<Bits>(std::make_integer_sequence<int, kQuantRows>{});

}  // namespace ostinato::linear
