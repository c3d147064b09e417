// The launches of sm90_dense. Plain pointers and numbers; all pointers are device addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "kernels/attention_backend.h"
#include "kernels/device_step.h"

namespace dcp::sm90 {

inline constexpr int kDv = 512;
inline constexpr int kPageMultiple = 8;  // keys in a row of an 8-row pattern of shared memory

struct Params {
  const Bf16* query = nullptr;  // [tokens, heads, d_qk]
  PartialLayout partial;
  const DeviceStep* step = nullptr;
  int heads = 0;
  int d_qk = 0;
  int page_tokens = 0;
  int page_rows = 0;  // rows of d_qk elements from one page to the next
  int box_keys = 0;   // keys that are copied together: divides blocks of keys and pages
  DType partial_dtype = DType::kBf16;
  bool wide_stores = false;  // output rows are aligned to 16 bytes
  float scale_log2 = 0;      // softmax scale * log2(e)
  // Workspace. Weights are 2^(score - max), with scores in base 2.
  float* slots = nullptr;     // [slot rows, kDv] sums of weight * value
  float* slot_max = nullptr;  // [slot rows] what scores were compared with, -inf: no weight at all
  float* slot_sum = nullptr;  // [slot rows] sum of weights
};

// Lets the kernel use the shared memory that it needs on the current device; before the first
// launch.
Status Prepare(int d_qk);

// Enqueues both kernels. `blocks` is what the plan was made for; `kv` is the pool's base.
Status Launch(const Params& params, const Bf16* kv, int blocks, StreamRef stream);

// Adds up split tiles; enqueued by Launch.
Status LaunchMerge(const Params& params, int blocks, StreamRef stream);

}  // namespace dcp::sm90
