// Attention of one rank on a GPU, beside what FlashMLA takes for the same shapes on an H200: random
// pages, bf16 partials, all caches flushed before each launch, time from the first kernel's start
// to the last one's end. Rows of every shape are compared with a float64 softmax before it is
// timed.
//
//   attention_cuda_bench [--backend NAME]... [--device N] [--json FILE]
//
// Without --backend: every CUDA line of the table. Ratio = FlashMLA's time / ours.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda.h"
#include "bench/attention_peers.h"
#include "bench/device_random.h"
#include "bench/report.h"
#include "kernels/attention_backend.h"

namespace dcp::bench {
namespace {

constexpr int kDqk = 576;
constexpr int kDv = 512;
constexpr int kPageTokens = 64;
constexpr double kScale = 0.0721688;  // 1 / sqrt(192)
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
constexpr std::uint64_t kKvSeed = 1;
constexpr std::uint64_t kQuerySeed = 2;
constexpr int kCheckedRows = 3;
constexpr double kMaxError = 4e-3;

struct Options {
  std::vector<std::string> backends;
  int device = 0;
  std::string json;
  std::string command;
};

struct Timing {
  std::string backend;
  PeerResult peer;
  double ours_us;
  double ratio() const { return peer.total_us / ours_us; }
};

// Device memory for the largest shape, filled once.
struct Memory {
  cuda::DeviceBuffer kv, query, out, lse, step, flush;
};

std::int64_t Pages(const PeerResult& shape) {
  return std::int64_t{shape.batch} * (shape.keys / kPageTokens);
}

// Scatters the pages of a batch. A bijection: the number of pages is a power of two.
std::int32_t PageOf(const PeerResult& shape, std::int64_t i) {
  return static_cast<std::int32_t>(i * 0x9e3779b1 % Pages(shape));
}

int Bound(const PeerResult& shape, int token) {
  return shape.keys - shape.query_tokens + 1 + token % shape.query_tokens;
}

std::size_t Largest(std::size_t (*bytes)(const PeerResult&)) {
  std::size_t most = 0;
  for (const PeerResult& shape : kFlashMlaH200) most = std::max(most, bytes(shape));
  return most;
}

std::size_t Rows(const PeerResult& s) {
  return static_cast<std::size_t>(s.batch) * s.query_tokens * s.heads;
}

Status Allocate(const Options& options, StreamRef stream, Memory& m) {
  const auto make = [&options](cuda::DeviceBuffer& buffer, std::size_t bytes) {
    DCP_ASSIGN_OR_RETURN(buffer, cuda::DeviceBuffer::Create(options.device, bytes, "benchmark"));
    return Status::Ok();
  };
  const std::size_t kv_items =
      Largest([](const PeerResult& s) { return std::size_t(Pages(s)) * kPageTokens * kDqk; });
  const std::size_t query_items = Largest([](const PeerResult& s) { return Rows(s) * kDqk; });
  DCP_RETURN_IF_ERROR(make(m.kv, kv_items * sizeof(Bf16)));
  DCP_RETURN_IF_ERROR(make(m.query, query_items * sizeof(Bf16)));
  DCP_RETURN_IF_ERROR(
      make(m.out, Largest([](const PeerResult& s) { return Rows(s) * kDv * sizeof(Bf16); })));
  DCP_RETURN_IF_ERROR(
      make(m.lse, Largest([](const PeerResult& s) { return Rows(s) * sizeof(float); })));
  DCP_RETURN_IF_ERROR(make(m.flush, kFlushBytes));
  DCP_RETURN_IF_ERROR(
      FillRandom(m.kv.as<Bf16>(), static_cast<std::int64_t>(kv_items), kKvSeed, stream));
  return FillRandom(m.query.as<Bf16>(), static_cast<std::int64_t>(query_items), kQuerySeed, stream);
}

// One shape on one backend.
class Case {
 public:
  Case(const BackendEntry& entry, const PeerResult& shape, Memory& memory,
       const cuda::Stream& stream)
      : entry_(entry), shape_(shape), m_(memory), stream_(stream) {}

  Result<double> Microseconds() {
    DCP_RETURN_IF_ERROR(Prepare());
    DCP_RETURN_IF_ERROR(Poison());
    DCP_RETURN_IF_ERROR(Run());
    DCP_RETURN_IF_ERROR(Verify());
    return Time();
  }

 private:
  int tokens() const { return shape_.batch * shape_.query_tokens; }

  Status Prepare() {
    DCP_ASSIGN_OR_RETURN(backend_, entry_.make({.geometry = {.heads = shape_.heads,
                                                             .d_qk = kDqk,
                                                             .d_v = kDv,
                                                             .page_tokens = kPageTokens,
                                                             .softmax_scale = kScale},
                                                .max_tokens = tokens(),
                                                .device = stream_.device(),
                                                .max_keys = shape_.keys}));
    std::vector<std::int32_t> entry_begin;
    std::vector<std::int32_t> bounds;
    bounds.reserve(static_cast<std::size_t>(tokens()));
    for (int e = 0; e <= shape_.batch; ++e) entry_begin.push_back(e * shape_.query_tokens);
    for (int t = 0; t < tokens(); ++t) bounds.push_back(Bound(shape_, t));
    std::vector<std::int32_t> table;
    for (std::int64_t i = 0; i < Pages(shape_); ++i) table.push_back(PageOf(shape_, i));

    const std::size_t table_at = 256;
    const std::size_t bounds_at = table_at + (table.size() * 4 + 255) / 256 * 256;
    const std::size_t plan_at = bounds_at + (bounds.size() * 4 + 255) / 256 * 256;
    std::vector<std::byte> bytes(plan_at + backend_->MaxPlanBytes());
    DCP_ASSIGN_OR_RETURN(m_.step,
                         cuda::DeviceBuffer::Create(stream_.device(), bytes.size(), "step"));
    const std::byte* const base = m_.step.data();
    const DeviceStep step{.tokens = tokens(),
                          .entries = shape_.batch,
                          .table_stride = shape_.keys / kPageTokens,
                          .bounds = reinterpret_cast<const std::int32_t*>(base + bounds_at),
                          .block_table = reinterpret_cast<const std::int32_t*>(base + table_at),
                          .plan = base + plan_at};
    std::memcpy(bytes.data(), &step, sizeof(step));
    std::memcpy(bytes.data() + table_at, table.data(), table.size() * 4);
    std::memcpy(bytes.data() + bounds_at, bounds.data(), bounds.size() * 4);
    DCP_RETURN_IF_ERROR(backend_
                            ->Plan({.entry_begin = entry_begin.data(),
                                    .bound = bounds.data(),
                                    .entries = shape_.batch,
                                    .tokens = tokens()},
                                   std::span(bytes).subspan(plan_at))
                            .status());
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(m_.step.data(), bytes.data(), bytes.size(), stream_.ref()));
    return stream_.Synchronize();
  }

  // Outputs become NaN, and no input is left in the caches.
  Status Poison() {
    DCP_RETURN_IF_ERROR(cuda::FillAsync(m_.out.data(), 0xff, m_.out.size(), stream_.ref()));
    DCP_RETURN_IF_ERROR(cuda::FillAsync(m_.lse.data(), 0xff, m_.lse.size(), stream_.ref()));
    return cuda::FillAsync(m_.flush.data(), 0, m_.flush.size(), stream_.ref());
  }

  Status Run() {
    return backend_->Run(
        {.query = m_.query.as<Bf16>(),
         .kv = m_.kv.as<Bf16>(),
         .page_stride = std::int64_t{kPageTokens} * kDqk,
         .partial = {.out = m_.out.data(), .lse = m_.lse.data(), .heads_per_group = shape_.heads},
         .stream = stream_.ref(),
         .step = m_.step.as<DeviceStep>()});
  }

  Status Verify() {
    std::mt19937 random(static_cast<unsigned>(shape_.batch * 1000 + shape_.heads));
    for (int i = 0; i < kCheckedRows; ++i) {
      const int token = static_cast<int>(random() % static_cast<unsigned>(tokens()));
      const int head = static_cast<int>(random() % static_cast<unsigned>(shape_.heads));
      DCP_RETURN_IF_ERROR(VerifyRow(token, head));
    }
    return Status::Ok();
  }

  Status VerifyRow(int token, int head) {
    const std::size_t row = static_cast<std::size_t>(token) * shape_.heads + head;
    std::vector<Bf16> out(kDv);
    float lse = 0;
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(out.data(), m_.out.as<Bf16>() + row * kDv,
                                        kDv * sizeof(Bf16), stream_.ref()));
    DCP_RETURN_IF_ERROR(
        cuda::CopyAsync(&lse, m_.lse.as<float>() + row, sizeof(lse), stream_.ref()));
    DCP_RETURN_IF_ERROR(stream_.Synchronize());

    std::vector<float> query(kDqk);
    for (int i = 0; i < kDqk; ++i) query[i] = ToFloat(RandomAt(kQuerySeed, row * kDqk + i));
    std::vector<double> truth(kDv);
    double max = -std::numeric_limits<double>::infinity();
    double sum = 0;
    std::vector<float> key(kDqk);
    for (int k = 0; k < Bound(shape_, token); ++k) {
      const std::int64_t page =
          PageOf(shape_, std::int64_t{token / shape_.query_tokens} * (shape_.keys / kPageTokens) +
                             k / kPageTokens);
      const std::int64_t at = (page * kPageTokens + k % kPageTokens) * kDqk;
      double score = 0;
      for (int i = 0; i < kDqk; ++i) {
        key[i] = ToFloat(RandomAt(kKvSeed, static_cast<std::uint64_t>(at + i)));
        score += double{query[i]} * key[i];
      }
      score *= kScale;
      if (score > max) {
        const double keep = std::exp(max - score);
        for (double& x : truth) x *= keep;
        sum *= keep;
        max = score;
      }
      const double weight = std::exp(score - max);
      sum += weight;
      for (int i = 0; i < kDv; ++i) truth[i] += weight * key[i];
    }
    double error = 0;
    double norm = 0;
    for (int i = 0; i < kDv; ++i) {
      error += std::pow(ToFloat(out[i]) - truth[i] / sum, 2);
      norm += std::pow(truth[i] / sum, 2);
    }
    double expected = max + std::log(sum);
    if (entry_.caps.lse_base == LogBase::kTwo) expected *= kLog2E;
    if (std::sqrt(error) <= kMaxError * std::sqrt(norm) && std::fabs(lse - expected) <= 1e-4) {
      return Status::Ok();
    }
    return Status(Reason::kInternal,
                  "token " + std::to_string(token) + ", head " + std::to_string(head) +
                      ": relative error " + std::to_string(std::sqrt(error / norm)) + ", LSE " +
                      std::to_string(lse) + " instead of " + std::to_string(expected));
  }

  Result<double> Time() {
    const int runs = shape_.floor_us > 500 ? 20 : 40;
    std::vector<cuda::Event> begin;
    std::vector<cuda::Event> end;
    for (int i = 0; i < runs; ++i) {
      for (std::vector<cuda::Event>* events : {&begin, &end}) {
        DCP_ASSIGN_OR_RETURN(cuda::Event event,
                             cuda::Event::Create(stream_.device(), cuda::Event::Timing::kOn));
        events->push_back(std::move(event));
      }
      DCP_RETURN_IF_ERROR(Poison());
      DCP_RETURN_IF_ERROR(begin.back().Record(stream_.ref()));
      DCP_RETURN_IF_ERROR(Run());
      DCP_RETURN_IF_ERROR(end.back().Record(stream_.ref()));
    }
    DCP_RETURN_IF_ERROR(stream_.Synchronize());
    std::vector<double> us;
    for (int i = 0; i < runs; ++i) {
      float ms = 0;
      DCP_RETURN_IF_ERROR(cuda::Check(cudaEventElapsedTime(&ms, begin[i].raw(), end[i].raw()),
                                      "cudaEventElapsedTime"));
      us.push_back(1000.0 * ms);
    }
    std::nth_element(us.begin(), us.begin() + runs / 2, us.end());
    return us[runs / 2];
  }

  const BackendEntry& entry_;
  const PeerResult shape_;
  Memory& m_;
  const cuda::Stream& stream_;
  std::unique_ptr<AttentionBackend> backend_;
};

std::string JsonRows(const std::vector<Timing>& timings) {
  std::string rows;
  for (const Timing& t : timings) {
    char row[256];
    std::snprintf(row, sizeof(row),
                  "%s{\"backend\": \"%s\", \"h_q\": %d, \"b\": %d, \"s_q\": %d, \"s_k\": %d, "
                  "\"ours_us\": %.2f, \"peer_total_us\": %.1f, \"floor_us\": %.1f, "
                  "\"ratio\": %.3f}",
                  rows.empty() ? "" : ",\n", t.backend.c_str(), t.peer.heads, t.peer.batch,
                  t.peer.query_tokens, t.peer.keys, t.ours_us, t.peer.total_us, t.peer.floor_us,
                  t.ratio());
    rows += row;
  }
  return rows;
}

Status RunBackend(const BackendEntry& entry, Memory& memory, const cuda::Stream& stream,
                  std::vector<Timing>& timings) {
  std::printf("%s\n%5s %5s %4s %7s %10s %10s %10s %7s\n", std::string(entry.name).c_str(), "h_q",
              "b", "s_q", "s_k", "ours us", "peer us", "floor us", "ratio");
  double log_sum = 0;
  for (const PeerResult& shape : kFlashMlaH200) {
    const Result<double> us = Case(entry, shape, memory, stream).Microseconds();
    if (!us.ok()) {
      const Status why = us.status();
      return Status(why.reason(), std::string(entry.name) + " with h_q " +
                                      std::to_string(shape.heads) + ", b " +
                                      std::to_string(shape.batch) + ", s_k " +
                                      std::to_string(shape.keys) + ": " + why.message());
    }
    timings.push_back({.backend = std::string(entry.name), .peer = shape, .ours_us = *us});
    const Timing& t = timings.back();
    log_sum += std::log(t.ratio());
    std::printf("%5d %5d %4d %7d %10.1f %10.1f %10.1f %7.2f\n", shape.heads, shape.batch,
                shape.query_tokens, shape.keys, t.ours_us, shape.total_us, shape.floor_us,
                t.ratio());
    std::fflush(stdout);
  }
  std::printf("geometric mean of the ratios: %.3f\n", std::exp(log_sum / std::size(kFlashMlaH200)));
  return Status::Ok();
}

Status RunAll(const Options& options) {
  DCP_ASSIGN_OR_RETURN(const cuda::Stream stream, cuda::Stream::Create(options.device));
  Memory memory;
  DCP_RETURN_IF_ERROR(Allocate(options, stream.ref(), memory));
  std::vector<Timing> timings;
  for (const BackendEntry& entry : Backends()) {
    const auto& names = options.backends;
    const bool wanted =
        names.empty() || std::find(names.begin(), names.end(), entry.name) != names.end();
    if (entry.caps.arch != Arch::kCuda || !wanted) continue;
    DCP_RETURN_IF_ERROR(RunBackend(entry, memory, stream, timings));
  }
  if (timings.empty()) return Status(Reason::kConfig, "no CUDA backend has that name");
  return options.json.empty() ? Status::Ok()
                              : WriteReport(options.json, options.command, JsonRows(timings));
}

bool Parse(int argc, char** argv, Options& options) {
  options.command = CommandLine(argc, argv);
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 >= argc) return false;
    if (name == "--backend") {
      options.backends.emplace_back(argv[i + 1]);
    } else if (name == "--device") {
      options.device = std::atoi(argv[i + 1]);
    } else if (name == "--json") {
      options.json = argv[i + 1];
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace dcp::bench

int main(int argc, char** argv) {
  dcp::bench::Options options;
  if (!dcp::bench::Parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: %s [--backend NAME]... [--device N] [--json FILE]\n", argv[0]);
    return 2;
  }
  const dcp::Status status = dcp::bench::RunAll(options);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
