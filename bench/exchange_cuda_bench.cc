// Exchange and merge alone on two GPUs: everything between the attention kernel's output and the
// merged output, as graph replays of 20 exchanges back to back. 128 heads, d_v = 512, bf16
// partials, base-2 LSE. Compared with a float64 merge before it is timed.
//
//   exchange_cuda_bench [--json FILE]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "bench/device_random.h"
#include "bench/rank_threads.h"
#include "bench/report.h"
#include "runtime/cuda_exchange.h"
#include "runtime/step_upload.h"

namespace dcp::bench {
namespace {

constexpr int kRanks = 2;
constexpr int kHeads = 128;
constexpr int kDv = 512;
constexpr int kBatches[] = {1, 4, 16, 64, 128, 256};
constexpr int kMaxTokens = 256;
constexpr int kInside = 20;
constexpr int kRuns = 31;
constexpr double kNominalBytesPerUs = 478e3;  // NVLink, one way
constexpr ExchangeKind kKinds[] = {ExchangeKind::kAgRs, ExchangeKind::kA2a};

// NCCL on the same machine type: AG + correct + RS and A2A + merge, anchors of the design.
struct Peer {
  double ag_rs_us, a2a_us;
};
constexpr Peer kPeers[] = {{13.1, 13.5}, {15.0, 15.2}, {23.1, 21.4},
                           {43.5, 39.2}, {67.2, 62.7}, {119.7, 105.3}};

float LseOf(int rank, std::size_t row) {
  return ToFloat(RandomAt(50 + static_cast<std::uint64_t>(rank), row));
}

class RankBench {
 public:
  RankBench(RankContext& context, ExchangeKind kind, int tokens)
      : c_(context), kind_(kind), tokens_(tokens) {}

  Result<double> Run() {
    DCP_ASSIGN_OR_RETURN(
        CudaExchange exchange,
        CudaExchange::Create(c_.device, kind_, {.ranks = kRanks, .heads = kHeads, .d_v = kDv},
                             kMaxTokens));
    DCP_ASSIGN_OR_RETURN(StepUpload upload, StepUpload::Create(c_.device, 1 << 16));
    upload.Begin();
    DeviceStep step{.tokens = tokens_, .output_dtype = DType::kBf16, .lse_base = LogBase::kTwo};
    const std::vector<std::int32_t> bounds(static_cast<std::size_t>(kRanks * tokens_), 1);
    DCP_ASSIGN_OR_RETURN(step.bounds, upload.Add(std::span<const std::int32_t>(bounds)));
    upload.step() = step;
    DCP_RETURN_IF_ERROR(upload.Send(c_.stream.ref()));
    DCP_RETURN_IF_ERROR(FillPartials(exchange));
    DCP_RETURN_IF_ERROR(exchange.PoisonResults(c_.stream.ref()));

    const TimePoint deadline = Clock::now() + std::chrono::seconds(60);
    const auto enqueue = [&] {
      return exchange.Enqueue(c_.comm,
                              {.capacity = tokens_,
                               .step = upload.device_step(),
                               .faults = upload.faulty_rows(),
                               .partial_base = LogBase::kTwo,
                               .deadline = deadline,
                               .stream = c_.stream.ref()},
                              [](RankPhase) { return Status::Ok(); });
    };
    DCP_RETURN_IF_ERROR(enqueue());
    DCP_RETURN_IF_ERROR(c_.comm.Wait(deadline, c_.stream.ref()));
    // The partials' dtype is the output's: nothing is left to convert.
    DCP_ASSIGN_OR_RETURN(const std::byte* output,
                         exchange.Output(tokens_, DType::kBf16, nullptr, c_.stream.ref()));
    DCP_RETURN_IF_ERROR(Verify(output));
    DCP_ASSIGN_OR_RETURN(const cuda::Graph graph, cuda::Graph::Capture(c_.stream, [&]() -> Status {
                           for (int i = 0; i < kInside; ++i) DCP_RETURN_IF_ERROR(enqueue());
                           return Status::Ok();
                         }));
    return MedianMicroseconds(c_, graph, kInside, kRuns);
  }

 private:
  std::size_t Rows() const { return static_cast<std::size_t>(tokens_) * kHeads / kRanks; }
  std::uint64_t Seed(int rank) const { return 10 + static_cast<std::uint64_t>(rank); }
  // Of head group g: row i of it is token i / 64, head 64 g + i % 64.
  std::size_t Row(int g, std::size_t i) const { return static_cast<std::size_t>(g) * Rows() + i; }

  Status FillPartials(const CudaExchange& exchange) {
    const PartialLayout to = exchange.Layout(tokens_);
    std::vector<Bf16> out(Rows() * kDv);
    std::vector<float> lse(Rows());
    for (int g = 0; g < kRanks; ++g) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = RandomAt(Seed(c_.rank), Row(g, 0) * kDv + i);
      }
      for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = LseOf(c_.rank, Row(g, i));
      DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.out + g * to.out_group_stride, out.data(),
                                          out.size() * sizeof(Bf16), c_.stream.ref()));
      DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.lse + g * to.lse_group_stride, lse.data(),
                                          lse.size() * sizeof(float), c_.stream.ref()));
      DCP_RETURN_IF_ERROR(c_.stream.Synchronize());
    }
    return Status::Ok();
  }

  Status Verify(const std::byte* output) {
    std::vector<Bf16> got(Rows() * kDv);
    DCP_RETURN_IF_ERROR(
        cuda::CopyAsync(got.data(), output, got.size() * sizeof(Bf16), c_.stream.ref()));
    DCP_RETURN_IF_ERROR(c_.stream.Synchronize());
    for (std::size_t i = 0; i < Rows(); ++i) {
      const std::size_t row = Row(c_.rank, i);
      double weight[kRanks], sum = 0, error = 0, norm = 0;
      for (int r = 0; r < kRanks; ++r) sum += weight[r] = std::exp2(double{LseOf(r, row)});
      for (std::size_t d = 0; d < kDv; ++d) {
        double want = 0;
        for (int r = 0; r < kRanks; ++r) {
          want += weight[r] / sum * ToFloat(RandomAt(Seed(r), row * kDv + d));
        }
        error += std::pow(ToFloat(got[i * kDv + d]) - want, 2);
        norm += want * want;
      }
      const double limit = kind_ == ExchangeKind::kAgRs ? 8e-3 : 4e-3;
      if (!(std::sqrt(error) <= limit * std::sqrt(norm))) {
        return Status(Reason::kInternal, std::string(ExchangeName(kind_)) + ", " +
                                             std::to_string(tokens_) + " tokens, row " +
                                             std::to_string(row) + ": relative error " +
                                             std::to_string(std::sqrt(error / norm)));
      }
    }
    return Status::Ok();
  }

  RankContext& c_;
  const ExchangeKind kind_;
  const int tokens_;
};

Status RunAll(const std::string& json, const std::string& command) {
  double us[std::size(kBatches)][2] = {};
  std::mutex mutex;
  DCP_RETURN_IF_ERROR(RunRanks(kRanks, [&](RankContext& context) -> Status {
    for (std::size_t b = 0; b < std::size(kBatches); ++b) {
      for (std::size_t k = 0; k < 2; ++k) {
        DCP_ASSIGN_OR_RETURN(const double mine, RankBench(context, kKinds[k], kBatches[b]).Run());
        const std::lock_guard lock(mutex);
        us[b][k] = std::max(us[b][k], mine);  // the slower rank's
      }
    }
    return Status::Ok();
  }));
  std::printf("%5s %10s %10s %10s %10s %10s\n", "B", "ag_rs us", "peer us", "a2a us", "peer us",
              "floor us");
  std::string rows;
  for (std::size_t b = 0; b < std::size(kBatches); ++b) {
    const double floor = kBatches[b] * 64.0 * kDv * 2 / kNominalBytesPerUs;
    std::printf("%5d %10.1f %10.1f %10.1f %10.1f %10.1f\n", kBatches[b], us[b][0],
                kPeers[b].ag_rs_us, us[b][1], kPeers[b].a2a_us, floor);
    char row[256];
    std::snprintf(row, sizeof(row),
                  "%s{\"B\": %d, \"ag_rs_us\": %.2f, \"a2a_us\": %.2f, \"direct_us\": null, "
                  "\"floor_us\": %.2f}",
                  b == 0 ? "" : ",\n", kBatches[b], us[b][0], us[b][1], floor);
    rows += row;
  }
  return json.empty() ? Status::Ok() : WriteReport(json, command, rows);
}

}  // namespace
}  // namespace dcp::bench

int main(int argc, char** argv) {
  dcp::cuda::SetUpEnvironment();
  const bool json = argc == 3 && std::strcmp(argv[1], "--json") == 0;
  if (argc != 1 && !json) {
    std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
    return 2;
  }
  const dcp::Status status =
      dcp::bench::RunAll(json ? argv[2] : "", dcp::bench::CommandLine(argc, argv));
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
