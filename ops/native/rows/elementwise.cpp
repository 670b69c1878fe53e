// Kernels between the matrix products of a layer: normalisation and rotary embedding. They compute in float32 and
// round once. Rows are independent, so the bits of a row depend neither on other rows nor on the number of threads.
#include "rows/each_row.h"

#include <algorithm>

namespace ostinato::elementwise {
namespace {

// Calls kernel(T{}, W{}) with the element types of rows and of a norm's weight: that of the rows, or float.
template <class Kernel>
void with_elements(DType dtype, DType weight, const Kernel& kernel) {
  with_element(dtype, [&]<class T>(T) {
    if (weight == DType::float32) return kernel(T{}, float{});
    kernel(T{}, T{});
  });
}

void check_vector(const Tensor& vector, int64_t size, DType dtype, const char* message) {
  OSTINATO_CHECK(vector.dtype == dtype && vector.dim == 1 && vector.sizes[0] == size && is_contiguous(vector), message);
}

// Checks the weight of an RMS norm of `size` elements.
void check_weight(const Tensor& weight, int64_t size, DType dtype) {
  check_vector(weight, size, weight.dtype == DType::float32 ? DType::float32 : dtype,
               "weight must be a contiguous vector of the normalised size, in x's dtype or float32");
}

// The sum of value(x) over a row; `value` takes vectors and floats.
template <class T, class Value>
OSTINATO_INLINE float sum_row(const T* x, int64_t count, const Value& value) {
  F32 sums[2] = {broadcast(0.0f), broadcast(0.0f)};
  int64_t c = 0;
  for (; c + 2 * F32::width <= count; c += 2 * F32::width) {
    sums[0] = sums[0] + value(load(x + c));
    sums[1] = sums[1] + value(load(x + c + F32::width));
  }
  float rest = 0.0f;
  for (; c < count; ++c) rest += value(to_float(x[c]));
  return reduce_sum(sums[0] + sums[1]) + rest;
}

template <class T>
OSTINATO_INLINE float sum_squares(const T* x, int64_t count) {
  return sum_row(x, count, [](auto value) { return value * value; });
}

// `squares`: the sum of the squares of `count` elements.
inline float inverse_rms(float squares, int64_t count, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
}

// ---- normalisation ---------------------------------------------------------------------------------------

template <class T, class Weight>
void scale_row(const T* x, const Weight* weight, const T* residual, int64_t count, float scale, T* out) {
  if (residual == nullptr) {
    columns(
        count, [&](int64_t c) { store(out + c, load(x + c) * broadcast(scale) * load(weight + c)); },
        [&](int64_t c) { from_float(to_float(x[c]) * scale * to_float(weight[c]), out + c); });
    return;
  }
  columns(
      count,
      [&](int64_t c) { store(out + c, load(x + c) * broadcast(scale) * load(weight + c) + load(residual + c)); },
      [&](int64_t c) {
        from_float(to_float(x[c]) * scale * to_float(weight[c]) + to_float(residual[c]), out + c);
      });
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, int64_t count, float eps, T* out) {
  const float mean = sum_row(x, count, [](auto value) { return value; }) / static_cast<float>(count);
  struct SquaredDistance {
    float mean;
    F32 operator()(F32 x) const { return (x - broadcast(mean)) * (x - broadcast(mean)); }
    float operator()(float x) const { return (x - mean) * (x - mean); }
  };
  const float variance = sum_row(x, count, SquaredDistance{mean}) / static_cast<float>(count);
  const float scale = 1.0f / std::sqrt(variance + eps);
  columns(
      count,
      [&](int64_t c) {
        const F32 normal = (load(x + c) - broadcast(mean)) * broadcast(scale);
        store(out + c, normal * load(weight + c) + load(bias + c));
      },
      [&](int64_t c) {
        from_float((to_float(x[c]) - mean) * scale * to_float(weight[c]) + to_float(bias[c]), out + c);
      });
}

// rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> Tensor
void rms_norm(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const auto eps = static_cast<float>(call.number());
  const Tensor residual = call.optional_tensor();
  check_matrix(x);
  const int64_t count = x.sizes[1];
  check_weight(weight, count, x.dtype);
  if (residual.exists()) {
    OSTINATO_CHECK(residual.dtype == x.dtype && residual.dim == 2 && residual.sizes[0] == x.sizes[0] &&
                       residual.sizes[1] == count && is_contiguous(residual, 1),
                   "residual must have x's shape and dtype, and contiguous rows");
  }
  const Tensor out = call.empty(x.sizes, 2, x.dtype);
  with_elements(x.dtype, weight.dtype, [&]<class T, class Weight>(T, Weight) {
    for_each_row(call.threads(), NumParts{x.sizes[0]}, out.num_bytes(), [&](int64_t row) {
      const T* added = residual.exists() ? residual.as<T>() + row * residual.strides[0] : nullptr;
      const T* from = x.as<T>() + row * x.strides[0];
      const float scale = inverse_rms(sum_squares(from, count), count, eps);
      scale_row(from, weight.as<Weight>(), added, count, scale, out.as<T>() + row * count);
    });
  });
  call.give(out);
}

// square_sums(Tensor q, Tensor k) -> Tensor
void square_sums(Call& call) {
  const Tensor q = call.tensor();
  const Tensor k = call.tensor();
  check_matrix(q);
  check_matrix(k);
  OSTINATO_CHECK(k.dtype == q.dtype && k.sizes[0] == q.sizes[0], "k must have q's dtype and number of rows");
  const int64_t rows = q.sizes[0], sizes[] = {rows, 2};
  const Tensor out = call.empty(sizes, 2, DType::float32);
  with_element(q.dtype, [&]<class T>(T) {
    for_each_row(call.threads(), NumParts{rows}, q.num_bytes() + k.num_bytes(), [&](int64_t row) {
      out.as<float>()[2 * row] = sum_squares(q.as<T>() + row * q.strides[0], q.sizes[1]);
      out.as<float>()[2 * row + 1] = sum_squares(k.as<T>() + row * k.strides[0], k.sizes[1]);
    });
  });
  call.give(out);
}

// scale_by_squares(Tensor x, Tensor weight, Tensor squares, int column, int count, float eps) -> Tensor
void scale_by_squares(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor squares = call.tensor();
  const int64_t column = call.integer();
  const int64_t count = call.integer();
  const auto eps = static_cast<float>(call.number());
  check_matrix(x);
  const int64_t rows = x.sizes[0], size = x.sizes[1];
  check_weight(weight, size, x.dtype);
  OSTINATO_CHECK(squares.dtype == DType::float32 && squares.dim == 2 && squares.sizes[0] == rows && column >= 0 &&
                     column < squares.sizes[1],
                 "squares must be a float32 matrix with as many rows as x, and with the column");
  const Tensor out = call.empty(x.sizes, 2, x.dtype);
  with_elements(x.dtype, weight.dtype, [&]<class T, class Weight>(T, Weight) {
    for_each_row(call.threads(), NumParts{rows}, x.num_bytes(), [&](int64_t row) {
      const float sum = squares.as<float>()[row * squares.strides[0] + column * squares.strides[1]];
      scale_row<T>(x.as<T>() + row * x.strides[0], weight.as<Weight>(), nullptr, size, inverse_rms(sum, count, eps),
                   out.as<T>() + row * size);
    });
  });
  call.give(out);
}

// layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor
void layer_norm(Call& call) {
  const Tensor x = call.tensor();
  const Tensor weight = call.tensor();
  const Tensor bias = call.tensor();
  const auto eps = static_cast<float>(call.number());
  check_matrix(x);
  const int64_t count = x.sizes[1];
  check_vector(weight, count, x.dtype, "weight must be a contiguous vector as long as a row, in x's dtype");
  check_vector(bias, count, x.dtype, "bias must be a contiguous vector as long as a row, in x's dtype");
  const Tensor out = call.empty(x.sizes, 2, x.dtype);
  with_element(x.dtype, [&]<class T>(T) {
    for_each_row(call.threads(), NumParts{x.sizes[0]}, out.num_bytes(), [&](int64_t row) {
      layer_norm_row(x.as<T>() + row * x.strides[0], weight.as<T>(), bias.as<T>(), count, eps,
                     out.as<T>() + row * count);
    });
  });
  call.give(out);
}

// ---- rotary embedding ------------------------------------------------------------------------------------

// Writes a head: its first 2 * half elements rotated, the others kept. Values come from vector_at(column) and
// single_at(column).
template <class T, class VectorAt, class SingleAt>
OSTINATO_INLINE void rotate_values(const VectorAt& vector_at, const SingleAt& single_at, int64_t head_dim,
                                   const float* cos, const float* sin, int64_t half, T* out) {
  columns(
      half,
      [&](int64_t c) {
        const F32 a = vector_at(c), b = vector_at(half + c), cosine = load(cos + c), sine = load(sin + c);
        store(out + c, a * cosine - b * sine);
        store(out + half + c, b * cosine + a * sine);
      },
      [&](int64_t c) {
        const float a = single_at(c), b = single_at(half + c);
        from_float(a * cos[c] - b * sin[c], out + c);
        from_float(b * cos[c] + a * sin[c], out + half + c);
      });
  columns(
      head_dim - 2 * half, [&](int64_t c) { store(out + 2 * half + c, vector_at(2 * half + c)); },
      [&](int64_t c) { from_float(single_at(2 * half + c), out + 2 * half + c); });
}

// The same for a head that is normalised first, if there is a weight: multiplied by `scale` and by the weight.
template <class T, class Weight>
void rotate_head(const T* x, const Weight* weight, float scale, int64_t head_dim, const float* cos, const float* sin,
                 int64_t half, T* out) {
  if (weight == nullptr) {
    rotate_values([&](int64_t c) { return load(x + c); }, [&](int64_t c) { return to_float(x[c]); }, head_dim, cos, sin,
                  half, out);
  } else {
    rotate_values([&](int64_t c) { return load(x + c) * broadcast(scale) * load(weight + c); },
                  [&](int64_t c) { return to_float(x[c]) * scale * to_float(weight[c]); }, head_dim, cos, sin, half, out);
  }
}

// rotate_heads(Tensor x, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, int num_q_heads, float eps)
//   -> Tensor
void rotate_heads(Call& call) {
  const Tensor x = call.tensor();
  const Tensor cos = call.tensor();
  const Tensor sin = call.tensor();
  const Tensor q_weight = call.optional_tensor();
  const Tensor k_weight = call.optional_tensor();
  const int64_t num_q_heads = call.integer();
  const auto eps = static_cast<float>(call.number());
  check_element(x);
  OSTINATO_CHECK(x.dim == 3 && is_contiguous(x, 2), "x must be [T, H, D] with contiguous heads");
  const int64_t tokens = x.sizes[0], heads = x.sizes[1], head_dim = x.sizes[2];
  for (const Tensor& table : {cos, sin}) {
    OSTINATO_CHECK(table.dtype == DType::float32 && table.dim == 2 && table.sizes[0] == tokens &&
                       table.sizes[1] == cos.sizes[1] && 2 * table.sizes[1] <= head_dim && is_contiguous(table, 1),
                   "cos and sin must be float32 [T, R / 2] with contiguous rows, R at most the head's size");
  }
  for (const Tensor& weight : {q_weight, k_weight}) {
    if (!weight.exists()) continue;
    check_weight(weight, head_dim, x.dtype);
  }
  const Tensor& one_weight = q_weight.exists() ? q_weight : k_weight;
  OSTINATO_CHECK(!q_weight.exists() || !k_weight.exists() || q_weight.dtype == k_weight.dtype,
                 "q_weight and k_weight must have one dtype");
  const Tensor out = call.empty(x.sizes, 3, x.dtype);
  with_elements(x.dtype, one_weight.exists() ? one_weight.dtype : x.dtype, [&]<class T, class Weight>(T, Weight) {
    for_each_row(call.threads(), NumParts{tokens}, out.num_bytes(), [&](int64_t token) {
      const T* row = x.as<T>() + token * x.strides[0];
      // The scales of some heads come first: a head would wait for its own.
      constexpr int64_t kTogether = 32;
      float scales[kTogether];
      for (int64_t first = 0; first < heads; first += kTogether) {
        const int64_t last = std::min(first + kTogether, heads);
        const auto weight_of = [&](int64_t head) { return (head < num_q_heads ? q_weight : k_weight).as<Weight>(); };
        for (int64_t head = first; head < last; ++head) {
          if (weight_of(head) == nullptr) continue;
          scales[head - first] = inverse_rms(sum_squares(row + head * x.strides[1], head_dim), head_dim, eps);
        }
        for (int64_t head = first; head < last; ++head) {
          rotate_head(row + head * x.strides[1], weight_of(head), scales[head - first], head_dim,
                      cos.as<float>() + token * cos.strides[0], sin.as<float>() + token * sin.strides[0], cos.sizes[1],
                      out.as<T>() + (token * heads + head) * head_dim);
        }
      }
    });
  });
  call.give(out);
}

// Puts the elements that all heads share in front of each head's own elements.
// join_heads(Tensor shared, Tensor heads) -> Tensor
void join_heads(Call& call) {
  const Tensor shared = call.tensor();
  const Tensor heads = call.tensor();
  check_element(shared);
  OSTINATO_CHECK(shared.dim == 3 && heads.dim == 3 && shared.dtype == heads.dtype && shared.sizes[1] == 1 &&
                     shared.sizes[0] == heads.sizes[0] && is_contiguous(shared, 2) && is_contiguous(heads, 2),
                 "shared must be [T, 1, A] and heads [T, H, B], of one dtype, with contiguous heads");
  const int64_t sizes[] = {heads.sizes[0], heads.sizes[1], shared.sizes[2] + heads.sizes[2]};
  const Tensor out = call.empty(sizes, 3, heads.dtype);
  const int64_t element = element_size(heads.dtype);
  const int64_t first = shared.sizes[2] * element, second = heads.sizes[2] * element;
  for_each_row(call.threads(), NumParts{sizes[0]}, out.num_bytes(), [&](int64_t token) {
    const char* common = shared.as<char>() + token * shared.strides[0] * element;
    char* to = out.as<char>() + token * sizes[1] * (first + second);
    for (int64_t head = 0; head < sizes[1]; ++head, to += first + second) {
      std::memcpy(to, common, first);
      std::memcpy(to + first, heads.as<char>() + (token * heads.strides[0] + head * heads.strides[1]) * element, second);
    }
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(rms_norm, rms_norm);
OSTINATO_KERNEL(square_sums, square_sums);
OSTINATO_KERNEL(scale_by_squares, scale_by_squares);
OSTINATO_KERNEL(layer_norm, layer_norm);
OSTINATO_KERNEL(rotate_heads, rotate_heads);
OSTINATO_KERNEL(join_heads, join_heads);

}  // namespace ostinato::elementwise
