// The linear op over quantised weights by matrix tiles (core/amx.h), for steps of several rows.
//
// Within a group of K the sums are whole numbers and exact. A group's sum is scaled and added as in tiles.h, groups in
// ascending order. So the bits are those of tiles.h, which computes steps of few rows.
//
// A chunk is up to 64 values of K of one group: a tile A of 16 rows, and two tiles B of 16 columns each. Two blocks of
// rows are multiplied by a panel at a time. The tiles of two groups are multiplied and stored, and then their sums are
// scaled with vectors. Tile instructions and vectors are not interleaved further: beside tile instructions, products of
// vectors run at half their rate (docs/matrix-tiles.md).
//
// The offset is subtracted from the values of symmetric weights, which become signed bytes. Scaling then needs no
// correction for the offset. Other weights are multiplied as unsigned bytes. The unpacked bytes of a panel serve all
// rows.
#pragma once

#include "linear/amx_linear.h"
#include "quantized/activations.h"
#include "quantized/layout.h"

namespace ostinato::linear {

inline int64_t chunk_steps(const QuantizedShape& shape) { return std::min<int64_t>(shape.group_steps, kTileSteps); }

// Whether matrix tiles are faster for this number of rows, by measurement (docs/matrix-tiles.md). They need groups of
// whole chunks. With weights in memory both ways take about the same time from 4 rows on. With weights in a cache, tiles
// are slower for fewer rows than these: a tile computes 16 rows in any case, and its sums are stored before they are scaled.
inline bool suits_tiles(const QuantizedShape& shape, int64_t rows) {
  const int64_t least_rows = shape.format.group_size >= 64 ? 13 : 16;
  return rows >= least_rows && shape.format.group_size >= 16 && shape.group_steps % chunk_steps(shape) == 0;
}

// ---- the bytes of tiles B ----------------------------------------------------------------------------------------

// The byte that stands for each value of 4 bits.
struct HalvesTable {
  HalvesTable(const QuantFormat& format) {
    for (int i = 0; i < 16; ++i) {
      const int value = format.is_e2m1 ? kE2m1[i] : i;
      bytes[i] = static_cast<uint8_t>(value - (format.symmetric ? format.offset() : 0));
    }
  }
  alignas(16) uint8_t bytes[16];
};

// Two steps of a panel from a line of 4-bit values: the low halves first, then the high halves.
inline void unpack_line(const uint8_t* line, const HalvesTable& table, uint8_t* out) {
  constexpr int kLine = 4 * kPanel;
#if OSTINATO_ISA >= 2
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.bytes)));
  const __m512i low = _mm512_set1_epi8(0x0f);
  for (int i = 0; i < kLine; i += 64) {
    const __m512i both = _mm512_loadu_si512(line + i);
    _mm512_storeu_si512(out + i, _mm512_shuffle_epi8(bytes, _mm512_and_si512(both, low)));
    _mm512_storeu_si512(out + kLine + i, _mm512_shuffle_epi8(bytes, _mm512_and_si512(_mm512_srli_epi16(both, 4), low)));
  }
#else
  for (int i = 0; i < kLine; ++i) {
    out[i] = table.bytes[line[i] & 15];
    out[kLine + i] = table.bytes[line[i] >> 4];
  }
#endif
}

// Bytes less 128, modulo 256. `count` is a multiple of 64.
inline void make_signed(const uint8_t* data, int64_t count, uint8_t* out) {
#if OSTINATO_ISA >= 2
  for (int64_t i = 0; i < count; i += 64) {
    _mm512_storeu_si512(out + i, _mm512_xor_si512(_mm512_loadu_si512(data + i), _mm512_set1_epi8(-128)));
  }
#else
  for (int64_t i = 0; i < count; ++i) out[i] = data[i] ^ 0x80;
#endif
}

// ---- the sums of some groups -------------------------------------------------------------------------------------

// What the tiles of some groups are multiplied from.
struct GroupTiles {
  const int8_t* a;             // [groups][chunks][height][4 * chunk], of the first block
  int64_t block_bytes;         // from block to block
  const uint8_t* const* b;     // of each group: [chunks][chunk][32 columns][4]
  int height;
  int chunk;                   // steps
  int chunks;
};

template <int C, int A, int B, bool kSigned>
OSTINATO_INLINE void add_products() {
  if constexpr (kSigned) {
    amx::multiply_signed_bytes<C, A, B>();
  } else {
    amx::multiply_bytes<C, A, B>();
  }
}

// whole[groups][kPairRows][32] = the exact sums of each group. A tile is stored just before its register is used again,
// because storing it sooner would wait for its products.
template <int kBlocks, bool kSigned>
void multiply_groups(const GroupTiles& x, int64_t groups, int32_t* whole) {
  constexpr int64_t kStride = kPanel * 4;
  const int64_t row_bytes = x.chunk * 4;
  const int64_t below = x.height * kPanel;
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t* const before = whole + (g - 1) * kPairRows * kPanel;
    const auto begin = [&]<int C>(std::integral_constant<int, C>) __attribute__((always_inline)) {
      if (g > 0) amx::store<C>(const_cast<int32_t*>(before) + C / 2 * below + C % 2 * amx::kTileColumns, kStride);
      amx::zero<C>();
    };
    for (int c = 0; c < x.chunks; ++c) {
      const int8_t* a = x.a + (g * x.chunks + c) * x.height * row_bytes;
      const uint8_t* b = x.b[g] + c * x.chunk * kStride;
      amx::load<4>(a, row_bytes);
      amx::load<6>(b, kStride);
      if (c == 0) begin(std::integral_constant<int, 0>{});
      add_products<0, 4, 6, kSigned>();
      amx::load<7>(b + amx::kTileBytes, kStride);
      if (c == 0) begin(std::integral_constant<int, 1>{});
      add_products<1, 4, 7, kSigned>();
      if constexpr (kBlocks == 2) {
        amx::load<5>(a + x.block_bytes, row_bytes);
        if (c == 0) begin(std::integral_constant<int, 2>{});
        add_products<2, 5, 6, kSigned>();
        if (c == 0) begin(std::integral_constant<int, 3>{});
        add_products<3, 5, 7, kSigned>();
      }
    }
  }
  int32_t* last = whole + (groups - 1) * kPairRows * kPanel;
  amx::store<0>(last, kStride);
  amx::store<1>(last + amx::kTileColumns, kStride);
  if constexpr (kBlocks == 2) {
    amx::store<2>(last + below, kStride);
    amx::store<3>(last + below + amx::kTileColumns, kStride);
  }
}

// The factors of some groups, as floats.
struct GroupFactors {
  const float* rows;       // [groups][kPairRows], scales
  const float* row_sums;   // [groups][kPairRows], minus the sums of the rows
  const float* columns;    // [groups][2][32], scales; zero points or minimums
};

enum Scaling : int { kScales, kZeroPoints, kMinimums };

inline F32 load_whole(const int32_t* p) {
#if OSTINATO_ISA >= 2
  return {_mm512_cvtepi32_ps(_mm512_load_si512(p))};
#elif OSTINATO_ISA == 1
  return {_mm256_cvtepi32_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)))};
#else
  F32 x;
  for (int i = 0; i < F32::width; ++i) x.v[i] = static_cast<float>(p[i]);
  return x;
#endif
}

// sums[rows][32] = whole[groups][kPairRows][32], each group scaled by the expressions of `Factors`; added to the values
// in `sums` if `added` is set. Rows are computed by eights, so up to seven more are written.
template <Scaling kScaling>
void add_groups(const int32_t* whole, int64_t groups, const GroupFactors& factors, int64_t rows, bool added, float* sums) {
  constexpr int kRows = 8;
  constexpr int kVectors = 2;
  for (int64_t row = 0; row < rows; row += kRows) {
    for (int column = 0; column < kPanel; column += kVectors * F32::width) {
      float* target = sums + row * kPanel + column;
      F32 total[kRows][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          total[r][v] = added ? load(target + r * kPanel + v * F32::width) : broadcast(0.0f);
        }
      }
      const int32_t* exact = whole + row * kPanel + column;
      const float* row_scales = factors.rows + row;
      const float* row_sums = factors.row_sums + row;
      const float* scales = factors.columns + column;
      for (int64_t g = 0; g < groups; ++g) {
        F32 scale[kVectors];
        F32 zero[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          scale[v] = load(scales + v * F32::width);
          if constexpr (kScaling != kScales) zero[v] = load(scales + kPanel + v * F32::width);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const F32 row_scale = broadcast(row_scales[r]);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            const F32 sum = load_whole(exact + r * kPanel + v * F32::width);
            if constexpr (kScaling == kScales) {
              total[r][v] = fma(sum, scale[v] * row_scale, total[r][v]);
            } else {
              total[r][v] = Factors{scale[v], zero[v]}.add_product(kScaling == kMinimums, sum, row_scale,
                                                                   broadcast(row_sums[r]), total[r][v]);
            }
          }
        }
        exact += kPairRows * kPanel;
        row_scales += kPairRows;
        row_sums += kPairRows;
        scales += 2 * kPanel;
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) store(target + r * kPanel + v * F32::width, total[r][v]);
      }
    }
  }
}

// The sums of this many groups stay in the first level cache, beside the tiles: 8 KiB.
constexpr int64_t kGroupsAtOnce = 2;

// The part of the next panel that is fetched into the second level cache while a pair of blocks is multiplied.
struct NextPanel {
  const uint8_t* data;  // null = nothing
  int64_t bytes;
};

// sums[rows][32] = all groups of a pair of blocks (one block if kBlocks is 1).
template <int kBlocks, Scaling kScaling>
void multiply_pair(GroupTiles x, int64_t groups, GroupFactors factors, int64_t rows, NextPanel next, float* sums) {
  alignas(64) int32_t whole[kGroupsAtOnce * kPairRows * kPanel];
  for (int64_t first = 0; first < groups; first += kGroupsAtOnce) {
    const int64_t count = std::min(kGroupsAtOnce, groups - first);
    if (next.data != nullptr) {
      const int64_t end = next.bytes * (first + count) / groups;
      for (int64_t byte = next.bytes * first / groups; byte < end; byte += 64) __builtin_prefetch(next.data + byte, 0, 2);
    }
    multiply_groups<kBlocks, kScaling == kScales>(x, count, whole);
    x.a += count * x.chunks * x.height * x.chunk * 4;
    x.b += count;
    add_groups<kScaling>(whole, count, factors, rows, first > 0, sums);
    factors.rows += count * kPairRows;
    factors.row_sums += count * kPairRows;
    factors.columns += count * 2 * kPanel;
  }
}

using MultiplyPair = void (*)(GroupTiles x, int64_t groups, GroupFactors factors, int64_t rows, NextPanel next, float* sums);

inline MultiplyPair choose_multiply_pair(int blocks, const QuantFormat& format) {
  if (format.symmetric) return blocks == 2 ? multiply_pair<2, kScales> : multiply_pair<1, kScales>;
  if (format.has_minimums) return blocks == 2 ? multiply_pair<2, kMinimums> : multiply_pair<1, kMinimums>;
  return blocks == 2 ? multiply_pair<2, kZeroPoints> : multiply_pair<1, kZeroPoints>;
}

template <Widening Bits, class In, class Out>
class QuantizedTileWorker {
 public:
  QuantizedTileWorker(const Problem& problem, const QuantizedWeight& weight, const TileBlocks& blocks)
      : p_(problem),
        weight_(weight),
        blocks_(blocks),
        table_(weight.format),
        chunk_(chunk_steps(weight)),
        chunks_(weight.group_steps / chunk_),
        steps_(weight.groups * weight.group_steps),
        registers_(shapes(blocks.height, static_cast<int>(chunk_))) {}
  ~QuantizedTileWorker() { fence_lines(); }

  // Packs every block: values [chunks of K][rows][4 * chunk], scales and minus sums [pairs][groups][kPairRows]. Missing
  // rows are zero.
  void pack(int64_t group) {
    const int64_t first = blocks_.first_block(group);
    const int64_t count = blocks_.first_block(group + 1) - first;
    const int64_t factors = ceil_divide(count, 2) * pair_factors();
    const int64_t panel_bytes = steps_ * 4 * kPanel;
    const int64_t row_bytes = round_up(steps_ * 4 + 64, 64);  // whole vectors are written
    const int64_t value_bytes = round_up(count * block_values(), 64);
    const int64_t bytes = line_bytes<In>(p_) + panel_bytes + row_bytes + value_bytes;
    float* memory = scratch(bytes / 4 + 2 * factors + weight_.groups * 2 * kPanel);
    auto* ordered = reinterpret_cast<In*>(memory);
    memory += line_bytes<In>(p_) / 4;
    panel_ = reinterpret_cast<uint8_t*>(memory);
    auto* line = reinterpret_cast<int8_t*>(panel_ + panel_bytes);
    values_ = line + row_bytes;
    scales_ = memory + (panel_bytes + row_bytes + value_bytes) / 4;
    sums_ = scales_ + factors;
    columns_ = sums_ + factors;
    std::memset(scales_, 0, 2 * factors * sizeof(float));
    for (int64_t b = 0; b < count; ++b) {
      const int rows = blocks_.num_rows(first + b);
      for (int r = 0; r < blocks_.height; ++r) {
        int8_t* target = values_ + b * block_values() + r * chunk_ * 4;
        if (r < rows) {
          const In* x = row_in_order(p_, blocks_.row(first + b) + r, ordered);
          pack_row(x, b / 2 * pair_factors() + b % 2 * blocks_.height + r, line, target);
        } else {
          for (int64_t tile = 0; tile < weight_.groups * chunks_; ++tile) {
            std::memset(target + tile * blocks_.height * chunk_ * 4, 0, chunk_ * 4);
          }
        }
      }
    }
  }

  void multiply(int64_t group, int64_t panel) {
    alignas(64) float bias[kPanel];
    const int64_t column = panel * kPanel;
    load_bias<In>(p_, column, bias);
    unpack(weight_.panel(panel));
    const int64_t first = blocks_.first_block(group);
    const int64_t last = blocks_.first_block(group + 1);
    const int64_t share = weight_.panel_bytes / ceil_divide(last - first, 2);
    NextPanel next{panel + 1 < weight_.panels ? weight_.panel(panel + 1) : nullptr, share};
    for (int64_t block = first; block < last; block += 2) {
      alignas(64) float sums[kPairRows * kPanel];
      const int64_t end = std::min(block + 2, last);
      const int64_t row = blocks_.row(block);
      const int64_t rows = blocks_.row(end) - row;
      const int64_t factor = (block - first) / 2 * pair_factors();
      fetch_output<Out>(p_, row, rows, column);
      const GroupTiles x{values_ + (block - first) * block_values(), block_values(), tiles_.data(), blocks_.height,
                         static_cast<int>(chunk_), static_cast<int>(chunks_)};
      choose_multiply_pair(static_cast<int>(end - block), weight_.format)(
          x, weight_.groups, {scales_ + factor, sums_ + factor, columns_}, rows, next, sums);
      if (next.data != nullptr) next.data += share;
      write_rows<Out>(p_, sums, static_cast<int>(rows), bias, row, column);
    }
  }

 private:
  static amx::TileShapes shapes(int height, int chunk) {
    amx::TileShapes shapes;
    shapes.set(0, 4, height, amx::kTileBytes);
    shapes.set(4, 6, height, chunk * 4);
    shapes.set(6, 8, chunk, amx::kTileBytes);
    return shapes;
  }

  int64_t block_values() const { return steps_ * 4 * blocks_.height; }  // bytes
  int64_t pair_factors() const { return weight_.groups * kPairRows; }

  // Quantises a row. `target` is its place in the first tile, `factor` the index of its first factors, and `line`
  // memory for a group.
  void pack_row(const In* x, int64_t factor, int8_t* line, int8_t* target) {
    const int64_t size = weight_.format.group_size;
    const int64_t chunk_bytes = chunk_ * 4;
    // `quantize_group` writes vectors of 16 values. A row of a tile that consists of them is written in place.
    const bool in_place = chunks_ == 1 && size % 16 == 0;
    for (int64_t g = 0; g < weight_.groups; ++g, factor += kPairRows) {
      const int64_t begin = g * size;
      const int64_t present = std::min(size, p_.in_features - begin);
      const int64_t padded = std::min(size, weight_.steps * 4 - begin);
      int8_t* values = in_place ? target : line;
      sums_[factor] = -quantize_group(x + begin, present, padded, values, scales_ + factor);
      if (padded < size) std::memset(values + padded, 0, size - padded);
      for (int64_t c = 0; c < chunks_; ++c, target += blocks_.height * chunk_bytes) {
        if (in_place) continue;
        if (chunk_bytes == amx::kTileBytes) {
          std::memcpy(target, line + c * chunk_bytes, amx::kTileBytes);  // a constant size, so that no function is called
        } else {
          std::memcpy(target, line + c * chunk_bytes, chunk_bytes);
        }
      }
    }
  }

  // Unpacks a panel: the bytes of tiles B [steps][32 columns][4] of each group, and the factors of the columns. Bytes
  // that need no change are not copied.
  void unpack(const uint8_t* panel) {
    tiles_.resize(weight_.groups);
    const QuantFormat& format = weight_.format;
    for (int64_t g = 0; g < weight_.groups; ++g) {
      const uint8_t* header = panel + weight_.group_offset(g);
      float* columns = columns_ + g * 2 * kPanel;
      for (int column = 0; column < kPanel; column += F32::width) {
        const Factors factors(format, header, column);
        store(columns + column, factors.scale);
        store(columns + kPanel + column, factors.zero);
      }
      const uint8_t* data = header + format.header_bytes();
      const int64_t steps = std::min(weight_.group_steps, weight_.steps - g * weight_.group_steps);
      uint8_t* out = panel_ + g * weight_.group_steps * 4 * kPanel;
      tiles_[g] = out;
      if constexpr (Bits == kBytes) {
        if (format.symmetric) {
          make_signed(data, steps * 4 * kPanel, out);
        } else if (steps == weight_.group_steps) {
          tiles_[g] = data;
        } else {
          std::memcpy(out, data, steps * 4 * kPanel);
        }
      } else {
        for (int64_t step = 0; step < steps; step += 2) {
          unpack_line(data + step * 2 * kPanel, table_, out + step * 4 * kPanel);
        }
      }
      std::memset(out + steps * 4 * kPanel, 0, (weight_.group_steps - steps) * 4 * kPanel);
    }
  }

  const Problem& p_;
  const QuantizedWeight& weight_;
  const TileBlocks& blocks_;
  const HalvesTable table_;
  const int64_t chunk_;   // steps of a tile
  const int64_t chunks_;  // chunks of a group
  const int64_t steps_;   // steps of all groups, as if the last one were not shorter
  const amx::TileScope registers_;
  uint8_t* panel_ = nullptr;
  int8_t* values_ = nullptr;
  float* scales_ = nullptr;
  float* sums_ = nullptr;
  float* columns_ = nullptr;
  std::vector<const uint8_t*> tiles_;  // the tiles of each group of the panel
};

template <Widening Bits, class In, class Out>
void run_quantized_tiles(const Problem& problem, const QuantizedWeight& weight) {
  const TileBlocks blocks(problem.rows, weight.groups * weight.group_steps);
  run_panels<QuantizedTileWorker<Bits, In, Out>>(streamed<Out>(problem), weight, blocks);
}

}  // namespace ostinato::linear
