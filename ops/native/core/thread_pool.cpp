// The thread pool's loops. Threads and clocks are those of POSIX, because <chrono> and <thread> take a third of a
// second to parse.
#include "core/thread_pool.h"

#include <time.h>

namespace ostinato {
namespace {

// How long a pool thread spins before it sleeps. This is longer than the time between two kernels of a step, and longer
// than the last part of another thread (a tenth of a millisecond).
constexpr int64_t kWorkerSpinNanoseconds = 500'000;
// How long the caller spins for pool threads that are computing a part. Then the caller sleeps. So if another program
// has taken the core of a pool thread, that thread can run on the caller's core.
constexpr int64_t kCallerSpinNanoseconds = 300'000;

int64_t now_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// Tells the processor that this thread spins.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once accept(value) holds. Spins for `spin_nanoseconds`, then sleeps until the value changes.
template <class Accept>
void wait_for(AwaitedNumber& number, const Accept& accept, int64_t spin_nanoseconds) {
  uint32_t seen = number.value.load(std::memory_order_acquire);
  if (accept(seen)) return;
  const int64_t end = now_nanoseconds() + spin_nanoseconds;
  do {
    for (int i = 0; i < 32; ++i) {
      relax();
      seen = number.value.load(std::memory_order_acquire);
      if (accept(seen)) return;
    }
  } while (now_nanoseconds() < end);
  while (!accept(seen)) {
    number.sleep_while(seen);
    seen = number.value.load(std::memory_order_acquire);
  }
}

}  // namespace

// All threads see the accesses of `value` and `num_sleepers` in one order. So either `wake_all` sees this sleeper, or
// this thread sees the new value.
void AwaitedNumber::sleep_while(uint32_t seen) {
  pthread_mutex_lock(&mutex);
  num_sleepers.fetch_add(1);
  while (value.load() == seen) pthread_cond_wait(&changed, &mutex);
  num_sleepers.fetch_sub(1);
  pthread_mutex_unlock(&mutex);
}

void AwaitedNumber::wake_all() {
  if (num_sleepers.load() == 0) return;
  pthread_mutex_lock(&mutex);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

void ThreadPool::run(int num_workers, Part part, void* context) {
  if (busy_.exchange(true, std::memory_order_acquire)) {
    for (int worker = 0; worker < num_workers; ++worker) part(context, worker);
    return;
  }
  spawn_workers(num_workers - 1);
  part_ = part;
  context_ = context;
  failed_.store(false, std::memory_order_relaxed);
  failure_ = nullptr;
  num_done_.value.store(0, std::memory_order_relaxed);
  const uint32_t call = calls_.value.load(std::memory_order_relaxed) + 1;
  ticket_.store(uint64_t{call} << 32 | uint64_t(num_workers) << 16, std::memory_order_release);
  calls_.value.store(call);
  calls_.wake_all();
  take_parts();
  const auto all_done = [&](uint32_t done) { return done == static_cast<uint32_t>(num_workers); };
  wait_for(num_done_, all_done, kCallerSpinNanoseconds);
  const std::exception_ptr failure = failure_;
  busy_.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

void ThreadPool::spawn_workers(int count) {
  for (; num_spawned_ < count; ++num_spawned_) {
    const auto loop = [](void* pool) -> void* {
      static_cast<ThreadPool*>(pool)->worker_loop();
      return nullptr;
    };
    pthread_t thread;
    // If the system allows no more threads, the existing threads do the work.
    if (pthread_create(&thread, nullptr, loop, this) != 0) return;
    pthread_detach(thread);
  }
}

void ThreadPool::worker_loop() {
  uint32_t call = 0;
  while (true) {
    wait_for(calls_, [&](uint32_t newest) { return newest != call; }, kWorkerSpinNanoseconds);
    call = calls_.value.load(std::memory_order_acquire);
    take_parts();
  }
}

// Runs parts of the present call until none is left. After taking a part, this thread may read the call's fields,
// because the call does not end before that part ends.
void ThreadPool::take_parts() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const auto worker = static_cast<int>(ticket & 0xffff);
    const auto num_workers = static_cast<int>(ticket >> 16 & 0xffff);
    if (worker >= num_workers) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    try {
      part_(context_, worker);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
    num_done_.value.fetch_add(1);
    num_done_.wake_all();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

}  // namespace ostinato
