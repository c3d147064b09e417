// merge.h on the GPU, bit for bit: the same arithmetic (merge_math.h) and the same rules about
// which ranks are read. All pointers are device addresses; tokens, bounds, output dtype and the
// base of the merged LSE are read from `step` when the kernels run. Rows of tokens from
// step->tokens on are left alone. Everything is enqueued on `stream`, in grids that depend on the
// arguments only.
//
// d_v is even. Partials, messages, strides and outputs are aligned to 4 bytes; where all of them
// are aligned to 16 and d_v is a multiple of 8, access is four times as wide.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/stream.h"
#include "base/tensor.h"
#include "kernels/device_step.h"
#include "kernels/lse.h"
#include "kernels/merge.h"

namespace dcp {

// The heads that one rank owns.
struct DeviceMergeArgs {
  const std::byte* out =
      nullptr;  // rank r at + r * message_stride: [tokens, heads, d_v] bf16 | f32
  const std::byte* lse = nullptr;   // rank r at + r * message_stride: [tokens, heads] f32
  std::int64_t message_stride = 0;  // bytes
  int ranks = 0;                    // up to kMaxRanks
  int heads = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  std::byte* output = nullptr;     // [tokens, heads, d_v] step->output_dtype
  float* merged_lse = nullptr;     // [tokens, heads] in step->lse_base; null: not wanted
  std::int64_t* faults = nullptr;  // the number of faulty rows is added
  int max_tokens = 0;              // sizes the grid
  const DeviceStep* step = nullptr;
};
template <LogBase B>
Status MergePartialsCuda(const DeviceMergeArgs& args, StreamRef stream);
extern template Status MergePartialsCuda<LogBase::kE>(const DeviceMergeArgs&, StreamRef);
extern template Status MergePartialsCuda<LogBase::kTwo>(const DeviceMergeArgs&, StreamRef);

// ag_rs, before the reduction: ScalePartial for all groups, and the merged LSE of this rank's own.
// A row is counted as faulty by the rank that owns its heads if an LSE is at fault, else by every
// rank whose partial is.
struct DeviceScaleArgs {
  std::byte* partial = nullptr;      // [groups][tokens, heads_per_group, d_v]
  std::int64_t group_stride = 0;     // bytes
  const std::byte* lse = nullptr;    // [ranks][groups][tokens, heads_per_group] f32
  std::int64_t lse_rank_stride = 0;  // bytes
  std::int64_t lse_group_stride = 0;
  int rank = 0;  // also the group that this rank owns
  int ranks = 0;
  int groups = 0;
  int heads_per_group = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  float* merged_lse = nullptr;  // [tokens, heads_per_group] in step->lse_base; null: not wanted
  std::int64_t* faults = nullptr;
  int max_tokens = 0;
  const DeviceStep* step = nullptr;
};
template <LogBase B>
Status ScalePartialCuda(const DeviceScaleArgs& args, StreamRef stream);
extern template Status ScalePartialCuda<LogBase::kE>(const DeviceScaleArgs&, StreamRef);
extern template Status ScalePartialCuda<LogBase::kTwo>(const DeviceScaleArgs&, StreamRef);

// ag_rs, after the reduction, where the step wants another dtype than was reduced. Adds the rows
// that are finite before and not after.
struct DeviceConvertArgs {
  const std::byte* in = nullptr;  // [rows, d_v] bf16 | f32
  DType in_dtype = DType::kBf16;
  std::byte* out = nullptr;  // [rows, d_v] bf16 | f32
  DType out_dtype = DType::kBf16;
  std::int64_t rows = 0;
  int d_v = 0;
  std::int64_t* faults = nullptr;
};
Status ConvertRowsCuda(const DeviceConvertArgs& args, StreamRef stream);

}  // namespace dcp
