// The launches of cuda_portable. Plain pointers and numbers; all pointers are device addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "kernels/attention_backend.h"
#include "kernels/device_step.h"

namespace dcp::portable {

struct Params {
  const Bf16* query = nullptr;  // [tokens, heads, d_qk]
  const Bf16* kv = nullptr;     // the pool's base
  std::int64_t page_stride = 0;
  PartialLayout partial;
  const DeviceStep* step = nullptr;
  int heads = 0;
  int d_qk = 0;
  int d_v = 0;
  int page_tokens = 0;
  DType partial_dtype = DType::kBf16;
  float scale_log2 = 0;  // softmax scale * log2(e)
  // Workspace. Scores are in base 2 in here: weights are 2^(score - max).
  float* slots = nullptr;           // [slot rows, d_v] sums of weight * value
  float* slot_max = nullptr;        // [slot rows] largest score, -inf: no weight at all
  float* slot_sum = nullptr;        // [slot rows] sum of weights
  float* scratch = nullptr;         // kScratchFloats for each thread block
  std::int32_t* claimed = nullptr;  // items taken beyond the first of each block; 0 between steps
};

inline constexpr int kThreads = 256;
inline constexpr std::size_t kScratchFloats = std::size_t{128} * kThreads;

// Shared memory of a thread block of the first kernel.
std::size_t SharedBytes(int d_qk);

// Lets the kernels use that much shared memory on the current device; before the first launch.
Status Prepare(int d_qk, int d_v);

// Enqueues both kernels. `blocks` is fixed by the device; it must not be larger than what runs at
// once only for speed.
Status Launch(const Params& params, int blocks, StreamRef stream);

}  // namespace dcp::portable
