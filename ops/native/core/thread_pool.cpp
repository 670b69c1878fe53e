// The thread pool's loops. They have a file of their own because <chrono> and <thread> take a third of a second to
// parse.
#include "core/thread_pool.h"

#include <chrono>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ostinato {
namespace {

using Clock = std::chrono::steady_clock;
// How long a pool thread spins before it sleeps. This is longer than the time between two kernels of a step, and longer
// than the last part of another thread (a tenth of a millisecond).
constexpr std::chrono::microseconds kWorkerSpinTimeout{500};
// How long the caller spins for pool threads that are computing a part. Then the caller sleeps. So if another program
// has taken the core of a pool thread, that thread can run on the caller's core.
constexpr std::chrono::microseconds kCallerSpinTimeout{300};

// Tells the processor that this thread spins.
void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once accept(value) holds. Spins for `spin_timeout`, then sleeps until the value changes.
template <class Accept>
void wait_for(std::atomic<uint32_t>& value, const Accept& accept, std::chrono::microseconds spin_timeout) {
  uint32_t seen = value.load(std::memory_order_acquire);
  if (accept(seen)) return;
  const auto end = Clock::now() + spin_timeout;
  do {
    for (int i = 0; i < 32; ++i) {
      relax();
      seen = value.load(std::memory_order_acquire);
      if (accept(seen)) return;
    }
  } while (Clock::now() < end);
  while (!accept(seen)) {
    value.wait(seen);
    seen = value.load(std::memory_order_acquire);
  }
}

}  // namespace

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
  num_done_.store(0, std::memory_order_relaxed);
  const uint32_t call = calls_.load(std::memory_order_relaxed) + 1;
  ticket_.store(uint64_t{call} << 32 | uint64_t(num_workers) << 16, std::memory_order_release);
  calls_.store(call);
  calls_.notify_all();
  take_parts();
  wait_for(num_done_, [&](uint32_t done) { return done == static_cast<uint32_t>(num_workers); }, kCallerSpinTimeout);
  const std::exception_ptr failure = failure_;
  busy_.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

void ThreadPool::spawn_workers(int count) {
  try {
    for (; num_spawned_ < count; ++num_spawned_) std::thread([this] { worker_loop(); }).detach();
  } catch (const std::system_error&) {
    // The system allows no more threads. The existing threads do the work.
  }
}

void ThreadPool::worker_loop() {
  uint32_t call = 0;
  while (true) {
    wait_for(calls_, [&](uint32_t newest) { return newest != call; }, kWorkerSpinTimeout);
    call = calls_.load(std::memory_order_acquire);
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
    num_done_.fetch_add(1, std::memory_order_acq_rel);
    num_done_.notify_all();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

}  // namespace ostinato
