// What a step does to a rank's pages on a GPU: copies of shared blocks, new latents, and the check
// of a replay. All pointers are device addresses aligned to 16, d_qk is a multiple of 8, grids are
// fixed: what changes from step to step is read from `step` when the kernels run. Enqueued on
// `stream`.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "kernels/device_step.h"

namespace dcp {

struct KvPool {
  Bf16* base = nullptr;  // [layers][blocks][page_tokens][d_qk]
  int layers = 0;
  std::int64_t blocks = 0;
  int page_tokens = 0;
  int d_qk = 0;
};

// step->page_copies, in every layer. No page is the source of one copy and the target of another.
Status CopyPages(const KvPool& pool, const DeviceStep* step, StreamRef stream);

// Stores latents [tokens, d_qk] of the tokens whose step->slots is not negative, in the layer at
// step->kv_offset. Nothing if not step->has_new_kv. No slot appears twice.
Status WriteKv(const KvPool& pool, const Bf16* latents, const DeviceStep* step, StreamRef stream);

// Compares what WriteKv would store with what is stored, bit by bit. *first_difference (device):
// the smallest token index whose latent differs, -1 if none does.
Status CompareKv(const KvPool& pool, const Bf16* latents, const DeviceStep* step,
                 std::int32_t* first_difference, StreamRef stream);

}  // namespace dcp
