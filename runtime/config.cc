#include "runtime/config.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "kernels/merge.h"
#include "runtime/shard_map.h"

namespace dcp {
namespace {

Status Bad(std::string_view key, const std::string& value, std::string_view rule) {
  return Status(Reason::kConfig,
                std::string(key) + " = " + value + ", expected " + std::string(rule));
}
template <class T>
Status Bad(std::string_view key, T value, std::string_view rule) {
  return Bad(key, std::to_string(value), rule);
}

template <class T>
Status InRange(std::string_view key, T value, T low, T high) {
  if (value >= low && value <= high) return Status::Ok();
  return Bad(key, value, std::to_string(low) + " to " + std::to_string(high));
}

Status ValidateDevices(const RanksConfig& r) {
  if (r.device == RankDevice::kCpu) {
    if (r.devices.empty() && !r.share_devices && !r.graphs) return Status::Ok();
    return Status(
        Reason::kConfig,
        "ranks.device = \"cpu\", expected \"cuda\" with ranks.devices, ranks.share_devices "
        "or ranks.graphs");
  }
  if (!r.devices.empty() && r.devices.size() != static_cast<std::size_t>(r.count)) {
    return Bad("ranks.devices", std::to_string(r.devices.size()) + " devices",
               "one for each of ranks.count = " + std::to_string(r.count));
  }
  std::set<int> seen;
  for (int rank = 0; rank < r.count; ++rank) {
    const int device = r.Device(rank);
    if (device < 0) return Bad("ranks.devices", device, "indexes from 0");
    if (!seen.insert(device).second && !r.share_devices) {
      return Bad("ranks.devices", "device " + std::to_string(device) + " twice",
                 "different devices, or ranks.share_devices = true (for tests: slow)");
    }
  }
  if (r.share_devices && r.graphs.value_or(false)) {
    return Bad("ranks.graphs", std::string("true"),
               "false with ranks.share_devices: such ranks meet on the host in every operation, "
               "which no graph can capture");
  }
  return Status::Ok();
}

}  // namespace

AttentionGeometry EngineConfig::Geometry() const {
  return {.heads = model.heads,
          .d_qk = model.d_qk(),
          .d_v = model.kv_lora_rank,
          .page_tokens = kv.page_tokens,
          .softmax_scale = model.softmax_scale,
          .kv_format = KvFormat::kBf16,
          .partial_dtype = attention.partial_dtype};
}

Status Validate(const EngineConfig& c) {
  DCP_RETURN_IF_ERROR(InRange("ranks.count", c.ranks.count, 1, kMaxRanks));
  DCP_RETURN_IF_ERROR(InRange("ranks.cpu_threads", c.ranks.cpu_threads, 0, 1024));
  DCP_RETURN_IF_ERROR(
      InRange<std::int64_t>("ranks.timeout_ms", c.ranks.timeout.count(), 1, 600000));

  DCP_RETURN_IF_ERROR(ValidateDevices(c.ranks));

  DCP_RETURN_IF_ERROR(InRange("model.layers", c.model.layers, 1, 1024));
  DCP_RETURN_IF_ERROR(InRange("model.heads", c.model.heads, 1, 1024));
  if (c.model.heads % c.ranks.count != 0) {
    return Bad("model.heads", c.model.heads,
               "a multiple of ranks.count = " + std::to_string(c.ranks.count));
  }
  DCP_RETURN_IF_ERROR(InRange("model.kv_lora_rank", c.model.kv_lora_rank, 1, 4096));
  DCP_RETURN_IF_ERROR(InRange("model.rope_dim", c.model.rope_dim, 0, 4096));
  if (!std::isfinite(c.model.softmax_scale) || c.model.softmax_scale <= 0) {
    return Bad("model.softmax_scale", c.model.softmax_scale, "a finite number above 0");
  }

  DCP_RETURN_IF_ERROR(InRange("kv.page_tokens", c.kv.page_tokens, 1, 256));
  DCP_RETURN_IF_ERROR(ShardMap::Check(c.ranks.count, c.kv.interleave, c.kv.page_tokens));
  DCP_RETURN_IF_ERROR(
      InRange<std::int64_t>("kv.blocks", c.kv.blocks, 1, std::numeric_limits<std::int32_t>::max()));

  const LimitsConfig& l = c.limits;
  DCP_RETURN_IF_ERROR(InRange("limits.max_sequences", l.max_sequences, 1, 1 << 20));
  DCP_RETURN_IF_ERROR(InRange<std::int64_t>("limits.max_context", l.max_context, 1, 1LL << 30));
  DCP_RETURN_IF_ERROR(InRange("limits.max_batch", l.max_batch, 1, 1 << 16));
  DCP_RETURN_IF_ERROR(InRange("limits.max_query_tokens", l.max_query_tokens, 1, 1024));
  DCP_RETURN_IF_ERROR(
      InRange("limits.max_step_tokens", l.max_step_tokens, l.max_query_tokens, 1 << 16));
  DCP_RETURN_IF_ERROR(InRange("limits.max_queue", l.max_queue, 1, 1 << 20));
  DCP_RETURN_IF_ERROR(InRange("limits.max_inflight", l.max_inflight, 1, 1 << 16));
  DCP_RETURN_IF_ERROR(InRange("limits.max_open_appends", l.max_open_appends, 1, 1 << 16));
  const std::int64_t max_step = l.max_step_timeout.count();
  DCP_RETURN_IF_ERROR(InRange<std::int64_t>("limits.max_step_timeout_ms", max_step, 1, 86400000));
  DCP_RETURN_IF_ERROR(InRange<std::int64_t>("limits.default_step_timeout_ms",
                                            l.default_step_timeout.count(), 1, max_step));
  return InRange<std::int64_t>("limits.append_idle_timeout_ms", l.append_idle_timeout.count(), 1,
                               86400000);
}

}  // namespace dcp
