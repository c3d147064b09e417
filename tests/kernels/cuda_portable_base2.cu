#include <cuda_runtime.h>

#include <algorithm>
#include <memory>

#include "base/cuda.h"
#include "tests/kernels/cuda_portable_base2.h"

namespace dcp::test {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 64;

__global__ void ConvertLse(PartialLayout to, int heads, const DeviceStep* step) {
  const int groups = heads / to.heads_per_group;
  const int group_rows = step->tokens * to.heads_per_group;
  const int first = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  for (int i = first; i < groups * group_rows; i += kBlocks * kThreads) {
    float& lse =
        reinterpret_cast<float*>(to.lse + i / group_rows * to.lse_group_stride)[i % group_rows];
    lse = LseCast<LogBase::kTwo>(Lse<LogBase::kE>{lse}).raw;
  }
}

class Base2 final : public AttentionBackend {
 public:
  Base2(std::unique_ptr<AttentionBackend> natural, int heads)
      : natural_(std::move(natural)), heads_(heads) {}

  Status Run(const AttentionArgs& args) override {
    DCP_RETURN_IF_ERROR(natural_->Run(args));
    ConvertLse<<<kBlocks, kThreads, 0, cuda::Raw(args.stream)>>>(args.partial, heads_, args.step);
    return cuda::CheckLaunch("ConvertLse");
  }
  std::size_t MaxPlanBytes() const override { return natural_->MaxPlanBytes(); }
  Result<std::size_t> Plan(const AttentionStep& step, std::span<std::byte> plan) override {
    return natural_->Plan(step, plan);
  }

 private:
  const std::unique_ptr<AttentionBackend> natural_;
  const int heads_;
};

const BackendEntry& Natural() {
  const std::span<const BackendEntry> all = Backends();
  return *std::find_if(all.begin(), all.end(),
                       [](const BackendEntry& entry) { return entry.name == "cuda_portable"; });
}

Result<std::unique_ptr<AttentionBackend>> Make(const BackendSetup& setup) {
  DCP_ASSIGN_OR_RETURN(std::unique_ptr<AttentionBackend> natural, Natural().make(setup));
  return std::unique_ptr<AttentionBackend>(
      std::make_unique<Base2>(std::move(natural), setup.geometry.heads));
}

}  // namespace

BackendEntry CudaPortableBase2() {
  BackendEntry entry = Natural();
  entry.name = "cuda_portable_base2";
  entry.caps.lse_base = LogBase::kTwo;
  entry.make = &Make;
  return entry;
}

}  // namespace dcp::test
