// cuda_portable: mma.sync and cp.async, on every GPU from sm_80 on whose thread blocks can have
// enough shared memory. Any page size, any number of heads, LSE in base e. Weights are rounded to
// bf16 before they meet the values; everything is summed in f32.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "base/cuda.h"
#include "kernels/attention_backend.h"
#include "kernels/backends/cuda_portable_kernels.h"
#include "kernels/backends/cuda_portable_plan.h"

namespace dcp {
namespace {

using portable::Params;
using portable::Planner;

constexpr std::size_t kSlotBytes = std::size_t{256} << 20;  // at most, for results of split tiles

class CudaPortable final : public AttentionBackend {
 public:
  CudaPortable(const Params& params, int blocks, cuda::DeviceBuffer workspace, Planner planner)
      : params_(params),
        blocks_(blocks),
        workspace_(std::move(workspace)),
        planner_(std::move(planner)) {}

  Status Run(const AttentionArgs& args) override {
    Params params = params_;
    params.query = args.query;
    params.kv = args.kv;
    params.page_stride = args.page_stride;
    params.partial = args.partial;
    params.step = args.step;
    return portable::Launch(params, blocks_, args.stream);
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

Status CheckDevice(const cuda::DeviceInfo& device, int d_qk) {
  std::string why;
  if (device.major < 8) {
    why = "needs compute capability 8.0 or later";
  } else if (device.shared_per_block < portable::SharedBytes(d_qk)) {
    why = "needs " + std::to_string(portable::SharedBytes(d_qk)) +
          " bytes of shared memory per thread block for d_qk = " + std::to_string(d_qk) + ", has " +
          std::to_string(device.shared_per_block);
  } else {
    return Status::Ok();
  }
  return Status(Reason::kUnsupported, "attention backend cuda_portable on " + device.name +
                                          " (sm_" + std::to_string(device.major) +
                                          std::to_string(device.minor) + "): " + why);
}

std::size_t Aligned(std::size_t bytes) { return (bytes + 255) & ~std::size_t{255}; }

}  // namespace

Result<std::unique_ptr<AttentionBackend>> MakeCudaPortable(const BackendSetup& setup) {
  const AttentionGeometry& g = setup.geometry;
  DCP_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::Describe(setup.device));
  DCP_RETURN_IF_ERROR(CheckDevice(device, g.d_qk));
  DCP_RETURN_IF_ERROR(portable::Prepare(g.d_qk, g.d_v));

  const int blocks = device.multiprocessors;
  const std::int64_t slot_rows = portable::SlotRows(std::int64_t{setup.max_tokens} * g.heads,
                                                    setup.max_keys, g.d_v, kSlotBytes);
  const auto rows = static_cast<std::size_t>(slot_rows);
  const std::size_t slots = Aligned(rows * static_cast<std::size_t>(g.d_v) * sizeof(float));
  const std::size_t row_floats = Aligned(rows * sizeof(float));
  const std::size_t scratch =
      static_cast<std::size_t>(blocks) * portable::kScratchFloats * sizeof(float);
  const std::size_t counter = 256;
  const std::size_t bytes = slots + 2 * row_floats + scratch + counter;
  DCP_ASSIGN_OR_RETURN(
      cuda::DeviceBuffer workspace,
      cuda::DeviceBuffer::Create(setup.device, bytes, "workspace of cuda_portable"));
  // NaN everywhere: what is read before it was written shows.
  DCP_ASSIGN_OR_RETURN(const cuda::Stream stream, cuda::Stream::Create(setup.device));
  DCP_RETURN_IF_ERROR(cuda::FillAsync(workspace.data(), 0xff, bytes - counter, stream.ref()));
  DCP_RETURN_IF_ERROR(
      cuda::FillAsync(workspace.data() + bytes - counter, 0, counter, stream.ref()));
  DCP_RETURN_IF_ERROR(stream.Synchronize());

  std::byte* at = workspace.data();
  const auto take = [&at](std::size_t size) { return std::exchange(at, at + size); };
  Params params{.heads = g.heads,
                .d_qk = g.d_qk,
                .d_v = g.d_v,
                .page_tokens = g.page_tokens,
                .partial_dtype = g.partial_dtype,
                .scale_log2 = static_cast<float>(g.softmax_scale * kLog2E)};
  params.slots = reinterpret_cast<float*>(take(slots));
  params.slot_max = reinterpret_cast<float*>(take(row_floats));
  params.slot_sum = reinterpret_cast<float*>(take(row_floats));
  params.scratch = reinterpret_cast<float*>(take(scratch));
  params.claimed = reinterpret_cast<std::int32_t*>(take(counter));
  return std::unique_ptr<AttentionBackend>(std::make_unique<CudaPortable>(
      params, blocks, std::move(workspace), Planner(g.heads, setup.max_tokens, blocks, slot_rows)));
}

}  // namespace dcp
