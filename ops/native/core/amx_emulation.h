// The tile instructions of AMX in plain C++, bit for bit: Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 2, TDPBF16PS, TDPBSUD, TDPBSSD, TILELOADD, TILESTORED, TILEZERO, LDTILECFG.
//
// The payload of a NaN may differ from the processor's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace ostinato::amx::emulation {

struct Tile {
  int rows = 0;
  int row_bytes = 0;
  unsigned char data[16][64] = {};
};

struct Registers {
  bool configured = false;
  Tile tiles[8];
};

inline Registers& registers() {
  thread_local Registers own;
  return own;
}

// Throws where the processor would raise an invalid-opcode exception. So a kernel that does not configure its tiles
// fails here too.
inline Tile& tile(int index) {
  Registers& all = registers();
  if (!all.configured || all.tiles[index].rows == 0) throw std::logic_error("a tile register without a shape is used");
  return all.tiles[index];
}

inline void configure(const uint8_t* rows, const uint16_t* row_bytes) {
  Registers& all = registers();
  all = Registers{};
  all.configured = true;
  for (int i = 0; i < 8; ++i) {
    if (rows[i] > 16 || row_bytes[i] > 64 || (rows[i] == 0) != (row_bytes[i] == 0)) {
      throw std::logic_error("a tile register has at most 16 rows of 64 bytes");
    }
    all.tiles[i].rows = rows[i];
    all.tiles[i].row_bytes = row_bytes[i];
  }
}

inline void release() { registers() = Registers{}; }

inline void zero(int index) { std::memset(tile(index).data, 0, sizeof(Tile::data)); }

inline void load(int index, const void* rows, int64_t stride) {
  Tile& into = tile(index);
  std::memset(into.data, 0, sizeof into.data);
  for (int r = 0; r < into.rows; ++r) {
    std::memcpy(into.data[r], static_cast<const char*>(rows) + r * stride, into.row_bytes);
  }
}

inline void store(int index, void* rows, int64_t stride) {
  const Tile& from = tile(index);
  for (int r = 0; r < from.rows; ++r) {
    std::memcpy(static_cast<char*>(rows) + r * stride, from.data[r], from.row_bytes);
  }
}

inline void check_product(const Tile& c, const Tile& a, const Tile& b) {
  if (a.rows != c.rows || b.row_bytes != c.row_bytes || a.row_bytes != 4 * b.rows) {
    throw std::logic_error("the shapes of three tile registers do not fit a product");
  }
}

// Subnormal numbers count as zeros, as arguments and as results.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float widen(const unsigned char* bfloat16) {
  uint16_t half;
  std::memcpy(&half, bfloat16, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flush(x);
}

// a * b + c with one rounding to nearest even. The processor rounds to 24 bits and returns zero if the rounded value is
// below 2**-126, the smallest normal number. std::fma rounds such a value to the spacing of subnormal numbers, and can
// return 2**-126. So if the result is 2**-126 or less, it is computed again with arguments scaled by powers of two.
// There the values near 2**-126 are far from the subnormal numbers.
inline float fused(float a, float b, float c) {
  const float x = std::fma(a, b, c);
  if (!(std::fabs(x) <= 0x1p-126f)) return x;
  const float scaled = std::fma(a * 0x1p60f, b * 0x1p60f, c * 0x1p120f);
  return std::fabs(scaled) < 0x1p-6f ? std::copysign(0.0f, x) : x;
}

inline float added(float a, float b) { return flush(flush(a) + flush(b)); }

// C[m][n] += the sum over even k + the sum over odd k, each from zero and in ascending order.
inline void multiply_bfloat16(int c_index, int a_index, int b_index) {
  Tile& c = tile(c_index);
  const Tile& a = tile(a_index);
  const Tile& b = tile(b_index);
  check_product(c, a, b);
  const int columns = c.row_bytes / 4;
  float wide[16][32];
  for (int k = 0; k < b.rows; ++k) {
    for (int n = 0; n < 2 * columns; ++n) wide[k][n] = widen(b.data[k] + 2 * n);
  }
  for (int m = 0; m < c.rows; ++m) {
    float sums[32] = {};
    for (int k = 0; k < b.rows; ++k) {
      const float even = widen(a.data[m] + 4 * k);
      const float odd = widen(a.data[m] + 4 * k + 2);
      for (int n = 0; n < columns; ++n) {
        sums[2 * n] = fused(even, wide[k][2 * n], sums[2 * n]);
        sums[2 * n + 1] = fused(odd, wide[k][2 * n + 1], sums[2 * n + 1]);
      }
    }
    for (int n = 0; n < columns; ++n) {
      float total;
      std::memcpy(&total, c.data[m] + 4 * n, 4);
      total = added(total, added(sums[2 * n], sums[2 * n + 1]));
      std::memcpy(c.data[m] + 4 * n, &total, 4);
    }
  }
}

// C[m][n] += sum of int8 A times B of type Byte (uint8 or int8), in int32 that wraps around.
template <class Byte>
void multiply_bytes(int c_index, int a_index, int b_index) {
  Tile& c = tile(c_index);
  const Tile& a = tile(a_index);
  const Tile& b = tile(b_index);
  check_product(c, a, b);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      uint32_t total;
      std::memcpy(&total, c.data[m] + 4 * n, 4);
      for (int k = 0; k < 4 * b.rows; ++k) {
        const int x = static_cast<int8_t>(a.data[m][k]);
        const int w = static_cast<Byte>(b.data[k / 4][4 * n + k % 4]);
        total += static_cast<uint32_t>(x * w);
      }
      std::memcpy(c.data[m] + 4 * n, &total, 4);
    }
  }
}

}  // namespace ostinato::amx::emulation
