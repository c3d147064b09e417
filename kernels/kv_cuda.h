// What happens to the KV pool of a rank on a device; the host's is runtime/kv_store.h. Everything is
// enqueued on `stream`, in launches of a fixed shape that read what varies from `step`, so they may be
// captured in a graph. Errors: INTERNAL, a launch that CUDA refused.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "kernels/device_step.h"

namespace dcp {

// [layers][blocks][page_tokens][d_qk] bf16, one allocation on the device. Strides in elements.
struct DeviceKv {
  Bf16* base = nullptr;
  std::int64_t layers = 0;
  std::int64_t blocks = 0;
  std::int64_t page_tokens = 0;
  std::int64_t d_qk = 0;
  std::int64_t page_stride = 0;   // page_tokens * d_qk
  std::int64_t layer_stride = 0;  // blocks * page_stride
};

// step->page_copies, of every layer. No page is both copied from and copied to.
Status CopyPagesOnDevice(const DeviceKv& kv, const DeviceStep* step, StreamRef stream);

// latents [tokens, d_qk] -> the layer at step->kv_offset, tokens whose slot is not negative; nothing
// unless step->has_new_kv.
Status WriteKvOnDevice(const DeviceKv& kv, const Bf16* latents, const DeviceStep* step,
                       StreamRef stream);

// *mismatch = the first token whose stored latent differs from `latents`, or -1.
Status CompareKvOnDevice(const DeviceKv& kv, const Bf16* latents, std::int32_t* mismatch,
                         const DeviceStep* step, StreamRef stream);

}  // namespace dcp
