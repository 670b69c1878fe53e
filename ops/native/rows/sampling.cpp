// Draws a token from each row of logits (draw.h).
#include "core/division.h"
#include "core/kernel.h"
#include "rows/draw.h"

namespace ostinato::sampling {
namespace {

using logit_rows::kLogitsPerWorker;

// sample_tokens(Tensor logits, Tensor inputs) -> Tensor
void sample_tokens(Call& call) {
  const Tensor logits = call.tensor();
  const Tensor inputs = call.tensor();
  OSTINATO_CHECK(logits.dtype == DType::float32 && logits.dim == 2 && logits.sizes[1] > 0 && is_contiguous(logits, 1),
                 "logits must be float32 [R, V] with contiguous rows, V at least 1");
  const int64_t rows = logits.sizes[0], count = logits.sizes[1];
  OSTINATO_CHECK(inputs.dtype == DType::float64 && inputs.dim == 2 && inputs.sizes[0] == kNumParameters &&
                     inputs.sizes[1] == rows && is_contiguous(inputs, 1),
                 "inputs must be float64 [6, R] with contiguous rows");
  const Tensor out = call.empty(logits.sizes, 1, DType::int64);
  divide<kLogitsPerWorker>(call.threads(), NumParts{rows}, rows * count).for_each([&](int64_t row) {
    const Parameters parameters = Parameters::read(inputs.as<double>() + row, inputs.strides[0]);
    out.as<int64_t>()[row] = draw(logits.as<float>() + row * logits.strides[0], count, parameters);
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(sample_tokens, sample_tokens);

}  // namespace ostinato::sampling
