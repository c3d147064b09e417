// On devices: through the communicator for shared GPUs and, where every rank has a device of its
// own, through NCCL. The all-to-all must give the same bits both ways.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <thread>

#include "base/cuda.h"
#include "comm/nccl.h"
#include "comm/shared_gpu.h"
#include "runtime/cuda_exchange.h"
#include "runtime/step_upload.h"
#include "tests/runtime/exchange_problem.h"

namespace dcp::testing {
namespace {

constexpr int kSpareTokens = 3;

// One rank's part.
Status RunRank(ExchangeKind kind, const Problem& p, std::size_t r, int device, Communicator& comm,
               Answer& answer, std::int64_t& faults) {
  DCP_RETURN_IF_ERROR(cuda::UseDevice(device));
  DCP_ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create(device));
  const int capacity = p.tokens + kSpareTokens;
  DCP_ASSIGN_OR_RETURN(CudaExchange exchange,
                       CudaExchange::Create(device, kind, p.shape, capacity));
  // Partials are written on the host and copied to the same places on the device.
  const PartialLayout to = exchange.Layout(capacity);
  const auto ranks = static_cast<std::size_t>(p.shape.ranks);
  const bool together = kind == ExchangeKind::kA2a;  // each group's LSE follows its partials
  std::vector<std::byte> out(ranks * static_cast<std::size_t>(to.out_group_stride));
  std::vector<std::byte> lse(together ? 0 : ranks * static_cast<std::size_t>(to.lse_group_stride));
  std::ranges::fill(out, std::byte{0xff});
  PartialLayout at = to;
  at.out = out.data();
  at.lse = together ? out.data() + (to.lse - to.out) : lse.data();
  FillPartials(p, r, at);
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.out, out.data(), out.size(), stream.ref()));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.lse, lse.data(), lse.size(), stream.ref()));
  DCP_RETURN_IF_ERROR(stream.Synchronize());
  DCP_ASSIGN_OR_RETURN(StepUpload upload, StepUpload::Create(device, 1 << 16));
  upload.Begin();
  DeviceStep step{.tokens = p.tokens, .output_dtype = DType::kF32, .lse_base = LogBase::kE};
  DCP_ASSIGN_OR_RETURN(step.bounds, upload.Add(std::span<const std::int32_t>(p.bounds)));
  upload.step() = step;
  DCP_RETURN_IF_ERROR(upload.Send(stream.ref()));
  DCP_RETURN_IF_ERROR(stream.Synchronize());

  const TimePoint deadline = Clock::now() + Millis(20000);
  DCP_RETURN_IF_ERROR(exchange.Enqueue(comm,
                                       {.capacity = capacity,
                                        .step = upload.device_step(),
                                        .faults = upload.faulty_rows(),
                                        .partial_base = p.base,
                                        .deadline = deadline,
                                        .stream = stream.ref()},
                                       [](RankPhase) { return Status::Ok(); }));
  DCP_RETURN_IF_ERROR(comm.Wait(deadline, stream.ref()));
  const auto heads = static_cast<std::size_t>(p.shape.heads_per_rank());
  const auto d_v = static_cast<std::size_t>(p.shape.d_v);
  const auto rows = static_cast<std::size_t>(p.tokens) * heads;
  std::vector<float> merged(rows * d_v), merged_lse(rows);
  DCP_ASSIGN_OR_RETURN(const std::byte* output,
                       exchange.Output(p.tokens, DType::kF32, upload.faulty_rows(), stream.ref()));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(merged.data(), output, merged.size() * 4, stream.ref()));
  DCP_RETURN_IF_ERROR(
      cuda::CopyAsync(merged_lse.data(), exchange.lse(), merged_lse.size() * 4, stream.ref()));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(&faults, upload.faulty_rows(), sizeof(faults), stream.ref()));
  DCP_RETURN_IF_ERROR(stream.Synchronize());
  for (int t = 0; t < p.tokens; ++t) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t from = static_cast<std::size_t>(t) * heads + h;
      const std::size_t row = p.Row(t, static_cast<int>(r * heads + h));
      std::copy_n(merged.begin() + static_cast<std::ptrdiff_t>(from * d_v), d_v,
                  answer.out.begin() + static_cast<std::ptrdiff_t>(row * d_v));
      answer.lse[row] = merged_lse[from];
    }
  }
  return Status::Ok();
}

Answer RunThrough(const MakeGroupFn& make, const std::vector<int>& devices, ExchangeKind kind,
                  const Problem& p) {
  auto group = make({.epoch = 1, .size = p.shape.ranks});
  REQUIRE(group.ok());
  Answer answer;
  answer.out.assign(p.out[0].size(), 12345.0f);
  answer.lse.assign(p.lse[0].size(), 12345.0f);
  std::vector<Status> statuses(devices.size());
  std::vector<std::int64_t> faults(devices.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < devices.size(); ++r) {
    threads.emplace_back(
        [&, r] { statuses[r] = RunRank(kind, p, r, devices[r], *(*group)[r], answer, faults[r]); });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& s : statuses) {
    INFO(s.ToString());
    REQUIRE(s.ok());
  }
  for (const std::int64_t f : faults) answer.faulty_rows += f;
  return answer;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

Answer RunExchangeProblem(ExchangeKind kind, const Problem& p) {
  cuda::SetUpEnvironment();
  const Result<int> count = cuda::DeviceCount();
  INFO(count.status().ToString());
  REQUIRE(count.ok());
  std::vector<int> devices;
  for (int r = 0; r < p.shape.ranks; ++r) devices.push_back(r % *count);
  const Answer shared = RunThrough(SharedGpuGroups(devices), devices, kind, p);
  if (p.shape.ranks > *count) return shared;
  const Answer nccl = RunThrough(NcclGroups(devices, Millis(60000)), devices, kind, p);
  if (kind == ExchangeKind::kA2a) {
    CHECK(SameBits(shared.out, nccl.out));
    CHECK(SameBits(shared.lse, nccl.lse));
  }
  CHECK(shared.faulty_rows == nccl.faulty_rows);
  return nccl;
}

}  // namespace dcp::testing
