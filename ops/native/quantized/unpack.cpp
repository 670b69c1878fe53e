// The op unpack_words: turns the integers of 8 or 4 bits in the 32-bit words of a quantised checkpoint into bytes [out,
// in].
#include "linear/tasks.h"
#include "quantized/bytes.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ostinato::linear {
namespace {

constexpr int64_t kTile = 64;  // rows of the result that `unpack_columns` writes together

// For each position in a word of AWQ, from the lowest bits up: the output to which its integer belongs.
constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// A word's integers as bytes, the lowest first: 4 bytes for integers of 8 bits, 8 bytes for integers of 4 bits.
template <int kBits>
OSTINATO_INLINE void spread_word(uint32_t word, uint8_t* out) {
  if constexpr (kBits == 8) {
    std::memcpy(out, &word, 4);
  } else {
    const uint64_t bytes = spread_halves(word);
    std::memcpy(out, &bytes, 8);
  }
}

// Unpacks words [rows, columns] that hold successive columns of the result.
template <int kBits>
void unpack_rows(const uint32_t* words, int64_t begin, int64_t end, uint8_t* out) {
  constexpr int64_t kPerWord = 32 / kBits;
  for (int64_t word = begin; word < end; ++word) spread_word<kBits>(words[word], out + word * kPerWord);
}

// Unpacks words [rows, columns], each of which holds successive inputs of one output. The result is [columns, rows *
// integers of a word]. Writes its rows from `begin` to `end`.
template <int kBits>
void unpack_columns(const uint32_t* words, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint8_t* out) {
  constexpr int64_t kPerWord = 32 / kBits;
  const int64_t width = rows * kPerWord;
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t last = std::min(first + kTile, end);
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t* source = words + row * columns;
      uint8_t* target = out + row * kPerWord;
      for (int64_t column = first; column < last; ++column) spread_word<kBits>(source[column], target + column * width);
    }
  }
}

// Unpacks AWQ's words [rows, columns], each of which holds 8 outputs of one input. The result is [columns * 8, rows].
// Handles words `begin` to `end` of every row.
void unpack_awq(const uint32_t* words, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t column = begin; column < end; ++column) {
    uint8_t* target = out + column * 8 * rows;
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) {
      uint64_t block[8];
      for (int i = 0; i < 8; ++i) block[i] = spread_halves(words[(row + i) * columns + column]);
      transpose_bytes(block);
      for (int place = 0; place < 8; ++place) std::memcpy(target + kAwqOrder[place] * rows + row, &block[place], 8);
    }
    for (; row < rows; ++row) {
      const uint32_t word = words[row * columns + column];
      for (int place = 0; place < 8; ++place) {
        target[kAwqOrder[place] * rows + row] = static_cast<uint8_t>(word >> (4 * place) & 15);
      }
    }
  }
}

// unpack_words(Tensor words, SymInt bits, str packing) -> Tensor
void unpack_words(Call& call) {
  const Tensor words = call.tensor();
  const int64_t bits = call.integer();
  const std::string packing = call.text();
  const bool is_awq = packing == "awq", is_columns = packing == "columns";
  OSTINATO_CHECK(words.dtype == DType::int32 && words.dim == 2 && is_contiguous(words),
                 "words must be a contiguous matrix of int32");
  OSTINATO_CHECK((bits == 4 || (bits == 8 && !is_awq)) && (is_awq || is_columns || packing == "rows"),
                 "words hold integers of 4 or 8 bits as rows or columns, or of 4 bits as awq");
  const int64_t rows = words.sizes[0], columns = words.sizes[1], per_word = 32 / bits;
  int64_t sizes[] = {rows, columns * per_word};
  if (is_awq) sizes[0] = columns * 8, sizes[1] = rows;
  if (is_columns) sizes[0] = columns, sizes[1] = rows * per_word;
  const Tensor out = call.empty(sizes, 2, DType::uint8);
  const uint32_t* source = words.as<uint32_t>();
  uint8_t* target = out.as<uint8_t>();
  const int64_t tasks = is_columns || is_awq ? columns : rows * columns;
  const int64_t bytes = rows * columns * per_word;
  divide_conversion(call.threads(), NumParts{tasks}, bytes).run([&](int64_t begin, int64_t end) {
    if (is_awq) {
      unpack_awq(source, rows, columns, begin, end, target);
    } else if (is_columns) {
      if (bits == 4) unpack_columns<4>(source, rows, columns, begin, end, target);
      if (bits == 8) unpack_columns<8>(source, rows, columns, begin, end, target);
    } else {
      if (bits == 4) unpack_rows<4>(source, begin, end, target);
      if (bits == 8) unpack_rows<8>(source, begin, end, target);
    }
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(unpack_words, unpack_words);

}  // namespace ostinato::linear
