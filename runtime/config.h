// What an engine is made from: plain values, filled by server/config_loader.cc or by a program that
// embeds the engine. Validate() says every rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"
#include "base/time.h"
#include "kernels/attention_backend.h"

namespace dcp {

enum class ExchangeKind : std::uint8_t { kAgRs, kA2a };
constexpr std::string_view ExchangeName(ExchangeKind kind) {
  return kind == ExchangeKind::kAgRs ? "ag_rs" : "a2a";
}

struct ModelConfig {
  int layers = 0;
  int heads = 0;             // query heads; divisible by ranks
  int kv_lora_rank = 0;      // d_v
  int rope_dim = 0;          // d_qk = kv_lora_rank + rope_dim
  double softmax_scale = 0;  // required: it does not follow from the dims (DeepSeek: 1/sqrt(192))
  int d_qk() const { return kv_lora_rank + rope_dim; }
};

enum class RankDevice : std::uint8_t { kCpu, kCuda };
constexpr std::string_view RankDeviceName(RankDevice device) {
  return device == RankDevice::kCpu ? "cpu" : "cuda";
}

struct RanksConfig {
  int count = 1;
  RankDevice device = RankDevice::kCpu;
  Millis timeout{5000};  // bound of every wait for a rank
  int cpu_threads = 0;   // host threads of all CPU ranks together; 0: the machine's

  // CUDA ranks only.
  std::vector<int> devices;      // of each rank; empty: rank r on device r
  bool share_devices = false;    // several ranks on one device, for tests and debugging: slow
  std::optional<bool> graphs{};  // replay captured steps; unset: where ranks do not share devices

  int Device(int rank) const {
    return devices.empty() ? rank : devices[static_cast<std::size_t>(rank)];
  }
  bool UseGraphs() const { return graphs.value_or(!share_devices); }
};

struct KvConfig {
  int page_tokens = 16;     // tokens of one page on one rank
  int interleave = 1;       // consecutive tokens of one owner; divides page_tokens
  std::int64_t blocks = 0;  // pages of each rank; a block is one page on every rank
};

struct AttentionConfig {
  std::string backend = "auto";
  DType partial_dtype = DType::kBf16;
};

struct LimitsConfig {
  int max_sequences = 4096;
  std::int64_t max_context = 131072;  // tokens of one sequence
  int max_batch = 256;                // entries of one step
  int max_query_tokens = 8;           // tokens of one entry in one step
  int max_step_tokens = 512;          // tokens of one step; sizes the ranks' buffers
  int max_queue = 256;                // requests waiting for the engine
  int max_inflight = 32;              // unanswered items of one stream
  int max_open_appends = 64;
  Millis default_step_timeout{5000};
  Millis max_step_timeout{60000};
  Millis append_idle_timeout{30000};
};

struct EngineConfig {
  ModelConfig model;
  RanksConfig ranks;
  KvConfig kv;
  AttentionConfig attention;
  ExchangeKind exchange = ExchangeKind::kA2a;
  LimitsConfig limits;

  AttentionGeometry Geometry() const;
  std::int64_t BlockTokens() const {
    return static_cast<std::int64_t>(kv.page_tokens) * ranks.count;
  }
  // Bytes of one token's latent in one layer.
  std::int64_t LatentBytes() const { return 2LL * model.d_qk(); }
};

// OK or CONFIG with the key ("kv.interleave"), its value and the rule it breaks.
Status Validate(const EngineConfig& config);

}  // namespace dcp
