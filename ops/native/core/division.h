// Quotients rounded up, and how a kernel's work is divided among threads: how many workers pay, and which parts each
// worker has.
#pragma once

#include "core/threads.h"

#include <algorithm>

namespace ostinato {

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t count, int64_t multiple) { return ceil_divide(count, multiple) * multiple; }

// How many parts some work consists of, for example its rows. This is a type of its own, so that an amount of work in
// its place does not compile.
struct NumParts {
  int64_t count;
};

// The division of parts among workers. Each worker has successive parts, and two workers' numbers of parts differ by at
// most one.
struct Division {
  Threads threads;
  NumParts parts;
  int num_workers;

  // The parts of a worker are [begin, end).
  int64_t begin(int worker) const { return parts.count * worker / num_workers; }
  int64_t end(int worker) const { return begin(worker + 1); }

  // Calls body(begin, end) with the parts of each worker, and waits for all workers.
  template <class Body>
  void run(const Body& body) const {
    threads.run(num_workers, [&](int worker) { body(begin(worker), end(worker)); });
  }

  // Calls body(part) for each part, and waits for all workers.
  template <class Body>
  void for_each(const Body& body) const {
    run([&](int64_t part, int64_t last) {
      for (; part < last; ++part) body(part);
    });
  }
};

// How many workers pay for an amount of work, in any unit: at least one, and at most one for each thread. `kPerWorker`
// is the amount for which waking one more thread pays. It is a constant of the kernel, in the same unit.
template <int64_t kPerWorker>
int workers_for(const Threads& threads, int64_t work) {
  return static_cast<int>(std::max<int64_t>(std::min<int64_t>(work / kPerWorker, threads.count()), 1));
}

// Divides an amount of work that consists of `parts` among as many workers as pay. There are not more workers than
// parts.
template <int64_t kPerWorker>
Division divide(const Threads& threads, NumParts parts, int64_t work) {
  const int64_t workers = std::min<int64_t>(workers_for<kPerWorker>(threads, work), parts.count);
  return {threads, parts, static_cast<int>(std::max<int64_t>(workers, 1))};
}

}  // namespace ostinato
