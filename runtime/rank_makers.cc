#include "runtime/rank_makers.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "comm/in_process.h"

#if defined(DCP_WITH_CUDA)
#include "base/cuda.h"
#include "comm/nccl.h"
#include "comm/shared_gpu.h"
#include "runtime/cuda_rank.h"
#endif

namespace dcp {
namespace {

#if defined(DCP_WITH_CUDA)
constexpr Nanos kConnectBound = std::chrono::seconds(60);  // NCCL looks at the whole machine

Result<RankMakers> CudaMakers(const RanksConfig& ranks) {
  std::vector<int> devices;
  for (int r = 0; r < ranks.count; ++r) {
    devices.push_back(ranks.Device(r));
    DCP_ASSIGN_OR_RETURN(const cuda::DeviceInfo info, cuda::Describe(devices.back()));
    log::info("rank {} on CUDA device {}: {}, sm_{}{}, {:.1f} of {:.1f} GiB free", r,
              devices.back(), info.name, info.major, info.minor,
              static_cast<double>(info.free_bytes) / (1 << 30),
              static_cast<double>(info.total_bytes) / (1 << 30));
  }
  if (ranks.share_devices) {
    return RankMakers{.port = MakeCudaRankPort, .group = SharedGpuGroups(std::move(devices))};
  }
  DCP_ASSIGN_OR_RETURN(const NcclVersion nccl, LoadedNccl());
  log::info("NCCL {} from {}", nccl.code, nccl.path);
  return RankMakers{.port = MakeCudaRankPort,
                    .group = NcclGroups(std::move(devices), kConnectBound)};
}
#else
Result<RankMakers> CudaMakers(const RanksConfig&) {
  return Status(Reason::kConfig, "ranks.device = \"cuda\", this build has no CUDA");
}
#endif

}  // namespace

Result<RankMakers> DefaultMakers(const RanksConfig& ranks) {
  if (ranks.device == RankDevice::kCuda) return CudaMakers(ranks);
  return RankMakers{.port = MakeLocalRankPort, .group = MakeInProcessGroup};
}

}  // namespace dcp
