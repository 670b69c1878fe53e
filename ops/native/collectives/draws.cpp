// Draws of tokens from logits whose columns are divided among the ranks. ops/parallel/divided_draws.py defines them.
//
// Rank 0 has the parameters of the draws. It begins each call with a request, which the other ranks answer.
#include "collectives/arguments.h"
#include "core/division.h"
#include "core/kernel.h"
#include "rows/draw.h"

#include <cstring>

namespace ostinato::collectives {
namespace {

using logit_rows::Candidate;
using logit_rows::kLogitsPerWorker;
using logit_rows::kNever;
using logit_rows::Row;

struct Request {
  enum Kind : int64_t { logits, likeliest, draws } kind;
  int64_t rows;
};

// This rank's columns of the logits, and the work of all ranks with them. Every rank calls the same functions.
class Parts {
 public:
  Parts(Call& call, Group& group, const Tensor& part)
      : call_(call), group_(group), logits_(part.as<float>()), rows_(part.sizes[0]), width_(part.sizes[1]) {}

  int64_t num_tokens() const { return width_ * group_.world(); }  // V

  // On rank 0: tells the other ranks what to do.
  void request(Request::Kind kind) { exchange_request({kind, rows_}); }

  // On other ranks: waits for rank 0.
  Request::Kind await_request() {
    const Request request = exchange_request({});
    OSTINATO_CHECK(request.rows == rows_, "rank 0 has ", request.rows, " rows of logits, and this rank has ", rows_);
    return request.kind;
  }

  // Gives the rank `reader` the logits of rows [first, first + count) in `out` [count, V], which only it reads.
  void collect(int reader, int64_t first, int64_t count, float* out) {
    const float* own = logits_ + first * width_;
    const auto copy = [&](int rank, int64_t at, int64_t size, const float* from) {
      while (size > 0) {  // row by row
        const int64_t column = at % width_, here = std::min(width_ - column, size);
        std::memcpy(out + at / width_ * num_tokens() + rank * width_ + column, from, here * sizeof(float));
        at += here, from += here, size -= here;
      }
    };
    // The other ranks write their first pieces meanwhile.
    if (group_.rank() == reader) copy(reader, 0, count * width_, own);
    const auto write = [&](int64_t at, int64_t size, char* slot) { std::memcpy(slot, own + at, size * sizeof(float)); };
    const auto read = [&](int64_t at, int64_t size, const auto& slot_of) {
      for (int rank = 0; rank < group_.world(); ++rank) {
        if (rank != reader) copy(rank, at, size, reinterpret_cast<const float*>(slot_of(rank)));
      }
    };
    group_.gather(reader, count * width_, sizeof(float), write, read);
  }

  // Rank 0 gets the likeliest token of each row; null on other ranks. No logits are passed on.
  void find_likeliest(int64_t* ids) {
    auto* best = call_.workspace<Candidate>(rows_);
    const int64_t first_id = group_.rank() * width_;
    divide<kLogitsPerWorker>(call_.threads(), NumParts{rows_}, rows_ * width_).for_each([&](int64_t row) {
      const Row part(logits_ + row * width_, width_);
      best[row] = {part.most(), static_cast<int32_t>(first_id + part.likeliest())};
    });
    const auto write = [&](int64_t at, int64_t size, char* slot) { std::memcpy(slot, best + at, size * sizeof(Candidate)); };
    const auto read = [&](int64_t at, int64_t size, const auto& slot_of) {
      for (int rank = 1; rank < group_.world(); ++rank) {
        const auto* other = reinterpret_cast<const Candidate*>(slot_of(rank));
        for (int64_t i = 0; i < size; ++i) {  // of equal logits, the first id counts: that of the lower rank
          if (other[i].logit > best[at + i].logit) best[at + i] = other[i];
        }
      }
    };
    group_.gather(0, rows_, sizeof(Candidate), write, read);
    for (int64_t row = 0; ids != nullptr && row < rows_; ++row) ids[row] = best[row].logit > kNever ? best[row].id : 0;
  }

  // Each rank draws the tokens of some rows. `inputs` [6, R] are the parameters of rank 0's draws, and `ids` gets the
  // tokens of all rows; both are null on other ranks.
  void draw(const double* inputs, int64_t* ids) {
    auto* parameters = call_.workspace<double>(sampling::kNumParameters * rows_);
    const auto write_inputs = [&](int64_t at, int64_t size, char* slot) {
      std::memcpy(slot, inputs + at, size * sizeof(double));
    };
    const auto read_inputs = [&](int64_t at, int64_t size, const char* slot) {
      std::memcpy(parameters + at, slot, size * sizeof(double));
    };
    group_.broadcast(0, sampling::kNumParameters * rows_, sizeof(double), write_inputs, read_inputs);
    if (inputs == nullptr) inputs = parameters;

    const int64_t begin = first_row(group_.rank()), count = first_row(group_.rank() + 1) - begin;
    auto* logits = call_.workspace<float>(count * num_tokens());
    for (int rank = 0; rank < group_.world(); ++rank) {
      collect(rank, first_row(rank), first_row(rank + 1) - first_row(rank), logits);
    }
    const int64_t most = first_row(1);  // rows of a rank
    auto* own = call_.workspace<int64_t>(most);
    divide<kLogitsPerWorker>(call_.threads(), NumParts{count}, count * num_tokens()).for_each([&](int64_t row) {
      const auto p = sampling::Parameters::read(inputs + begin + row, rows_);
      own[row] = sampling::draw(logits + row * num_tokens(), num_tokens(), p);
    });
    const auto write_ids = [&](int64_t at, int64_t size, char* slot) { std::memcpy(slot, own + at, size * sizeof(int64_t)); };
    const auto read_ids = [&](int64_t at, int64_t size, const auto& slot_of) {
      for (int rank = 0; rank < group_.world(); ++rank) {
        const int64_t left = first_row(rank + 1) - first_row(rank) - at;
        if (left <= 0) continue;
        const auto* from = rank == 0 ? own + at : reinterpret_cast<const int64_t*>(slot_of(rank));
        std::memcpy(ids + first_row(rank) + at, from, std::min(size, left) * sizeof(int64_t));
      }
    };
    group_.gather(0, most, sizeof(int64_t), write_ids, read_ids);
  }

 private:
  Request exchange_request(Request request) {
    const auto write = [&](int64_t, int64_t, char* slot) { std::memcpy(slot, &request, sizeof request); };
    const auto read = [&](int64_t, int64_t, const char* slot) { std::memcpy(&request, slot, sizeof request); };
    group_.broadcast(0, 1, sizeof request, write, read);
    return request;
  }

  // The first row whose token `rank` draws. Rank 0 has the most rows.
  int64_t first_row(int rank) const { return (rows_ * rank + group_.world() - 1) / group_.world(); }

  Call& call_;
  Group& group_;
  const float* logits_;  // [R, V / world]
  int64_t rows_, width_;
};

void check_part(const Tensor& part) {
  OSTINATO_CHECK(part.dtype == DType::float32 && is_contiguous_matrix(part) && part.sizes[1] > 0,
                 "part must be a contiguous float32 matrix with at least one column");
}

// draw_divided(Tensor part, Tensor inputs, Tensor group) -> Tensor
void draw_divided(Call& call) {
  const Tensor part = call.tensor();
  const Tensor inputs = call.tensor();
  const Tensor handle = call.tensor();
  Group& group = group_of(handle);
  check_part(part);
  OSTINATO_CHECK(group.rank() == 0, "only rank 0 has the parameters of draws, and this is rank ", group.rank());
  OSTINATO_CHECK(inputs.dtype == DType::float64 && is_contiguous_matrix(inputs) &&
                     inputs.sizes[0] == sampling::kNumParameters && inputs.sizes[1] == part.sizes[0],
                 "inputs must be a contiguous float64 matrix [6, R]");
  const Tensor out = call.empty(part.sizes, 1, DType::int64);
  Parts parts(call, group, part);
  const auto* paths = inputs.as<double>();
  const auto is_greedy = [](double path) { return static_cast<sampling::Path>(static_cast<int>(path)) == sampling::Path::greedy; };
  if (std::all_of(paths, paths + part.sizes[0], is_greedy)) {
    parts.request(Request::likeliest);
    parts.find_likeliest(out.as<int64_t>());
  } else {
    parts.request(Request::draws);
    parts.draw(paths, out.as<int64_t>());
  }
  call.give(out);
}

// collect_logits(Tensor part, Tensor group, int world) -> Tensor
void collect_logits(Call& call) {
  const Tensor part = call.tensor();
  const Tensor handle = call.tensor();
  const int64_t world = call.integer();
  Group& group = group_of(handle);
  check_part(part);
  OSTINATO_CHECK(world == group.world(), "world must be the number of the group's ranks");
  OSTINATO_CHECK(group.rank() == 0, "only rank 0 collects logits, and this is rank ", group.rank());
  const int64_t sizes[] = {part.sizes[0], part.sizes[1] * world};
  const Tensor out = call.empty(sizes, 2, DType::float32);
  Parts parts(call, group, part);
  parts.request(Request::logits);
  parts.collect(0, 0, part.sizes[0], out.as<float>());
  call.give(out);
}

// answer_rank_0(Tensor part, Tensor group) -> Tensor
void answer_rank_0(Call& call) {
  const Tensor part = call.tensor();
  const Tensor handle = call.tensor();
  Group& group = group_of(handle);
  check_part(part);
  OSTINATO_CHECK(group.rank() != 0, "rank 0 has nothing to answer");
  const int64_t none = 0;
  const Tensor out = call.empty(&none, 1, DType::int64);
  Parts parts(call, group, part);
  switch (parts.await_request()) {
    case Request::logits: parts.collect(0, 0, part.sizes[0], nullptr); break;
    case Request::likeliest: parts.find_likeliest(nullptr); break;
    case Request::draws: parts.draw(nullptr, nullptr); break;
  }
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(draw_divided, draw_divided);
OSTINATO_KERNEL(collect_logits, collect_logits);
OSTINATO_KERNEL(answer_rank_0, answer_rank_0);

}  // namespace ostinato::collectives
