// What ranks must agree on before any of them serves.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "base/status.h"
#include "kernels/attention_backend.h"
#include "runtime/config.h"

namespace dcp {

// Everything that changes numbers; compared as bytes.
struct RankContract {
  char backend[32] = {};
  std::int32_t lse_base = 0, empty_mark = 0, kv_format = 0, partial_dtype = 0, exchange = 0;
  std::int32_t ranks = 0, interleave = 0, page_tokens = 0;
  std::int32_t layers = 0, heads = 0, d_qk = 0, d_v = 0;
  double softmax_scale = 0;
};
static_assert(sizeof(RankContract) == 88, "no padding: records are compared as bytes");

RankContract ContractOf(const EngineConfig& config, const BackendEntry& backend);

// `all` holds every rank's record. Errors: BACKEND_CONTRACT naming the first rank that differs.
Status CheckContracts(std::span<const RankContract> all, int rank);

}  // namespace dcp
