// sm90_dense: wgmma and tensor copies, for Hopper GPUs (compute capability 9.0). d_qk 576 or 512,
// d_v 512, LSE in base 2. Weights are rounded to bf16 before they meet the values; everything is
// summed in f32. How a row is split depends on the whole step, and its last bits on how it is
// split: the same step gives the same bits.
#include <memory>
#include <numeric>
#include <string>

#include "base/cuda.h"
#include "kernels/attention_backend.h"
#include "kernels/backends/sm90_dense_kernels.h"
#include "kernels/backends/sm90_dense_plan.h"

namespace dcp {
namespace {

using sm90::Params;
using sm90::Planner;

constexpr std::string_view kName = "attention backend sm90_dense";

class Sm90Dense final : public AttentionBackend {
 public:
  Sm90Dense(const Params& params, int blocks, cuda::DeviceBuffer workspace, Planner planner)
      : params_(params),
        blocks_(blocks),
        workspace_(std::move(workspace)),
        planner_(std::move(planner)) {}

  Status Run(const AttentionArgs& args) override {
    // The copy engine counts in rows of the pool, in 31 bits: more than any GPU's memory.
    if (args.page_stride % params_.d_qk != 0) {
      return Status(Reason::kUnsupported,
                    std::string(kName) + ": page_stride = " + std::to_string(args.page_stride) +
                        ", needs a multiple of d_qk");
    }
    Params params = params_;
    params.query = args.query;
    params.page_rows = static_cast<int>(args.page_stride / params_.d_qk);
    params.partial = args.partial;
    params.step = args.step;
    const std::int64_t strides =
        args.partial.heads_per_group < params_.heads ? args.partial.out_group_stride : 0;
    params.wide_stores =
        reinterpret_cast<std::uintptr_t>(args.partial.out) % 16 == 0 && strides % 16 == 0;
    return sm90::Launch(params, args.kv, blocks_, args.stream);
  }

  std::size_t MaxPlanBytes() const override { return planner_.MaxBytes(); }

  Result<std::size_t> Plan(const AttentionStep& step, std::span<std::byte> plan) override {
    return planner_.Write(step, plan);
  }

 private:
  const Params params_;  // but what Run fills in
  const int blocks_;
  const cuda::DeviceBuffer workspace_;
  Planner planner_;
};

}  // namespace

Result<std::unique_ptr<AttentionBackend>> MakeSm90Dense(const BackendSetup& setup) {
  const AttentionGeometry& g = setup.geometry;
  DCP_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::Describe(setup.device));
  if (device.major != 9 || device.minor != 0) {
    return Status(Reason::kUnsupported, std::string(kName) + " on " + device.name + " (sm_" +
                                            std::to_string(device.major) +
                                            std::to_string(device.minor) +
                                            "): needs compute capability 9.0");
  }
  DCP_RETURN_IF_ERROR(sm90::Prepare(g.d_qk));

  const int blocks = device.multiprocessors;
  const auto rows = static_cast<std::size_t>(Planner::SlotRows(blocks));
  const std::size_t bytes = rows * (sm90::kDv + 2) * sizeof(float);
  DCP_ASSIGN_OR_RETURN(cuda::DeviceBuffer workspace,
                       cuda::DeviceBuffer::Create(setup.device, bytes, "workspace of sm90_dense"));
  // NaN everywhere: what is read before it was written shows.
  DCP_ASSIGN_OR_RETURN(const cuda::Stream stream, cuda::Stream::Create(setup.device));
  DCP_RETURN_IF_ERROR(cuda::FillAsync(workspace.data(), 0xff, bytes, stream.ref()));
  DCP_RETURN_IF_ERROR(stream.Synchronize());

  Params params{.heads = g.heads,
                .d_qk = g.d_qk,
                .page_tokens = g.page_tokens,
                .box_keys = std::gcd(g.page_tokens, sm90::kBlockKeys),
                .partial_dtype = g.partial_dtype,
                .scale_log2 = static_cast<float>(g.softmax_scale * kLog2E)};
  params.slots = workspace.as<float>();
  params.slot_max = params.slots + rows * sm90::kDv;
  params.slot_sum = params.slot_max + rows;
  return std::unique_ptr<AttentionBackend>(std::make_unique<Sm90Dense>(
      params, blocks, std::move(workspace), Planner(g.heads, setup.max_tokens, blocks)));
}

}  // namespace dcp
