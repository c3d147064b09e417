// merge.h on a device: the same arithmetic (merge_math.h), bit for bit. Enqueued on `stream`, in
// launches sized by max_tokens that read what varies from `step` (tokens, bounds [ranks, tokens],
// output dtype, LSE base), so they may be captured in a graph; rows of tokens past step->tokens are
// not touched. All pointers are device addresses. Errors: INTERNAL, a launch that CUDA refused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/stream.h"
#include "base/tensor.h"
#include "kernels/device_step.h"
#include "kernels/lse.h"

namespace dcp {

// As MergePartials. The partial of rank r lies at out + r * rank_stride, its LSE at lse + r *
// rank_stride, both [max_tokens, heads, ...] with rows in the order of tokens.
struct DeviceMergeArgs {
  const std::byte* out = nullptr;  // [ranks][tokens, heads, d_v] bf16 | f32
  const std::byte* lse = nullptr;  // [ranks][tokens, heads] f32 in the declared base
  std::int64_t rank_stride = 0;    // bytes
  int ranks = 0;
  int max_tokens = 0;
  int heads = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  const DeviceStep* step = nullptr;
  std::byte* output = nullptr;      // [tokens, heads, d_v] in step->output_dtype
  float* merged_lse = nullptr;      // [tokens, heads] in step->lse_base
  std::int64_t* faults = nullptr;   // rows with a fault are added
};
template <LogBase B>
Status MergePartialsOnDevice(const DeviceMergeArgs& args, StreamRef stream);

// As ScalePartial; lse is [ranks][groups][max_tokens, heads_per_group], contiguous.
struct DeviceScaleArgs {
  std::byte* partial = nullptr;   // [groups][tokens, heads_per_group, d_v]
  std::int64_t group_stride = 0;  // bytes
  const std::byte* lse = nullptr;
  int rank = 0;
  int ranks = 0;
  int groups = 0;
  int max_tokens = 0;
  int heads_per_group = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  const DeviceStep* step = nullptr;
};
template <LogBase B>
Status ScalePartialOnDevice(const DeviceScaleArgs& args, StreamRef stream);

// The end of ag_rs: reduced rows to the output dtype, and the merged LSE of this rank's heads.
struct DeviceFinishArgs {
  const std::byte* reduced = nullptr;  // [tokens, heads, d_v] in partial_dtype
  const std::byte* lse = nullptr;      // [ranks][ranks][max_tokens, heads]: group `rank` is read
  int rank = 0;
  int ranks = 0;
  int max_tokens = 0;
  int heads = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  const DeviceStep* step = nullptr;
  std::byte* output = nullptr;
  float* merged_lse = nullptr;
  std::int64_t* faults = nullptr;
};
template <LogBase B>
Status FinishRowsOnDevice(const DeviceFinishArgs& args, StreamRef stream);

extern template Status MergePartialsOnDevice<LogBase::kE>(const DeviceMergeArgs&, StreamRef);
extern template Status MergePartialsOnDevice<LogBase::kTwo>(const DeviceMergeArgs&, StreamRef);
extern template Status ScalePartialOnDevice<LogBase::kE>(const DeviceScaleArgs&, StreamRef);
extern template Status ScalePartialOnDevice<LogBase::kTwo>(const DeviceScaleArgs&, StreamRef);
extern template Status FinishRowsOnDevice<LogBase::kE>(const DeviceFinishArgs&, StreamRef);
extern template Status FinishRowsOnDevice<LogBase::kTwo>(const DeviceFinishArgs&, StreamRef);

}  // namespace dcp
