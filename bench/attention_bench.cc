// Attention of one rank on the CPU: DeepSeek-like heads (512 + 64), one sequence, one query token.
// Every case is compared with cpu_reference before it is timed. FLOP = 2 H L (d_qk + d_v).
//
//   build/release/bin/attention_bench [--benchmark_filter=cpu_simd/H:16]
//
// Columns: gflops is the median run. of_peak is the median of its ratio to the FMA rate measured
// right after each run on the same threads: neighbours on a shared machine slow both. best_of_peak
// compares the fastest run with the fastest FMA rate.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/fma_peak.h"
#include "kernels/attention_backend.h"
#include "kernels/worker_pool.h"

namespace dcp::bench {
namespace {

constexpr int kPeakRounds = 100'000;  // a quarter of a millisecond
constexpr int kInputs = 3;  // rotated, so that no run finds all of its own data in the caches

struct Case {
  const BackendEntry* backend;
  int heads;
  int keys;
  int page_tokens;
  int threads;
};

class Problem {
 public:
  Problem(const Case& c, unsigned seed)
      : geometry_{.heads = c.heads,
                  .d_qk = 576,
                  .d_v = 512,
                  .page_tokens = c.page_tokens,
                  .softmax_scale = 1 / std::sqrt(192.0),
                  .partial_dtype = DType::kF32},
        bound_(c.keys) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int pages = (c.keys + c.page_tokens - 1) / c.page_tokens;
    table_.resize(static_cast<std::size_t>(pages));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random);
    query_.resize(static_cast<std::size_t>(c.heads) * geometry_.d_qk);
    kv_.resize(static_cast<std::size_t>(pages) * c.page_tokens * geometry_.d_qk);
    for (Bf16& x : query_) x = ToBf16(normal(random));
    for (Bf16& x : kv_) x = ToBf16(normal(random));
    out_.resize(static_cast<std::size_t>(c.heads) * geometry_.d_v);
    lse_.resize(static_cast<std::size_t>(c.heads));
  }

  BackendSetup Setup(WorkerPool* pool) const {
    return {.geometry = geometry_, .max_tokens = 1, .pool = pool};
  }

  Status Run(AttentionBackend& backend) {
    return backend.Run({.query = query_.data(),
                        .kv = kv_.data(),
                        .page_stride = std::int64_t{geometry_.page_tokens} * geometry_.d_qk,
                        .entry_begin = entry_begin_,
                        .block_table = table_.data(),
                        .block_table_stride = static_cast<std::int64_t>(table_.size()),
                        .bound = &bound_,
                        .entries = 1,
                        .tokens = 1,
                        .partial = {.out = reinterpret_cast<std::byte*>(out_.data()),
                                    .lse = reinterpret_cast<std::byte*>(lse_.data()),
                                    .heads_per_group = geometry_.heads}});
  }

  double Flop() const { return 2.0 * geometry_.heads * bound_ * (geometry_.d_qk + geometry_.d_v); }
  const std::vector<float>& out() const { return out_; }

 private:
  AttentionGeometry geometry_;
  std::int32_t bound_;
  const std::int32_t entry_begin_[2] = {0, 1};
  std::vector<std::int32_t> table_;
  std::vector<Bf16> query_;
  std::vector<Bf16> kv_;
  std::vector<float> out_;
  std::vector<float> lse_;
};

template <class F>
double Seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  return time.count();
}

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

// Largest relative error of a row against cpu_reference; negative if something failed to run.
double Error(Problem& problem, AttentionBackend& backend, int heads) {
  const auto reference = Backends()[0].make(problem.Setup(nullptr));
  if (!reference.ok() || !problem.Run(**reference).ok()) return -1;
  const std::vector<float> expected = problem.out();
  if (!problem.Run(backend).ok()) return -1;
  const std::size_t d_v = expected.size() / static_cast<std::size_t>(heads);
  double worst = 0;
  for (std::size_t begin = 0; begin < expected.size(); begin += d_v) {
    double error = 0;
    double norm = 0;
    for (std::size_t i = begin; i < begin + d_v; ++i) {
      error += std::pow(double{problem.out()[i]} - expected[i], 2);
      norm += std::pow(expected[i], 2);
    }
    worst = std::max(worst, std::sqrt(error / norm));
  }
  return worst;
}

void Attention(benchmark::State& state, Case c) {
  WorkerPool pool(c.threads - 1);
  std::vector<Problem> problems;
  for (unsigned i = 0; i < kInputs; ++i) problems.emplace_back(c, i + 1);
  auto backend = c.backend->make(problems[0].Setup(&pool));
  if (!backend.ok()) return state.SkipWithError(backend.status().message().c_str());
  const double error = Error(problems[0], **backend, c.heads);
  if (!(error >= 0 && error < 1e-5)) return state.SkipWithError("differs from cpu_reference");

  const std::function<void(std::int64_t)> fmas = [](std::int64_t) { RunFmas(kPeakRounds); };
  const double peak_flop = c.threads * RunFmas(kPeakRounds);
  const double flop = problems[0].Flop();
  std::vector<double> seconds;
  std::vector<double> peak_seconds;
  std::vector<double> ratios;
  std::size_t next = 0;
  for (auto _ : state) {
    Problem& problem = problems[next++ % kInputs];
    Status status;
    seconds.push_back(Seconds([&] { status = problem.Run(**backend); }));
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(seconds.back());
    peak_seconds.push_back(Seconds([&] { pool.ParallelFor(c.threads, fmas); }));
    ratios.push_back(flop / seconds.back() / (peak_flop / peak_seconds.back()));
  }
  const double best = *std::min_element(seconds.begin(), seconds.end());
  const double best_peak = *std::min_element(peak_seconds.begin(), peak_seconds.end());
  state.counters["gflops"] = flop / Median(seconds) * 1e-9;
  state.counters["of_peak"] = Median(ratios);
  state.counters["best_of_peak"] = flop / best / (peak_flop / best_peak);
  state.counters["median_us"] = Median(seconds) * 1e6;
  state.counters["error"] = error;
}

void PrintPeak() {
  for (const int threads : {1, 2}) {
    const FmaPeak peak = MeasureFmaPeak(threads);
    std::printf("FMA peak, %d thread%s: %.1f GFLOP/s, %.1f FLOP per TSC cycle and thread\n",
                threads, threads == 1 ? "" : "s", peak.gflops, peak.flop_per_tsc_cycle);
  }
}

void Register() {
  for (const BackendEntry& entry : Backends()) {
    if (entry.caps.arch != Arch::kHost || entry.name == "cpu_reference") continue;
    for (const int threads : {1, 2}) {
      for (const int heads : {16, 64, 128}) {
        for (const int keys : {1, 1024, 8192}) {
          for (const int page_tokens : {16, 64}) {
            const std::string name = std::string(entry.name) + "/H:" + std::to_string(heads) +
                                     "/L:" + std::to_string(keys) +
                                     "/page:" + std::to_string(page_tokens) +
                                     "/threads:" + std::to_string(threads);
            benchmark::RegisterBenchmark(name.c_str(), Attention,
                                         Case{.backend = &entry,
                                              .heads = heads,
                                              .keys = keys,
                                              .page_tokens = page_tokens,
                                              .threads = threads})
                ->UseManualTime()
                ->MinTime(0.1);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dcp::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  dcp::bench::PrintPeak();
  dcp::bench::Register();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
