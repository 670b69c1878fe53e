// A worker of the linear op over weights that are floats of 8 bits (e4m3): rows of activations times panels.
//
// The weights are widened to float32 in registers, which is exact, and the activations are not rounded. For every
// output element, one float accumulator runs over a group of K in ascending order. It is scaled and added to the sum of
// the earlier groups. So the bits of a row do not depend on other rows.
#pragma once

#include "linear/tiles.h"
#include "linear/transpose.h"
#include "quantized/activations.h"
#include "quantized/layout.h"

namespace ostinato::linear {

// The weights of one vector of columns, times 2 ** -8. The bits of an e4m3, shifted, are a float16 whose value is
// smaller by this factor, because the bias of its exponent is larger by 8. NaN has no such float16, so weights are
// checked for NaN when they are loaded.
OSTINATO_INLINE F32 load_float8(const uint8_t* p) {
#if OSTINATO_ISA >= 2
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  return {_mm512_cvtph_ps(_mm256_or_si256(sign, rest))};
#elif OSTINATO_ISA == 1
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
  return {_mm256_cvtph_ps(_mm_or_si128(sign, rest))};
#else
  F32 x;
  for (int i = 0; i < F32::width; ++i) x.v[i] = from_float8(p[i]) * 0x1p-8f;
  return x;
#endif
}

// sums[R][32] = x[in_features][R] * the panel.
template <int R>
void float8_tile(const float* x, const uint8_t* panel, int64_t in_features, const QuantizedShape& shape, float* sums) {
  constexpr int V = vectors_for(R);
  const int64_t size = shape.format.group_size;
  for (int column = 0; column < kPanel; column += V * F32::width) {
    F32 total[R][V];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) total[r][v] = broadcast(0.0f);
    }
    const float* values = x;
    for (int64_t group = 0; group < shape.groups; ++group) {
      const uint8_t* header = panel + shape.group_offset(group);
      const uint8_t* data = header + shape.format.header_bytes() + column;
      const int64_t count = std::min(size, in_features - group * size);
      F32 sum[R][V];
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = broadcast(0.0f);
      }
      for (int64_t k = 0; k < count; ++k, values += R, data += kPanel) {
        F32 columns[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) columns[v] = load_float8(data + v * F32::width);
        add_products(sum, values, columns);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const F32 scale = load_factors(shape.format, header, column + v * F32::width) * broadcast(0x1p8f);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) total[r][v] = fma(sum[r][v], scale, total[r][v]);
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(sums + r * kPanel + column + v * F32::width, total[r][v]);
    }
  }
}

using Float8Tile = void (*)(const float* x, const uint8_t* panel, int64_t in_features, const QuantizedShape& shape,
                            float* sums);

// Rows of the tallest tile: half as many as of bfloat16, because two sets of sums are kept.
constexpr int kFloat8Rows = kMaxRows / 2;

template <int... R>
constexpr std::array<Float8Tile, sizeof...(R)> make_float8_tiles(std::integer_sequence<int, R...>) {
  return {&float8_tile<R + 1>...};
}

// The function for `rows` rows is at index `rows - 1`.
constexpr std::array<Float8Tile, kFloat8Rows> kFloat8Tiles =
    make_float8_tiles(std::make_integer_sequence<int, kFloat8Rows>{});

template <class In, class Out>
class Float8RowWorker {
 public:
  Float8RowWorker(const Problem& problem, const QuantizedWeight& weight, const RowGroups& groups)
      : p_(problem), weight_(weight), groups_(groups) {}

  void operator()(int64_t task) {
    const int64_t group = task / weight_.panels;
    if (group != packed_group_) pack(group);
    multiply(group, task % weight_.panels);
  }

 private:
  // Packs each block as [in_features][rows] floats.
  void pack(int64_t group) {
    packed_group_ = group;
    const int64_t first_row = groups_.first_row(group);
    const int64_t rows = groups_.first_row(group + 1) - first_row;
    const int64_t size = p_.in_features;
    float* memory = scratch(line_bytes<In>(p_) / 4 + (rows + kFloat8Rows) * size);
    auto* line = reinterpret_cast<In*>(memory);
    activations_ = memory + line_bytes<In>(p_) / 4;
    float* wide = activations_ + rows * size;
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      const int height = groups_.blocks.height(block);
      for (int r = 0; r < height; ++r) {
        const In* x = row_in_order(p_, row + r, line);
        for (int64_t k = 0; k < size; ++k) wide[r * size + k] = to_float(x[k]);
      }
      transpose_units(wide, size * 4, height, size, activations_ + (row - first_row) * size, height);
    }
  }

  void multiply(int64_t group, int64_t panel) const {
    alignas(64) float sums[kFloat8Rows * kPanel];
    alignas(64) float bias[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<In>(p_, column, bias);
    const int64_t first_row = groups_.first_row(group);
    for (int64_t block = groups_.first_block(group); block < groups_.first_block(group + 1); ++block) {
      const int64_t row = groups_.blocks.begin(block);
      const int rows = groups_.blocks.height(block);
      const float* x = activations_ + (row - first_row) * p_.in_features;
      kFloat8Tiles[rows - 1](x, weight_.panel(panel), p_.in_features, weight_, sums);
      write_rows<Out>(p_, sums, rows, bias, row, column);
    }
  }

  const Problem& p_;
  const QuantizedWeight& weight_;
  const RowGroups& groups_;
  int64_t packed_group_ = -1;
  float* activations_ = nullptr;
};

}  // namespace ostinato::linear
