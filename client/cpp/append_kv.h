// AppendKv: the prefill hand-off of a run of tokens, all layers in one call.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/bf16.h"
#include "base/time.h"
#include "client/cpp/client.h"

namespace dcp {

struct AppendSource {
  v1::SequenceRef sequence;
  std::uint64_t step_id = 0;
  std::int64_t start = 0;
  std::int64_t count = 0;
  // Fills latents of tokens [begin, begin + n) of a layer; out: [n, d_qk]. Called for consecutive
  // ranges from `start` on.
  std::function<void(int layer, std::int64_t begin, std::span<Bf16> out)> latents;
};

// Sends chunks of at most about 1 MiB and never above the server's message limit. On an error
// nothing is committed.
RpcResult<v1::AppendKvResponse> AppendKv(Client& client, const AppendSource& source,
                                         Millis timeout);

}  // namespace dcp
