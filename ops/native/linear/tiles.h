// Register tiles of the packed linear op: a few rows of activations times one panel of packed weights.
//
// Activations are packed to [steps][rows] in the weights' four-byte units, or widened to float where the CPU has no
// bfloat16 dot product. In each pass (row_worker.h), every output element is one float accumulator that runs over K in
// ascending order, whatever the height and width of the tile. Passes are added in ascending order. So the bits of a row
// do not depend on other rows.
#pragma once

#include "core/register_tiles.h"
#include "linear/layout.h"

#include <array>
#include <utility>

namespace ostinato::linear {

// Rows of the tallest tile, and the width in vectors of a tile of `rows` rows. The accumulators fill the registers (32
// with AVX-512 and NEON, else 16), and there are always enough of them to hide the latency of an addition.
#if OSTINATO_ISA >= 2
constexpr int kMaxRows = 14;
constexpr int vectors_for(int) { return 2; }
#elif OSTINATO_ISA == 1
constexpr int kMaxRows = 6;
constexpr int vectors_for(int rows) { return rows <= 2 ? 4 : 2; }
#else
constexpr int kMaxRows = 4;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// Weights that are prefetched while a tile is computed: at every step, the line at
// `begin + column * per_column + step * per_step`, where `column` is the tile's first column. They are prefetched into the
// second level cache. Prefetches into the first one read memory at two thirds of that speed on a Zen 4.
struct Fetch {
  // The tile's own weights, 32 steps ahead of a tall tile and 8 steps ahead of a short one.
  static Fetch ahead(const uint32_t* w, int rows) {
    const int64_t bytes = rows > kMaxRows / 2 ? 4096 : 1024;
    return {reinterpret_cast<const char*>(w) + bytes, kPanel * 4, 4};
  }

  // Nothing: all weights are in the first level cache already.
  static Fetch none(const uint32_t* w) { return {reinterpret_cast<const char*>(w), 0, 0}; }

  // All blocks are now multiplied by `steps` steps. This is a block's share of the `num_bytes` at `next`, which the
  // next steps need.
  static Fetch share(const void* next, int64_t num_bytes, int64_t steps, int64_t block, int64_t blocks, int rows) {
    const int64_t bytes = num_bytes / blocks;
    const int64_t columns = vectors_for(rows) * F32::width;
    return {static_cast<const char*>(next) + bytes * block, ceil_divide(bytes * columns, kPanel * steps), bytes / kPanel};
  }

  const char* begin;
  int64_t per_step;    // bytes
  int64_t per_column;  // bytes
};

// sum[r][v] += x[r] * columns[v]
template <int R, int V>
OSTINATO_INLINE void add_products(F32 (&sum)[R][V], const float* x, const F32 (&columns)[V]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
    const F32 value = broadcast(x[r]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      // With few sums, the compiler keeps them in registers itself, and reads operands of `fma` from memory.
      if constexpr (R * V > 8) {
        add_product(sum[r][v], value, columns[v]);
      } else {
        sum[r][v] = fma(value, columns[v], sum[r][v]);
      }
    }
  }
}

// A kind of weights has step(sum, x, units): sum[r][v] += x[r] * units(v), for one unit of K.

// float32 weights: a unit is one float.
struct Float32 {
  using Element = float;
  static constexpr int kElements = 1;  // elements of K in a unit of the weight
  static constexpr int kFloats = 1;    // four-byte values of a packed activation row for each unit of the weight

  template <int R, int V, class Units>
  OSTINATO_INLINE static void step(F32 (&sum)[R][V], const float* x, const Units& units) {
    F32 columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = units(v);
    add_products(sum, x, columns);
  }
};

#if OSTINATO_ISA >= 3

// bfloat16 pairs, multiplied and added by the CPU's dot product.
struct BFloat16Pairs {
  using Element = BFloat16;
  static constexpr int kElements = 2;
  static constexpr int kFloats = 1;

  template <int R, int V, class Units>
  OSTINATO_INLINE static void step(F32 (&sum)[R][V], const float* x, const Units& units) {
    __m512bh columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = (__m512bh)units(v).v;
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const auto pair = (__m512bh)broadcast(x[r]).v;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v].v = _mm512_dpbf16_ps(sum[r][v].v, pair, columns[v]);
    }
  }
};

#else

// bfloat16 pairs, widened to float: the even index of K first, then the odd one.
struct BFloat16Pairs {
  using Element = BFloat16;
  static constexpr int kElements = 2;
  static constexpr int kFloats = 2;

  template <int R, int V, class Units>
  OSTINATO_INLINE static void step(F32 (&sum)[R][V], const float* x, const Units& units) {
    F32 columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = low_of_pairs(units(v));
    add_products(sum, x, columns);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = high_of_pairs(units(v));
    add_products(sum, x + R, columns);
  }
};

#endif

// How the products of a tile are summed: from zero; as the next products of the sums in memory; or from zero, and then
// added to the sums in memory.
enum class Sum { begin, go_on, add };

// sums[R][32] = x[steps][R] * w[steps][32], as `mode` says.
template <class Kind, int R>
void tile(const float* x, const uint32_t* w, int64_t steps, float* sums, Sum mode, const Fetch& fetch) {
  constexpr int V = vectors_for(R);
  constexpr bool tall = R > kMaxRows / 2;
  for (int column = 0; column < kPanel; column += V * F32::width) {
    F32 sum[R][V];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sum[r][v] = mode == Sum::go_on ? load(sums + r * kPanel + column + v * F32::width) : broadcast(0.0f);
      }
    }
    const float* values = x;
    const uint32_t* units = w + column;
    const char* fetched = fetch.begin + column * fetch.per_column;
    const int64_t per_step = fetch.per_step;
    const auto advance = [&]() OSTINATO_INLINED {
      if constexpr (tall || (OSTINATO_ISA == 1 && Kind::kFloats == 2)) {
        // With tall tiles the hardware's prefetcher falls behind. Prefetching makes short tiles slower with AVX-512. On
        // a processor that has only AVX2 it makes them faster if they widen their weights, and else slower.
        __builtin_prefetch(fetched, 0, 2);
        if constexpr (V * F32::width > 16) __builtin_prefetch(fetched + 64, 0, 2);
        fetched += per_step;
      }
      const auto* vectors = reinterpret_cast<const float*>(units);
      Kind::step(sum, values, [&](int v) OSTINATO_INLINED { return load(vectors + v * F32::width); });
      values += R * Kind::kFloats;
      units += kPanel;
    };
    int64_t step = 0;
    if constexpr (OSTINATO_ISA == 1 && tall && Kind::kFloats == 1) {
      // Two steps of one product each share the instructions of the loop, as the two products of a bfloat16 step do.
      for (; step + 2 <= steps; step += 2) {
        advance();
        advance();
      }
    }
    for (; step < steps; ++step) advance();
    float* out = sums + column;
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* target = out + r * kPanel + v * F32::width;
        store(target, mode == Sum::add ? load(target) + sum[r][v] : sum[r][v]);
      }
    }
  }
}

using Tile = void (*)(const float* x, const uint32_t* w, int64_t steps, float* sums, Sum mode, const Fetch& fetch);

template <class Kind, int... R>
constexpr std::array<Tile, sizeof...(R)> make_tiles(std::integer_sequence<int, R...>) {
  return {&tile<Kind, R + 1>...};
}

// The function for `rows` rows is at index `rows - 1`.
template <class Kind>
constexpr std::array<Tile, kMaxRows> kTiles = make_tiles<Kind>(std::make_integer_sequence<int, kMaxRows>{});

}  // namespace ostinato::linear
