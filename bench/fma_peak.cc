#include "kernels/hwy_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/fma_peak.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "bench/fma_peak.h"

HWY_BEFORE_NAMESPACE();
namespace dcp::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Enough chains to hide the latency of an fma, few enough for 16 registers.
constexpr int kChains = 12;

// Returns the FLOP done; `sink` keeps the compiler honest.
double FmaChains(int rounds, float* sink) {
  using F32 = hn::CappedTag<float, 8>;
  const F32 d;
  const auto a = hn::Set(d, 0.999f);
  const auto b = hn::Set(d, 0.001f);
  hn::Vec<F32> x[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) x[i] = hn::Set(d, static_cast<float>(i));
  for (int n = 0; n < rounds; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) x[i] = hn::MulAdd(x[i], a, b);
  }
  auto sum = hn::Zero(d);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sum = hn::Add(sum, x[i]);
  *sink = hn::GetLane(sum);
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * rounds;
}

}  // namespace HWY_NAMESPACE
}  // namespace dcp::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dcp::bench {
namespace {

HWY_EXPORT(FmaChains);

constexpr int kRounds = 400'000;  // about 1 ms
constexpr int kRuns = 20;

unsigned long long Tsc() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return 0;
#endif
}

}  // namespace

double RunFmas(int rounds) {
  float sink = 0;
  const double flop = HWY_DYNAMIC_DISPATCH(FmaChains)(rounds, &sink);
  volatile float keep = sink;
  static_cast<void>(keep);
  return flop;
}

FmaPeak MeasureFmaPeak(int threads) {
  FmaPeak best;
  std::barrier sync(threads);
  const auto run = [&](int index) {
    for (int i = 0; i < kRuns; ++i) {
      sync.arrive_and_wait();
      const auto start = std::chrono::steady_clock::now();
      const unsigned long long tsc = Tsc();
      const double flop = RunFmas(kRounds);
      sync.arrive_and_wait();  // the slowest thread ends the run
      const auto cycles = static_cast<double>(Tsc() - tsc);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      if (index != 0) continue;
      best.gflops = std::max(best.gflops, threads * flop / time.count() * 1e-9);
      if (cycles > 0) best.flop_per_tsc_cycle = std::max(best.flop_per_tsc_cycle, flop / cycles);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& thread : others) thread.join();
  return best;
}

}  // namespace dcp::bench
#endif  // HWY_ONCE
