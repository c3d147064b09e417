#include "runtime/rank_contract.h"

#include <cstring>
#include <string>

namespace dcp {

RankContract ContractOf(const EngineConfig& c, const BackendEntry& backend) {
  RankContract r;
  backend.name.copy(r.backend, sizeof(r.backend) - 1);
  r.lse_base = static_cast<std::int32_t>(backend.caps.lse_base);
  r.empty_mark = static_cast<std::int32_t>(backend.caps.empty_mark);
  r.kv_format = static_cast<std::int32_t>(backend.caps.kv_format);
  r.partial_dtype = static_cast<std::int32_t>(c.attention.partial_dtype);
  r.exchange = static_cast<std::int32_t>(c.exchange);
  r.ranks = c.ranks.count;
  r.interleave = c.kv.interleave;
  r.page_tokens = c.kv.page_tokens;
  r.layers = c.model.layers;
  r.heads = c.model.heads;
  r.d_qk = c.model.d_qk();
  r.d_v = c.model.kv_lora_rank;
  r.softmax_scale = c.model.softmax_scale;
  return r;
}

Status CheckContracts(std::span<const RankContract> all, int rank) {
  const RankContract& mine = all[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < all.size(); ++r) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): every bit counts, the scale's too
    if (std::memcmp(&all[r], &mine, sizeof(mine)) == 0) continue;
    return Status(Reason::kBackendContract,
                  "rank " + std::to_string(r) + " (" + std::string(all[r].backend) + ") and rank " +
                      std::to_string(rank) + " (" + std::string(mine.backend) +
                      ") differ in backend, LSE base, geometry, scale, format or exchange");
  }
  return Status::Ok();
}

}  // namespace dcp
