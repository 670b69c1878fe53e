// Threads that share a kernel's work with the one that calls it, and are not waited for before they begin.
//
// An OpenMP loop ends when all threads have come. Where other programs use the cores too, one of them comes a time
// slice late, and a decode step has forty such loops. Of a crew whoever is awake takes the next worker's part: a
// helper that comes late finds nothing left, and only one that is in the middle of a part is waited for. The parts
// divide a kernel's work among themselves while they run (linear_tasks.h, attention.cpp), so a caller that is left
// alone does all of it. Who computes a value does not change it.
//
// Helpers sleep when nothing has come for a while: an idle engine uses no processor.
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

class Crew {
 public:
  using Part = void (*)(void* context, int worker);

  // Runs part(context, worker) for every worker in [0, num_workers), at most 65535, on the calling thread and on
  // helpers that are free, and returns when all have ended. An exception of any of them is thrown again. A second
  // thread that calls meanwhile does its work alone.
  void run(int num_workers, Part part, void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      for (int worker = 0; worker < num_workers; ++worker) part(context, worker);
      return;
    }
    hire(num_workers - 1);
    part_ = part;
    context_ = context;
    failed_.store(false, std::memory_order_relaxed);
    failure_ = nullptr;
    num_done_.store(0, std::memory_order_relaxed);
    const uint32_t call = calls_.load(std::memory_order_relaxed) + 1;
    ticket_.store(uint64_t{call} << 32 | uint64_t(num_workers) << 16, std::memory_order_release);
    calls_.store(call);
    calls_.notify_all();
    work();
    wait_for(num_done_, [&](uint32_t done) { return done == static_cast<uint32_t>(num_workers); }, kPatience);
    const std::exception_ptr failure = failure_;
    busy_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Longer than what lies between two kernels of a step, and than another's last part (a tenth of a millisecond).
  static constexpr std::chrono::microseconds kIdle{500};
  // For helpers that are in the middle of a part. Then the caller's core is theirs, if theirs was taken.
  static constexpr std::chrono::microseconds kPatience{300};

  // Returns once accept(value), spinning at first.
  template <class Accept>
  static void wait_for(std::atomic<uint32_t>& value, const Accept& accept, std::chrono::microseconds spinning) {
    uint32_t seen = value.load(std::memory_order_acquire);
    if (accept(seen)) return;
    const auto end = Clock::now() + spinning;
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

  void hire(int num_helpers) {
    try {
      for (; num_helpers_ < num_helpers; ++num_helpers_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: the others do the work.
    }
  }

  void help() {
    uint32_t call = 0;
    while (true) {
      wait_for(calls_, [&](uint32_t newest) { return newest != call; }, kIdle);
      call = calls_.load(std::memory_order_acquire);
      work();
    }
  }

  // Takes parts of the present call until none is left. What a call has set may be read after a part was taken: the
  // call does not end before that part has.
  void work() {
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

  alignas(64) std::atomic<uint64_t> ticket_{0};  // call << 32 | workers << 16 | the next worker to be taken
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  alignas(64) std::atomic<bool> busy_{false};
  Part part_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
  int num_helpers_ = 0;
};

}  // namespace ostinato
