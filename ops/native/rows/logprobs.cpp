// Natural-log probabilities of chosen tokens and of the likeliest ones, for each row of logits. Chunks of a row are
// summed in float32, and the chunks' sums are added in float64 in their order. So a row's bits depend neither on other
// rows nor on the number of threads.
//
// Plain torch needs a pass for the sum, one for the rank and one for the likeliest tokens. If there are few rows, it
// divides a sum over 65,536 logits or more among threads. Tests compare the kernel with the plain torch in
// ops/logprobs/row_logprobs.py.
#include "core/division.h"
#include "core/kernel.h"
#include "rows/row.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ostinato::logprobs {
namespace {

using logit_rows::Candidate;
using logit_rows::kLogitsPerWorker;
using logit_rows::kNever;
using logit_rows::Row;

// The results of one row.
struct Places {
  float* logprobs;      // [W]
  int64_t* rank;        // the rank of the first token
  int64_t* top_ids;     // [top]
  float* top_logprobs;  // [top]
};

void score(const float* logits, int64_t count, const int64_t* token_ids, int64_t num_tokens, int64_t top, Places out) {
  const Row row(logits, count);
  std::vector<double> sums;
  row.sum(1.0f, sums);
  const double total = row.most() + std::log(sums.back());
  const auto logprob = [&](float logit) { return logit > kNever ? static_cast<float>(logit - total) : kNever; };
  for (int64_t i = 0; i < num_tokens; ++i) out.logprobs[i] = logprob(logits[token_ids[i]]);
  const float first = logits[token_ids[0]];
  *out.rank = 1 + row.count_above(first == first ? first : kNever);
  if (top == 0) return;
  std::vector<Candidate> likeliest;
  row.candidates(top, likeliest);
  // Tokens whose logit is NaN are not among the candidates. They come last.
  for (int64_t id = 0; id < count && static_cast<int64_t>(likeliest.size()) < top; ++id) {
    if (logits[id] != logits[id]) likeliest.push_back({kNever, static_cast<int32_t>(id)});
  }
  for (int64_t i = 0; i < top; ++i) {
    out.top_ids[i] = likeliest[i].id;
    out.top_logprobs[i] = logprob(likeliest[i].logit);
  }
}

// row_logprobs(Tensor logits, Tensor token_ids, int top) -> (Tensor, Tensor, Tensor, Tensor)
void row_logprobs(Call& call) {
  const Tensor logits = call.tensor();
  const Tensor token_ids = call.tensor();
  const int64_t top = call.integer();
  OSTINATO_CHECK(logits.dtype == DType::float32 && logits.dim == 2 && logits.sizes[1] > 0 && is_contiguous(logits, 1),
                 "row_logprobs: logits must be float32 [R, V] with contiguous rows, V at least 1");
  const int64_t num_rows = logits.sizes[0], count = logits.sizes[1];
  OSTINATO_CHECK(token_ids.dtype == DType::int64 && token_ids.dim == 2 && token_ids.sizes[0] == num_rows &&
                     token_ids.sizes[1] > 0 && is_contiguous(token_ids, 1),
                 "row_logprobs: token_ids must be int64 [R, W] with contiguous rows, W at least 1");
  OSTINATO_CHECK(top >= 0 && top <= count,
                 "row_logprobs: top must be in [0, ", count, "], got ", top);
  const int64_t num_tokens = token_ids.sizes[1];
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < num_tokens; ++i) {
      const int64_t id = token_ids.as<int64_t>()[r * token_ids.strides[0] + i];
      OSTINATO_CHECK(id >= 0 && id < count, "row_logprobs: token_ids[", r, ", ", i, "] = ", id, " must be in [0, ",
                     count, ")");
    }
  }
  const int64_t wide[] = {num_rows, num_tokens}, leading[] = {num_rows, top};
  const Tensor logprobs = call.empty(wide, 2, DType::float32);
  const Tensor ranks = call.empty(&num_rows, 1, DType::int64);
  const Tensor top_ids = call.empty(leading, 2, DType::int64);
  const Tensor top_logprobs = call.empty(leading, 2, DType::float32);
  divide<kLogitsPerWorker>(call.threads(), NumParts{num_rows}, num_rows * count).for_each([&](int64_t r) {
    score(logits.as<float>() + r * logits.strides[0], count, token_ids.as<int64_t>() + r * token_ids.strides[0],
          num_tokens, top,
          {logprobs.as<float>() + r * num_tokens, ranks.as<int64_t>() + r, top_ids.as<int64_t>() + r * top,
           top_logprobs.as<float>() + r * top});
  });
  call.give({logprobs, ranks, top_ids, top_logprobs});
}

}  // namespace

OSTINATO_KERNEL(row_logprobs, row_logprobs);

}  // namespace ostinato::logprobs
