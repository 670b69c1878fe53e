// Prints the GFLOP/s of one thread's float32 multiply-adds in registers: the peak for comparisons with matrix kernels.
#include "core/simd.h"

#include <cstdio>
#include <ctime>

using ostinato::F32;

namespace {

constexpr int kChains = 12;  // at least latency times throughput: 8 on current processors
constexpr int kSteps = 200'000;
constexpr int kRepeats = 30;

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main() {
  F32 sum[kChains];
  for (F32& each : sum) each = ostinato::broadcast(1.0f);
  F32 factor = ostinato::broadcast(0.999f);
  asm volatile("" : "+x"(factor.v));  // so that the compiler does not know the value
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const double begin = cpu_seconds();
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (F32& each : sum) each = ostinato::fma(each, factor, factor);
    }
    const double seconds = cpu_seconds() - begin;
    if (seconds < best) best = seconds;
  }
  for (F32& each : sum) asm volatile("" ::"x"(each.v));
  std::printf("%.3f\n", 2.0 * kChains * F32::width * kSteps / best / 1e9);
}
