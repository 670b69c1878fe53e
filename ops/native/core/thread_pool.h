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

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ostinato {

class ThreadPool {
 public:
  using Part = void (*)(void* context, int worker);

  // Runs part(context, worker) for every worker in [0, num_workers), at most 65535, on the calling thread and on free
  // pool threads. Returns when all parts have ended. An exception of a part is thrown again here. While the pool is in
  // use, a call from another thread runs all of its parts on that thread.
  void run(int num_workers, Part part, void* context) {
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

 private:
  using Clock = std::chrono::steady_clock;
  // How long a pool thread spins before it sleeps. This is longer than the time between two kernels of a step, and longer
  // than the last part of another thread (a tenth of a millisecond).
  static constexpr std::chrono::microseconds kWorkerSpinTimeout{500};
  // How long the caller spins for pool threads that are computing a part. Then the caller sleeps. So if another program
  // has taken the core of a pool thread, that thread can run on the caller's core.
  static constexpr std::chrono::microseconds kCallerSpinTimeout{300};

  // Returns once accept(value) holds. Spins for `spin_timeout`, then sleeps until the value changes.
  template <class Accept>
  static void wait_for(std::atomic<uint32_t>& value, const Accept& accept, std::chrono::microseconds spin_timeout) {
    uint32_t seen = value.load(std::memory_order_acquire);
    if (accept(seen)) return;
    const auto end = Clock::now() + spin_timeout;
    do {
      for (int i = 0; i < 32; ++i) {
        pause();
        seen = value.load(std::memory_order_acquire);
        if (accept(seen)) return;
      }
    } while (Clock::now() < end);
    while (!accept(seen)) {
      value.wait(seen);
      seen = value.load(std::memory_order_acquire);
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void spawn_workers(int count) {
    try {
      for (; num_spawned_ < count; ++num_spawned_) std::thread([this] { worker_loop(); }).detach();
    } catch (const std::system_error&) {
      // The system allows no more threads. The existing threads do the work.
    }
  }

  void worker_loop() {
    uint32_t call = 0;
    while (true) {
      wait_for(calls_, [&](uint32_t newest) { return newest != call; }, kWorkerSpinTimeout);
      call = calls_.load(std::memory_order_acquire);
      take_parts();
    }
  }

  // Runs parts of the present call until none is left. After taking a part, this thread may read the call's fields,
  // because the call does not end before that part ends.
  void take_parts() {
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

  alignas(64) std::atomic<uint64_t> ticket_{0};  // call << 32 | number of workers << 16 | the next worker to take
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  alignas(64) std::atomic<bool> busy_{false};
  Part part_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
  int num_spawned_ = 0;
};

}  // namespace ostinato
