// A device backend behind host pointers, for tests, the contract probe and start-up.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda.h"
#include "kernels/attention_backend.h"

namespace dcp {

// Run takes the arguments of a host backend, plans the step, copies everything to the device, runs
// and copies the partials back; it allocates and has finished on return. The caller's partial
// buffers travel both ways, stride bytes for each group of heads: where the backend writes nothing,
// or outside its rows, the caller finds the bytes that were there. `out` and `lse` are separate
// buffers.
class StagedAttention final : public AttentionBackend {
 public:
  // `backend` was made for `setup` and outlives this.
  StagedAttention(AttentionBackend& backend, const BackendSetup& setup)
      : backend_(backend), setup_(setup) {}

  Status Run(const AttentionArgs& args) override;

 private:
  // What is uploaded first, in one piece: the step, its table and its plan.
  Result<const DeviceStep*> UploadStep(const AttentionArgs& args);
  Result<std::byte*> Upload(cuda::DeviceBuffer& to, std::span<const std::byte> from);
  Status Resize(cuda::DeviceBuffer& buffer, std::size_t bytes);

  AttentionBackend& backend_;
  const BackendSetup setup_;
  std::optional<cuda::Stream> stream_;
  std::vector<std::byte> host_step_;
  cuda::DeviceBuffer step_, query_, kv_, out_, lse_;
};

}  // namespace dcp
