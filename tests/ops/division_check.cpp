// Compares ops/native/core/division.h with a plain count (test_division.py). Prints what is wrong and ends with 1, or
// ends with 0.
#include "core/division.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

static int num_threads = 1;

namespace ostinato {

// These replace core/call.cpp, which needs torch: the workers run one after the other.
Threads Threads::of_caller() {
  Threads threads;
  threads.count_ = num_threads;
  return threads;
}
void Threads::run_parts(int num_workers, ThreadPool::Part part, void* context) const {
  for (int worker = 0; worker < num_workers; ++worker) part(context, worker);
}

}  // namespace ostinato

namespace {

constexpr int64_t kPerWorker = 100;

// Adds workers as long as there are threads, parts and enough work for one more.
int expected_workers(int64_t parts, int64_t work) {
  int workers = 1;
  while (workers < num_threads && workers < parts && (workers + 1) * kPerWorker <= work) ++workers;
  return workers;
}

void check_division(int64_t parts, int64_t work) {
  const auto holds = [&](bool value, const char* what) {
    if (value) return;
    std::printf("%s: %d threads, %d parts, work %d\n", what, num_threads, int(parts), int(work));
    std::exit(1);
  };
  const ostinato::Threads threads = ostinato::Threads::of_caller();
  const ostinato::Division division = ostinato::divide<kPerWorker>(threads, ostinato::NumParts{parts}, work);
  holds(division.num_workers == expected_workers(parts, work), "wrong number of workers");
  const int64_t each = parts / division.num_workers;
  std::vector<int64_t> ends;
  division.run([&](int64_t begin, int64_t end) {
    holds(begin == (ends.empty() ? 0 : ends.back()), "a worker does not begin where the worker before it ends");
    holds(end - begin == each || end - begin == each + 1, "workers' numbers of parts differ by more than one");
    ends.push_back(end);
  });
  holds(static_cast<int>(ends.size()) == division.num_workers && ends.back() == parts, "parts are left");
  std::vector<int64_t> found;
  division.for_each([&](int64_t part) { found.push_back(part); });
  holds(static_cast<int64_t>(found.size()) == parts, "a part was left out or done twice");
  for (int64_t part = 0; part < parts; ++part) holds(found[part] == part, "parts are not in order");
}

}  // namespace

int main() {
  for (num_threads = 1; num_threads <= 7; ++num_threads) {
    for (int64_t parts = 0; parts <= 30; ++parts) {
      for (int64_t work = 0; work <= 9 * kPerWorker; work += 25) check_division(parts, work);
    }
  }
}
