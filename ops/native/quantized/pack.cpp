// The op quantize_linear, which quantises a matrix into the layout of layout.h.
//
// A grid maps the values of a group to integers. With 8 bits there is one grid for each group. With 4 bits a few grids
// are tried, which clip the group's extremes more or less, and the grid with the least squared error is taken. Scales
// are rounded to bfloat16 away from zero, so that this rounding clips no value. Sums run over a row's values in order,
// so that every instruction set, and the reference in ops/quantized_reference.py, choose the same grid.
#include "linear/transpose.h"
#include "quantized/give_packed.h"
#include "quantized/layout.h"

#include <array>
#include <cmath>
#include <vector>

namespace ostinato::linear {
namespace {

// Symmetric groups of 4 bits have the integers -8 to 7. The scale of a grid is the value of largest magnitude
// divided by minus one of these numbers. A number above 8 clips that value: it becomes the integer -8.
constexpr std::array<float, 5> kSpans = {8.0f, 7.0f, 7.5f, 8.5f, 9.0f};
// Asymmetric groups of 4 bits: the part of the group's range that each grid keeps. Values outside it are clipped.
constexpr std::array<float, 4> kParts = {1.0f, 0.95f, 0.9f, 0.85f};

struct Grid {
  float scale;
  float zero;  // relative to the offset
};

float away_from_zero(float x) {
  if (x != x) return x;
  if (x == 0.0f) return 0.0f;  // not -0
  return bit_cast<float>((bit_cast<uint32_t>(x) + 0xffffu) & 0xffff0000u);
}

int num_candidates(const QuantFormat& format) {
  if (format.bits == 8) return 1;
  return static_cast<int>(format.symmetric ? kSpans.size() : kParts.size());
}

// The grid number `index` for values in [low, high].
Grid candidate(const QuantFormat& format, float low, float high, int index) {
  if (format.symmetric) {
    if (format.bits == 8) return {away_from_zero(std::max(-low, high) / 127.0f), 0.0f};
    const float extreme = -low > high ? low : high;
    return {away_from_zero(extreme / -kSpans[index]), 0.0f};
  }
  const float part = format.bits == 8 ? 1.0f : kParts[index];
  const float steps = static_cast<float>((1 << format.bits) - 1);
  const float bottom = std::min(low, 0.0f) * part;
  const float scale = away_from_zero((std::max(high, 0.0f) * part - bottom) / steps);
  if (scale == 0.0f) return {0.0f, 0.0f};
  const float zero = std::min(std::max(std::nearbyint(-bottom / scale), 0.0f), steps);
  return {scale, zero - static_cast<float>(format.offset())};
}

// Converts a group of a panel from floats [values of K][32 columns] to its layout.
class GroupWriter {
 public:
  explicit GroupWriter(const QuantFormat& format) : format_(format) {}

  // values: [count][32 columns]; data: the beginning of the group; steps: the steps for which the group has room.
  void write(const float* values, int64_t count, int64_t steps, uint8_t* data) {
    measure(values, count);
    choose(values, count);
    auto* scales = reinterpret_cast<BFloat16*>(data);
    for (int c = 0; c < kPanel; ++c) {
      from_float(scale_[c], scales + c);
      if (!format_.symmetric) from_float(zero_[c], scales + kPanel + c);
    }
    uint8_t* out = data + format_.header_bytes();
    for (int64_t step = 0; step < steps; step += format_.bits == 8 ? 1 : 2) {
      for (int half = 0; half < (format_.bits == 8 ? 1 : 2); ++half) {
        for (int j = 0; j < 4; ++j) {
          const int64_t k = (step + half) * 4 + j;
          uint8_t bytes[kPanel] = {};
          if (k < count) quantize(values + k * kPanel, bytes);
          for (int c = 0; c < kPanel; ++c) {
            out[c * 4 + j] = half == 0 ? bytes[c] : static_cast<uint8_t>(out[c * 4 + j] | bytes[c] << 4);
          }
        }
      }
      out += 4 * kPanel;
    }
  }

 private:
  void measure(const float* values, int64_t count) {
    for (int c = 0; c < kPanel; c += F32::width) {
      F32 low = load(values + c);
      F32 high = low;
      F32 wrong = broadcast(0.0f);
      for (int64_t k = 0; k < count; ++k) {
        const F32 value = load(values + k * kPanel + c);
        low = min(low, value);
        high = max(high, value);
        wrong = wrong + value * broadcast(0.0f);
      }
      store(low_ + c, low);
      store(high_ + c, high);
      store(wrong_ + c, wrong);
    }
  }

  void choose(const float* values, int64_t count) {
    float best[kPanel];
    for (int index = 0; index < num_candidates(format_); ++index) {
      float scale[kPanel];
      float zero[kPanel];
      for (int c = 0; c < kPanel; ++c) {
        const Grid grid = candidate(format_, low_[c], high_[c], index);
        scale[c] = wrong_[c] == 0.0f ? grid.scale : wrong_[c];  // NaN where a value is not finite
        zero[c] = grid.zero;
      }
      float error[kPanel] = {};
      if (num_candidates(format_) > 1) add_errors(values, count, scale, zero, error);
      for (int c = 0; c < kPanel; ++c) {
        if (index > 0 && !(error[c] < best[c])) continue;
        best[c] = error[c];
        set(c, scale[c], zero[c]);
      }
    }
  }

  void set(int column, float scale, float zero) {
    scale_[column] = scale;
    factor_[column] = scale == 0.0f ? 0.0f : 1.0f / scale;
    zero_[column] = zero;
  }

  void add_errors(const float* values, int64_t count, const float* scale, const float* zero, float* error) const {
    for (int c = 0; c < kPanel; c += F32::width) {
      float factor[F32::width];
      for (int i = 0; i < F32::width; ++i) factor[i] = scale[c + i] == 0.0f ? 0.0f : 1.0f / scale[c + i];
      const F32 factors = load(factor);
      const F32 scales = load(scale + c);
      const F32 zeros = load(zero + c) + broadcast(static_cast<float>(format_.offset()));
      F32 sum = broadcast(0.0f);
      for (int64_t k = 0; k < count; ++k) {
        const F32 value = load(values + k * kPanel + c);
        const F32 difference = (on_grid(value, factors, zeros) - zeros) * scales - value;
        sum = sum + difference * difference;
      }
      store(error + c, sum);
    }
  }

  F32 on_grid(F32 value, F32 factor, F32 zero) const {
    const F32 most = broadcast(static_cast<float>((1 << format_.bits) - 1));
    return max(min(round_to_integer(value * factor) + zero, most), broadcast(0.0f));
  }

  void quantize(const float* values, uint8_t* bytes) const {
    for (int c = 0; c < kPanel; c += F32::width) {
      const F32 zero = load(zero_ + c) + broadcast(static_cast<float>(format_.offset()));
      float lanes[F32::width];
      store(lanes, on_grid(load(values + c), load(factor_ + c), zero));
      for (int i = 0; i < F32::width; ++i) bytes[c + i] = static_cast<uint8_t>(static_cast<int>(lanes[i]));
    }
  }

  const QuantFormat format_;
  float low_[kPanel], high_[kPanel], wrong_[kPanel];
  float scale_[kPanel], factor_[kPanel], zero_[kPanel];
};

template <class T>
void quantize_panel(const T* rows, int64_t row_stride, int columns, int64_t in_features, const QuantizedShape& shape,
                    uint8_t* panel, float* memory) {
  const int64_t size = shape.format.group_size;
  float* line = memory;                        // [32][size]
  float* block = memory + kPanel * size;       // [size][32]
  GroupWriter writer(shape.format);
  for (int64_t group = 0; group < shape.groups; ++group) {
    const int64_t begin = group * size;
    const int64_t count = std::min(size, in_features - begin);
    for (int c = 0; c < kPanel; ++c) {
      for (int64_t k = 0; k < count; ++k) {
        line[c * size + k] = c < columns ? to_float(rows[c * row_stride + begin + k]) : 0.0f;
      }
    }
    transpose_units(line, size * 4, kPanel, count, block, kPanel);
    writer.write(block, count, std::min(shape.group_steps, shape.steps - group * shape.group_steps),
                 panel + shape.group_offset(group));
  }
}

// quantize_linear(Tensor weight, SymInt bits, SymInt group_size, bool symmetric, str scales, str kind) -> Tensor
void quantize_linear(Call& call) {
  const Tensor weight = call.tensor();
  const QuantFormat format = read_format(call);
  OSTINATO_CHECK(format.factors == DType::bfloat16 && !format.has_minimums && !format.is_e2m1 && !format.is_e4m3,
                 "quantize_linear writes integers with bfloat16 scales, without minimums; other formats are only read");
  OSTINATO_CHECK((weight.dtype == DType::float32 || weight.dtype == DType::bfloat16) && weight.dim == 2 &&
                     is_contiguous(weight, 1),
                 "a weight to quantise must be a float32 or bfloat16 matrix with contiguous rows");
  const int64_t out_features = weight.sizes[0];
  const int64_t in_features = weight.sizes[1];
  const QuantizedShape shape(out_features, in_features, format);
  give_packed(call, shape, [&](int64_t begin, int64_t end, uint8_t* packed) {
    std::vector<float> memory(2 * kPanel * format.group_size);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t row = panel * kPanel;
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, out_features - row));
      uint8_t* target = packed + panel * shape.panel_bytes;
      const int64_t offset = row * weight.strides[0];
      if (weight.dtype == DType::float32) {
        quantize_panel(weight.as<float>() + offset, weight.strides[0], columns, in_features, shape, target,
                       memory.data());
      } else {
        quantize_panel(weight.as<BFloat16>() + offset, weight.strides[0], columns, in_features, shape, target,
                       memory.data());
      }
    }
  });
}

}  // namespace

OSTINATO_KERNEL(quantize_linear, quantize_linear);

}  // namespace ostinato::linear
