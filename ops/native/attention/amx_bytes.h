// Attention over a cache of 8 bits by products of bytes (core/amx.h): up to 8 query rows against a partition of 256
// keys. No key and no value is widened.
//
// A query is rounded to whole numbers from -32639 to 32639 times a scale of its row, which is its largest magnitude /
// 32639. Such a number is two digits of 8 bits: 256 * high + low, both from -128 to 127. So a row of queries is two
// rows of a tile A. The weights of the softmax, times the scales of values, are rounded in the same way against their
// largest in the partition.
//
// Order of sums: the sums of a partition's products are exact in int32, so they have no order, and tiles and vectors
// give the same bits. The two sums of a row, of high and of low digits, become floats, which is exact, and are added by
// a fused multiply-add. The sums of a row contain no other row, and keys that a row does not see have the weight zero.
// So a row's bits depend on the row and its keys alone.
//
// A step (tile.h) has four elements: keys are [head_dim / 4][tokens][4], which are tiles B, and values are
// [tokens / 4][value_dim][4]. A tile B of values needs four groups of 16 tokens, which can lie in four blocks. So for
// tiles, values are first copied side by side. For few rows, vectors read them in place.
#pragma once

#include "attention/amx_tile.h"
#include "attention/query_tiles.h"
#include "attention/scratch.h"

#include <algorithm>

namespace ostinato::attention {

constexpr float kMaxWhole = 32639.0f;           // 256 * 127 + 127
constexpr float kSmallestLargest = 0x1p-110f;   // if the largest magnitude is smaller, all numbers count as zeros
constexpr bool kHasByteVectors = OSTINATO_ISA >= 3;  // products of bytes in vectors
constexpr int kMaxVectorRows = 4;  // values times weights of so few rows are faster by vectors than by tiles

// Numbers from -kMaxWhole to kMaxWhole, rounded to whole numbers, as digits: 256 * high + low. If `half` is 128, the
// low digit is from -128 to 127. If it is 0 (with AVX-512 only), the low digit is from 0 to 255.
OSTINATO_INLINE void store_digits(F32 x, [[maybe_unused]] int half, int8_t* high, int8_t* low) {
#if OSTINATO_ISA >= 2
  const __m512i whole = _mm512_cvtps_epi32(x.v);
  const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(half)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(upper));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(whole));
#else
  const F32 whole = round_to_integer(x);
  // 0.25 decides the ties, so that the low digit is not 128.
  const F32 upper = round_to_integer((whole + broadcast(0.25f)) * broadcast(0x1p-8f));
  store(high, upper);
  store(low, fma(upper, broadcast(-256.0f), whole));
#endif
}

// The same for the 64 numbers of a tile times `factor`.
OSTINATO_INLINE void store_tile_digits(const float* row, F32 factor, int half, int8_t* high, int8_t* low) {
#if OSTINATO_ISA >= 2
  __m512i upper[4], lower[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i whole = _mm512_cvtps_epi32((load(row + i * kWidth) * factor).v);
    upper[i] = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(half)), 8);
    lower[i] = _mm512_and_si512(whole, _mm512_set1_epi32(255));
  }
  const auto packed = [](const __m512i* x, auto pack) __attribute__((always_inline)) {
    return pack(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
  };
  // Instructions that pack keep the four 128-bit lanes apart.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i highs = packed(upper, [](__m512i a, __m512i b) { return _mm512_packs_epi16(a, b); });
  const __m512i lows = packed(lower, [](__m512i a, __m512i b) { return _mm512_packus_epi16(a, b); });
  _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, highs));
  _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, lows));
#else
  for (int i = 0; i < kTile; i += kWidth) store_digits(load(row + i) * factor, half, high + i, low + i);
#endif
}

// Sums of products, below 2**24.
OSTINATO_INLINE F32 load_sums(const int32_t* sums) {
#if OSTINATO_ISA >= 2
  return {_mm512_cvtepi32_ps(_mm512_loadu_si512(sums))};
#else
  float x[kWidth];
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<float>(sums[i]);
  return load(x);
#endif
}

// Joins sums of products of high and of low digits.
OSTINATO_INLINE F32 join_digits(F32 high, F32 low) { return fma(high, broadcast(256.0f), low); }

struct ByteTileLayout {
  using Element = BFloat16;
  using Unit = int8_t;
  struct Multiply {
    using Step = int8_t;
    using Factor = int8_t;
    static constexpr int elements = 1;
    static constexpr int kParts = 2;  // digits
  };
  static constexpr bool kWidens = false;
  static constexpr bool kHasMatrixTiles = true;
  static constexpr int kRows = amx::kTileRows / 2;  // rows of a block

  // The digits of a query: out [2][head_dim], high digits first. Returns its scale, NaN if an element is not finite.
  static float queries(const BFloat16* row, int head_dim, int8_t* out) {
    const int whole = head_dim / kWidth * kWidth;
    F32 largest = broadcast(0.0f), not_finite = broadcast(0.0f);
    for (int d = 0; d < head_dim; d += kWidth) {
      const F32 x = d < whole ? load(row + d) : load_8(row + d);
      largest = max(max(x, broadcast(0.0f) - x), largest);
      not_finite = fma(x, broadcast(0.0f), not_finite);
    }
    const float magnitude = reduce_max(largest);
    const bool is_zero = !(magnitude >= kSmallestLargest);
    const F32 factor = broadcast(is_zero ? 0.0f : kMaxWhole / magnitude);
    for (int d = 0; d < whole; d += kWidth) store_digits(load(row + d) * factor, 128, out + d, out + head_dim + d);
    if (whole < head_dim) {
      int8_t rest[2][kWidth];
      store_digits(load_8(row + whole) * factor, 128, rest[0], rest[1]);
      for (int digit = 0; digit < 2; ++digit) std::memcpy(out + digit * head_dim + whole, rest[digit], 8);
    }
    return (is_zero ? 0.0f : magnitude / kMaxWhole) + reduce_sum(not_finite);
  }
};

// The matrix tiles of one worker.
class ByteTiles {
 public:
  ByteTiles(const Problem& p, int padded_dim)
      : p_(p), tokens_(group_tokens(p.block_size)), key_units_(p.head_dim / 4), padded_dim_(padded_dim) {}

  void lay_out(Scratch& scratch) {
    constexpr size_t kDigitRows = 2 * ByteTileLayout::kRows;
    key_scales_ = scratch.take<float>(kPartition);
    value_scales_ = scratch.take<float>(kPartition);
    products_ = scratch.take<int32_t>(kDigitRows * kPartition);
    weights_ = scratch.take<int8_t>(kDigitRows * kPartition);
    values_ = scratch.take<uint32_t>(static_cast<size_t>(kPartition) / 4 * padded_dim_);
    if (tokens_ == kMinGroup) keys_ = scratch.take<uint32_t>(static_cast<size_t>(kPartition) * key_units_);
  }

  // Reads what all rows need of a partition.
  void begin(const PartitionGroups<int8_t>& groups) {
    groups_ = &groups;
    const int64_t key_size = static_cast<int64_t>(tokens_) * p_.head_dim;
    const int64_t value_size = static_cast<int64_t>(tokens_) * p_.value_dim;
    constexpr int kBytes = kMinGroup * sizeof(float);  // a constant, so that the compiler copies by vectors
    for (int t = 0; t < groups.count; ++t) {
      for (int i = 0; i < kTile; i += kMinGroup) {
        const int group = group_of(i, tokens_), at = (i & (tokens_ - 1)) * kScaleBytes;
        std::memcpy(key_scales_ + t * kTile + i, groups.tiles[t].keys[group] + key_size + at, kBytes);
        std::memcpy(value_scales_ + t * kTile + i, groups.tiles[t].values[group] + value_size + at, kBytes);
      }
      // [kKeyVectors][units][16]
      uint32_t* joined = keys_ + static_cast<size_t>(t) * kTile * key_units_;
      if (tokens_ == kMinGroup) join_keys(groups.tiles[t], key_units_, joined);
    }
    // The weight of a key that a row does not see is zero. Its scale must be finite, so that their product is zero. The
    // infinite scale of a key that a row sees becomes the largest float too.
    for (int i = 0; i < groups.count * kTile; i += kWidth) {
      const F32 scale = max(load(value_scales_ + i), broadcast(0.0f));  // the second argument if the first is NaN
      store(value_scales_ + i, min(scale, broadcast(std::numeric_limits<float>::max())));
    }
    has_values_ = false;
  }

  // Computes a block of rows against the partition.
  void run(const RowBlock<int8_t>& rows, GroupPrefetch& prefetch) {
    const int num_tiles = (rows.seen.last + kTile - 1) / kTile;
    const bool has_few_rows = kHasByteVectors && rows.is_only && rows.count <= kMaxVectorRows;
    registers_.shape(2 * rows.count, key_units_);
    for (int t = 0; t < num_tiles; ++t) score(rows, t, prefetch);
    float scales[ByteTileLayout::kRows];
    for (int r = 0; r < rows.count; ++r) scales[r] = weigh(rows, r, num_tiles * kTile, !has_few_rows, prefetch);
#if OSTINATO_ISA >= 3
    if (has_few_rows) return add_values_by_vectors(rows, num_tiles, scales, prefetch);
#endif
    if (!has_values_) {
      for (int t = 0; t < groups_->count; ++t) join_values(t);
      has_values_ = true;
    }
    for (int column = 0; column < padded_dim_; column += 4 * amx::kTileColumns) {
      const int columns = std::min(4, (padded_dim_ - column) / amx::kTileColumns);
      with_tiles(columns, [&]<int kColumns>(std::integral_constant<int, kColumns>) {
        add_values<kColumns>(num_tiles, column, prefetch);
      });
      for (int r = 0; r < rows.count; ++r) {
        const int32_t* sums = products_ + 2 * r * kSumStride;
        float* out = rows.accumulator + static_cast<size_t>(r) * padded_dim_ + column;
        for (int d = 0; d < columns * amx::kTileColumns; d += kWidth) {
          store(out + d, join_digits(load_sums(sums + d), load_sums(sums + kSumStride + d)) * broadcast(scales[r]));
        }
      }
    }
  }

 private:
  static constexpr int kSumStride = 4 * amx::kTileColumns;
  static constexpr int kLinesPerByteProduct = 3;  // lines of four groups that are prefetched

  // products_ [2 * rows][kPartition] = digits of queries times the 64 keys of a tile.
  void score(const RowBlock<int8_t>& rows, int t, GroupPrefetch& prefetch) {
    const uint32_t* keys[kKeyVectors];
    for (int v = 0; v < kKeyVectors; ++v) {
      const uint32_t* joined = keys_ + (static_cast<size_t>(t) * kTile + v * amx::kTileColumns) * key_units_;
      keys[v] = tokens_ == kMinGroup ? joined : reinterpret_cast<const uint32_t*>(groups_->tiles[t].keys[v]);
    }
    for_tiles<kKeyVectors>([](auto v) { amx::zero<v>(); });
    int unit = 0;
    for (; unit + kUnits <= key_units_; unit += kUnits) {
      amx::load<4>(rows.queries + 4 * unit, p_.head_dim);
      for_tiles<kKeyVectors>([&](auto v) {
        prefetch.lines(kLinesPerByteProduct);
        amx::load<5>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
        amx::multiply_signed_bytes<v, 4, 5>();
      });
    }
    if (unit < key_units_) {
      amx::load<6>(rows.queries + 4 * unit, p_.head_dim);
      for_tiles<kKeyVectors>([&](auto v) {
        prefetch.lines(kLinesPerByteProduct);
        amx::load<7>(keys[v] + unit * amx::kTileColumns, amx::kTileBytes);
        amx::multiply_signed_bytes<v, 6, 7>();
      });
    }
    for_tiles<kKeyVectors>(
        [&](auto v) { amx::store<v>(products_ + t * kTile + v * amx::kTileColumns, kPartition * sizeof(int32_t)); });
  }

  // Turns the products of a row with the first `num_keys` keys into the digits of its weights. Returns their scale.
  float weigh(const RowBlock<int8_t>& rows, int r, int num_keys, bool has_signed_digits, GroupPrefetch& prefetch) {
    alignas(64) float row[kPartition];
    const int32_t* products = products_ + 2 * r * kPartition;
    const F32 factor = broadcast(rows.query_scales[r] * p_.scaling.factor);
    const Alibi* alibi = rows.alibi == nullptr ? nullptr : rows.alibi + r;
    const bool is_partial = rows.visible[r].first > 0 || rows.visible[r].last < num_keys;
    F32 highest = broadcast(kLowest);
    for (int i = 0; i < num_keys; i += kWidth) {
      prefetch.lines(1);
      const F32 sum = join_digits(load_sums(products + i), load_sums(products + kPartition + i));
      F32 logit = sum * factor * load(key_scales_ + i);
      logit = change_logit(logit, i, p_.scaling.soft_cap, alibi, is_partial, rows.visible[r]);
      store(row + i, logit);
      highest = max(highest, logit);
    }
    const float found = reduce_max(highest);
    const float maximum = found > kLowest ? found : kLowest;  // also if a logit is NaN
    F32 sum = broadcast(0.0f), largest = broadcast(0.0f);
    for (int i = 0; i < num_keys; i += kWidth) {
      prefetch.lines(1);
      const F32 p = exp2(load(row + i) - broadcast(maximum));
      sum = sum + p;
      const F32 weight = p * load(value_scales_ + i);
      largest = max(largest, weight);
      store(row + i, weight);
    }
    rows.maximum[r] = maximum;
    rows.total[r] = reduce_sum(sum);
    const float magnitude = reduce_max(largest);
    const bool is_zero = !(magnitude >= kSmallestLargest);
    const F32 inverse = broadcast(is_zero ? 0.0f : kMaxWhole / magnitude);
    int8_t* weights = weights_ + 2 * r * kPartition;
    const int half = has_signed_digits ? 128 : 0;
    for (int i = 0; i < num_keys; i += kTile) {
      store_tile_digits(row + i, inverse, half, weights + i, weights + kPartition + i);
    }
    return (is_zero ? 0.0f : magnitude / kMaxWhole) + 0.0f * rows.query_scales[r];  // NaN if the query is not finite
  }

  // The values of a tile side by side: values_ [kTile / 4][padded_dim] of the tile. Columns past value_dim hold bytes of
  // the next tokens, or scales.
  void join_values(int t) {
    uint32_t* out = values_ + static_cast<size_t>(t) * kTile / 4 * padded_dim_;
    for (int group = 0; group < kTile / tokens_; ++group) {
      const auto* from = reinterpret_cast<const uint32_t*>(groups_->tiles[t].values[group]);
      for (int row = 0; row < tokens_ / 4; ++row, from += p_.value_dim, out += padded_dim_) {
        for (int d = 0; d < padded_dim_; d += kWidth) {
          store(reinterpret_cast<float*>(out + d), load(reinterpret_cast<const float*>(from + d)));
        }
      }
    }
  }

  // products_ [2 * rows][kSumStride] = digits of weights times kColumns tiles of 16 dimensions.
  template <int kColumns>
  void add_values(int num_tiles, int column, GroupPrefetch& prefetch) {
    const int64_t row_bytes = padded_dim_ * 4;
    for_tiles<kColumns>([](auto c) { amx::zero<c>(); });
    for (int t = 0; t < num_tiles; ++t) {
      const uint32_t* values = values_ + static_cast<size_t>(t) * kTile / 4 * padded_dim_ + column;
      amx::load<4>(weights_ + t * kTile, kPartition);
      for_tiles<kColumns>([&](auto c) {
        prefetch.lines(kLinesPerByteProduct);
        amx::load<5>(values + c * amx::kTileColumns, row_bytes);
        amx::multiply_signed_bytes<c, 4, 5>();
      });
    }
    for_tiles<kColumns>(
        [&](auto c) { amx::store<c>(products_ + c * amx::kTileColumns, kSumStride * sizeof(int32_t)); });
  }

#if OSTINATO_ISA >= 3
  // Outputs of a few rows, without a copy of the values. Low digits are from 0 to 255.
  void add_values_by_vectors(const RowBlock<int8_t>& rows, int num_tiles, const float* scales, GroupPrefetch& prefetch) {
    for (int column = 0; column < padded_dim_;) {
      const int vectors = (padded_dim_ - column) / kWidth;
      const auto add = [&]<int kRows, int kVectors>() {
        add_value_vectors<kRows, kVectors>(num_tiles, column, scales, rows.accumulator + column, prefetch);
        column += kVectors * kWidth;
      };
      if (rows.count == 1) vectors >= 4 ? add.template operator()<1, 4>() : add.template operator()<1, 1>();
      if (rows.count == 2) vectors >= 4 ? add.template operator()<2, 4>() : add.template operator()<2, 1>();
      if (rows.count == 3) vectors >= 2 ? add.template operator()<3, 2>() : add.template operator()<3, 1>();
      if (rows.count == 4) vectors >= 2 ? add.template operator()<4, 2>() : add.template operator()<4, 1>();
    }
  }

  // out [kRows][padded_dim] = weights times kVectors vectors of 16 dimensions, from `column` on.
  template <int kRows, int kVectors>
  void add_value_vectors(int num_tiles, int column, const float* scales, float* out, GroupPrefetch& prefetch) {
    __m512i sums[2 * kRows][kVectors];
    for (auto& row : sums) {
      for (__m512i& sum : row) sum = _mm512_setzero_si512();
    }
    const int8_t* weights = weights_;
    for (int t = 0; t < num_tiles; ++t) {
      for (int group = 0; group < kTile / tokens_; ++group) {
        const int8_t* from = groups_->tiles[t].values[group] + 4 * column;
        for (int token = 0; token < tokens_; token += 4, weights += 4, from += 4 * p_.value_dim) {
          prefetch.lines(1);
          __m512i values[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) values[v] = _mm512_loadu_si512(from + 64 * v);
#pragma GCC unroll 8
          for (int r = 0; r < 2 * kRows; ++r) {
            int32_t four;
            std::memcpy(&four, weights + r * kPartition, sizeof four);
            const __m512i factor = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], factor, values[v]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F32 high{_mm512_cvtepi32_ps(sums[2 * r][v])}, low{_mm512_cvtepi32_ps(sums[2 * r + 1][v])};
        store(out + static_cast<size_t>(r) * padded_dim_ + v * kWidth, join_digits(high, low) * broadcast(scales[r]));
      }
    }
  }
#endif

  const Problem& p_;
  const int tokens_;     // tokens of a group
  const int key_units_;  // units of four bytes in a key
  const int padded_dim_;
  const PartitionGroups<int8_t>* groups_ = nullptr;
  bool has_values_ = false;  // whether all values of the partition are in values_
  TileRegisters registers_;
  int32_t* products_ = nullptr;  // [digit rows][kPartition], later [digit rows][kSumStride]
  int8_t* weights_ = nullptr;    // [rows][2][kPartition]
  uint32_t* values_ = nullptr;   // [tiles][kTile / 4][padded_dim]
  uint32_t* keys_ = nullptr;     // [tiles][kKeyVectors][units][16], if groups have 8 tokens
  float* key_scales_ = nullptr;    // [kPartition]
  float* value_scales_ = nullptr;  // [kPartition]
};

}  // namespace ostinato::attention
