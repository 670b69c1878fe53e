// Exercises ops/native/core/thread_pool.h by itself, under a thread sanitizer where there is one (test_thread_pool.py).
// Prints what went wrong and ends with 1, or ends with 0.
#include "core/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

struct Work {
  std::vector<int> times;  // how often each item was done; not atomic, so that two threads at one item are a race
  std::atomic<size_t> next{0};
  std::atomic<int> parts{0};
  int failing_worker = -1;

  static void part(void* context, int worker) {
    auto& work = *static_cast<Work*>(context);
    work.parts.fetch_add(1);
    if (worker == work.failing_worker) throw std::runtime_error("as asked");
    for (size_t i = work.next.fetch_add(1); i < work.times.size(); i = work.next.fetch_add(1)) ++work.times[i];
  }
};

bool is_done_once(ostinato::ThreadPool& pool, int num_workers, size_t num_items) {
  Work work;
  work.times.resize(num_items);
  pool.run(num_workers, Work::part, &work);
  for (int times : work.times) {
    if (times != 1) return false;
  }
  return work.parts == num_workers;
}

void many_calls(ostinato::ThreadPool& pool, int num_calls) {
  for (int call = 0; call < num_calls; ++call) {
    check(is_done_once(pool, 1 + call % 5, call % 37), "a call left work or did some twice");
    // long enough for pool threads to fall asleep
    if (call % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void failures(ostinato::ThreadPool& pool) {
  for (int worker = 0; worker < 3; ++worker) {
    Work work;
    work.times.resize(10);
    work.failing_worker = worker;
    bool thrown = false;
    try {
      pool.run(3, Work::part, &work);
    } catch (const std::runtime_error& error) {
      thrown = std::strcmp(error.what(), "as asked") == 0;
    }
    check(thrown, "a part's exception did not reach the caller");
    check(work.parts == 3, "a call ended before its parts");
  }
}

void two_callers(ostinato::ThreadPool& pool) {
  std::thread other([&] { many_calls(pool, 3000); });
  many_calls(pool, 3000);
  other.join();
}

void a_forked_process(ostinato::ThreadPool& pool) {
  const pid_t child = fork();
  if (child == 0) _exit(is_done_once(pool, 4, 100) ? 0 : 1);  // its pool threads stayed in the parent
  int status = 0;
  check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "a forked process cannot do its work alone");
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void idleness(ostinato::ThreadPool& pool) {
  check(is_done_once(pool, 4, 100), "a call left work");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  check(cpu_seconds() - before < 0.1, "pool threads keep the processor busy between calls");
}

}  // namespace

int main(int argc, char**) {
  auto* pool = new ostinato::ThreadPool;
  many_calls(*pool, 20000);
  failures(*pool);
  two_callers(*pool);
  idleness(*pool);
  if (argc == 1) a_forked_process(*pool);  // sanitizers do not support a fork of a process with several threads
  std::_Exit(0);
}
