// A thread pool for small decode steps.
//
// The calling thread and any awake pool thread take parts of a call from one shared counter. The call returns when all
// parts are done, and it never waits for a pool thread that has not started. An OpenMP loop waits at its barrier for
// every thread. If other programs use the cores too, one of the threads is often a time slice late, and a decode step
// has forty such loops. In this pool, the other threads have then taken all parts, and nothing waits for the late
// thread.
//
// A kernel's workers divide its work among themselves while they run (linear/tasks.h, attention/attend.h). If no pool
// thread joins, the caller does all of it. Which thread computes a value does not change the value.
//
// Pool threads sleep when no call has come for a while, so an idle engine uses no processor.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace ostinato {

// A number that threads wait for. std::atomic::wait does the same, but its headers, those of C++20, take a quarter of a
// second to parse in each unit.
struct alignas(64) AwaitedNumber {
  // Sleeps until the number is not `seen`.
  void sleep_while(uint32_t seen);
  // Call this after each change of the number.
  void wake_all();

  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleepers{0};
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
};

class ThreadPool {
 public:
  using Part = void (*)(void* context, int worker);

  // Runs part(context, worker) for every worker in [0, num_workers), at most 65535, on the calling thread and on free
  // pool threads. Returns when all parts have ended. An exception of a part is thrown again here. While the pool is in
  // use, a call from another thread runs all of its parts on that thread.
  void run(int num_workers, Part part, void* context);

 private:
  void spawn_workers(int count);
  void worker_loop();
  void take_parts();

  alignas(64) std::atomic<uint64_t> ticket_{0};  // call << 32 | number of workers << 16 | the next worker to take
  AwaitedNumber calls_;
  AwaitedNumber num_done_;
  alignas(64) std::atomic<bool> busy_{false};
  Part part_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
  int num_spawned_ = 0;
};

}  // namespace ostinato
