// One layer step of decode context parallelism on two GPUs, as graph replays: all-gather of the
// query heads, attention over the local half of the cache with all 128 heads, exchange and merge. L
// is the whole context, each rank holds L / 2. A row of every shape is compared with a float64
// softmax over the whole context before it is timed.
//
//   step_cuda_bench [--backend NAME] [--json FILE]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "bench/device_random.h"
#include "bench/rank_threads.h"
#include "bench/report.h"
#include "kernels/attention_backend.h"
#include "runtime/cuda_exchange.h"
#include "runtime/step_upload.h"

namespace dcp::bench {
namespace {

constexpr int kRanks = 2;
constexpr int kHeads = 128;
constexpr int kDqk = 576;
constexpr int kDv = 512;
constexpr int kPageTokens = 64;
constexpr double kScale = 0.0721688;  // 1 / sqrt(192)
constexpr std::uint64_t kQuerySeed = 2;
constexpr ExchangeKind kKinds[] = {ExchangeKind::kAgRs, ExchangeKind::kA2a};

// An engine's pipeline of NCCL and FlashMLA on the same machine type, and the floor of a rank.
struct Shape {
  int batch, context;
  double peer_ag_rs_us, peer_a2a_us, floor_us;
};
constexpr Shape kShapes[] = {{1, 16384, 48.4, 48.9, 2.9},        {1, 65536, 69.2, 70.0, 11.6},
                             {1, 131072, 82.7, 84.0, 23.1},      {1, 524288, 173.3, 172.5, 92.4},
                             {4, 131072, 158.1, 158.4, 92.4},    {8, 32768, 107.8, 108.3, 46.2},
                             {8, 131072, 271.3, 287.3, 184.8},   {32, 32768, 309.6, 308.1, 184.8},
                             {64, 16384, 319.0, 318.9, 184.8},   {128, 8192, 370.2, 366.1, 184.8},
                             {128, 32768, 1098.7, 1115.1, 739.4}};

std::uint64_t KvSeed(int rank) { return 20 + static_cast<std::uint64_t>(rank); }

class RankBench {
 public:
  RankBench(RankContext& context, const BackendEntry& entry, const Shape& shape,
            const cuda::DeviceBuffer& kv)
      : c_(context), entry_(entry), shape_(shape), kv_(kv), local_(shape.context / kRanks) {}

  Status Prepare() {
    DCP_ASSIGN_OR_RETURN(backend_, entry_.make({.geometry = {.heads = kHeads,
                                                             .d_qk = kDqk,
                                                             .d_v = kDv,
                                                             .page_tokens = kPageTokens,
                                                             .softmax_scale = kScale},
                                                .max_tokens = shape_.batch,
                                                .device = c_.device,
                                                .max_keys = local_}));
    const std::size_t query_bytes = QueryItems() * sizeof(Bf16);
    DCP_ASSIGN_OR_RETURN(query_, cuda::DeviceBuffer::Create(c_.device, query_bytes, "queries"));
    DCP_ASSIGN_OR_RETURN(gathered_, cuda::DeviceBuffer::Create(c_.device, query_bytes, "queries"));
    DCP_RETURN_IF_ERROR(FillRandom(query_.as<Bf16>(), static_cast<std::int64_t>(QueryItems()),
                                   kQuerySeed, c_.stream.ref()));
    const auto pages = static_cast<std::size_t>(shape_.batch) * Size(local_ / kPageTokens);
    DCP_ASSIGN_OR_RETURN(
        upload_, StepUpload::Create(c_.device, (1 << 16) + pages * 4 + backend_->MaxPlanBytes()));
    upload_->Begin();
    DeviceStep step{.tokens = shape_.batch,
                    .entries = shape_.batch,
                    .table_stride = local_ / kPageTokens,
                    .output_dtype = DType::kBf16,
                    .lse_base = LogBase::kTwo};
    std::vector<std::int32_t> table(pages), begin;
    for (std::size_t i = 0; i < pages; ++i) table[i] = static_cast<std::int32_t>(i);
    for (int e = 0; e <= shape_.batch; ++e) begin.push_back(e);
    const std::vector<std::int32_t> bounds(Size(kRanks * shape_.batch), local_);
    DCP_ASSIGN_OR_RETURN(step.bounds, upload_->Add(std::span<const std::int32_t>(bounds)));
    DCP_ASSIGN_OR_RETURN(step.block_table, upload_->Add(std::span<const std::int32_t>(table)));
    DCP_ASSIGN_OR_RETURN(const StepUpload::Room room, upload_->Reserve(backend_->MaxPlanBytes()));
    DCP_RETURN_IF_ERROR(backend_
                            ->Plan({.entry_begin = begin.data(),
                                    .bound = bounds.data(),
                                    .entries = shape_.batch,
                                    .tokens = shape_.batch},
                                   room.host)
                            .status());
    step.plan = room.device;
    upload_->step() = step;
    DCP_RETURN_IF_ERROR(upload_->Send(c_.stream.ref()));
    return c_.stream.Synchronize();
  }

  Result<double> Microseconds(ExchangeKind kind) {
    DCP_ASSIGN_OR_RETURN(
        CudaExchange exchange,
        CudaExchange::Create(c_.device, kind, {.ranks = kRanks, .heads = kHeads, .d_v = kDv},
                             shape_.batch));
    DCP_RETURN_IF_ERROR(exchange.PoisonResults(c_.stream.ref()));
    const TimePoint deadline = Clock::now() + std::chrono::seconds(60);
    DCP_RETURN_IF_ERROR(Enqueue(exchange, deadline));
    DCP_RETURN_IF_ERROR(c_.comm.Wait(deadline, c_.stream.ref()));
    DCP_ASSIGN_OR_RETURN(const std::byte* output,
                         exchange.Output(shape_.batch, DType::kBf16, nullptr, c_.stream.ref()));
    DCP_RETURN_IF_ERROR(Verify(output, kind));
    DCP_ASSIGN_OR_RETURN(const cuda::Graph graph, cuda::Graph::Capture(c_.stream, [&] {
                           return Enqueue(exchange, deadline);
                         }));
    return MedianMicroseconds(c_, graph, 1, 41);
  }

 private:
  static std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }
  std::size_t QueryItems() const { return Size(shape_.batch) * kHeads * kDqk; }

  Status Enqueue(CudaExchange& exchange, TimePoint deadline) {
    const std::size_t half = QueryItems() * sizeof(Bf16) / kRanks;
    // The gathered heads lie rank by rank; putting them token by token is left to the kernel that
    // makes the queries, as in the peer.
    DCP_RETURN_IF_ERROR(c_.comm.AllGather({query_.data(), half}, {gathered_.data(), kRanks * half},
                                          deadline, c_.stream.ref()));
    DCP_RETURN_IF_ERROR(backend_->Run({.query = query_.as<Bf16>(),
                                       .kv = kv_.as<Bf16>(),
                                       .page_stride = std::int64_t{kPageTokens} * kDqk,
                                       .partial = exchange.Layout(shape_.batch),
                                       .stream = c_.stream.ref(),
                                       .step = upload_->device_step()}));
    return exchange.Enqueue(c_.comm,
                            {.capacity = shape_.batch,
                             .step = upload_->device_step(),
                             .faults = upload_->faulty_rows(),
                             .partial_base = entry_.caps.lse_base,
                             .deadline = deadline,
                             .stream = c_.stream.ref()},
                            [](RankPhase) { return Status::Ok(); });
  }

  // The last token's first head of this rank.
  Status Verify(const std::byte* output, ExchangeKind kind) {
    const std::size_t row = Size(shape_.batch - 1) * kHeads / kRanks;
    std::vector<Bf16> got(kDv);
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(got.data(), output + row * kDv * sizeof(Bf16),
                                        kDv * sizeof(Bf16), c_.stream.ref()));
    DCP_RETURN_IF_ERROR(c_.stream.Synchronize());
    const std::uint64_t query_row =
        std::uint64_t(shape_.batch - 1) * kHeads + std::uint64_t(c_.rank) * (kHeads / kRanks);
    std::vector<double> query(kDqk), key(kDqk), truth(kDv);
    for (int i = 0; i < kDqk; ++i) {
      query[Size(i)] = ToFloat(RandomAt(kQuerySeed, query_row * kDqk + std::uint64_t(i)));
    }
    double max = -std::numeric_limits<double>::infinity();
    double sum = 0;
    for (int r = 0; r < kRanks; ++r) {
      for (int k = 0; k < local_; ++k) {
        const std::uint64_t at =
            (std::uint64_t(shape_.batch - 1) * std::uint64_t(local_) + std::uint64_t(k)) * kDqk;
        double score = 0;
        for (std::size_t i = 0; i < kDqk; ++i) {
          key[i] = ToFloat(RandomAt(KvSeed(r), at + i));
          score += query[i] * key[i];
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
        for (std::size_t i = 0; i < kDv; ++i) truth[i] += weight * key[i];
      }
    }
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < kDv; ++i) {
      error += std::pow(ToFloat(got[i]) - truth[i] / sum, 2);
      norm += std::pow(truth[i] / sum, 2);
    }
    const double limit = kind == ExchangeKind::kAgRs ? 8e-3 : 4e-3;
    if (std::sqrt(error) <= limit * std::sqrt(norm)) return Status::Ok();
    return Status(Reason::kInternal, "B " + std::to_string(shape_.batch) + ", L " +
                                         std::to_string(shape_.context) + ": relative error " +
                                         std::to_string(std::sqrt(error / norm)));
  }

  RankContext& c_;
  const BackendEntry& entry_;
  const Shape shape_;
  const cuda::DeviceBuffer& kv_;
  const std::int32_t local_;
  std::unique_ptr<AttentionBackend> backend_;
  cuda::DeviceBuffer query_, gathered_;
  std::optional<StepUpload> upload_;
};

Status RunAll(const std::string& backend, const std::string& json, const std::string& command) {
  DCP_ASSIGN_OR_RETURN(const BackendEntry* entry, SelectBackend(Backends(), backend,
                                                                {.heads = kHeads,
                                                                 .d_qk = kDqk,
                                                                 .d_v = kDv,
                                                                 .page_tokens = kPageTokens,
                                                                 .softmax_scale = kScale},
                                                                Arch::kCuda));
  std::int64_t most = 0;
  for (const Shape& s : kShapes) {
    most = std::max(most, std::int64_t{s.batch} * (s.context / kRanks) * kDqk);
  }
  double us[std::size(kShapes)][2] = {};
  std::mutex mutex;
  DCP_RETURN_IF_ERROR(RunRanks(kRanks, [&](RankContext& context) -> Status {
    DCP_ASSIGN_OR_RETURN(
        const cuda::DeviceBuffer kv,
        cuda::DeviceBuffer::Create(context.device, static_cast<std::size_t>(most) * 2, "the KV"));
    DCP_RETURN_IF_ERROR(
        FillRandom(kv.as<Bf16>(), most, KvSeed(context.rank), context.stream.ref()));
    for (std::size_t i = 0; i < std::size(kShapes); ++i) {
      RankBench bench(context, *entry, kShapes[i], kv);
      DCP_RETURN_IF_ERROR(bench.Prepare());
      for (std::size_t k = 0; k < 2; ++k) {
        DCP_ASSIGN_OR_RETURN(const double mine, bench.Microseconds(kKinds[k]));
        const std::lock_guard lock(mutex);
        us[i][k] = std::max(us[i][k], mine);  // the slower rank's
      }
    }
    return Status::Ok();
  }));
  std::printf("%s\n%5s %8s %10s %10s %10s %10s %7s\n", std::string(entry->name).c_str(), "B", "L",
              "ag_rs us", "a2a us", "peer us", "floor us", "ratio");
  std::string rows;
  for (std::size_t i = 0; i < std::size(kShapes); ++i) {
    const Shape& s = kShapes[i];
    const double peer = std::min(s.peer_ag_rs_us, s.peer_a2a_us);
    const double ratio = peer / std::min(us[i][0], us[i][1]);
    std::printf("%5d %8d %10.1f %10.1f %10.1f %10.1f %7.2f\n", s.batch, s.context, us[i][0],
                us[i][1], peer, s.floor_us, ratio);
    char row[256];
    std::snprintf(row, sizeof(row),
                  "%s{\"B\": %d, \"L\": %d, \"ag_rs_us\": %.2f, \"a2a_us\": %.2f, "
                  "\"direct_us\": null, \"peer_us\": %.1f, \"floor_us\": %.1f, \"ratio\": %.3f}",
                  i == 0 ? "" : ",\n", s.batch, s.context, us[i][0], us[i][1], peer, s.floor_us,
                  ratio);
    rows += row;
  }
  return json.empty() ? Status::Ok() : WriteReport(json, command, rows);
}

}  // namespace
}  // namespace dcp::bench

int main(int argc, char** argv) {
  dcp::cuda::SetUpEnvironment();
  std::string backend = "auto";
  std::string json;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    std::string* const to = name == "--backend" ? &backend : name == "--json" ? &json : nullptr;
    if (to == nullptr || i + 1 == argc) {
      std::fprintf(stderr, "usage: %s [--backend NAME] [--json FILE]\n", argv[0]);
      return 2;
    }
    *to = argv[i + 1];
  }
  const dcp::Status status = dcp::bench::RunAll(backend, json, dcp::bench::CommandLine(argc, argv));
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
