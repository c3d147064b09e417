#include "runtime/config.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/cluster.h"

namespace dcp {

TEST_CASE("a broken rule is named by key, value and rule") {
  const EngineConfig good = testing::MakeConfig({});
  REQUIRE(Validate(good).ok());
  struct Case {
    const char* key;
    std::function<void(EngineConfig&)> breaks;
  };
  const auto cuda = [](std::vector<int> devices) {
    return RanksConfig{.count = 2, .device = RankDevice::kCuda, .devices = std::move(devices)};
  };
  const Case cases[] = {
      {"ranks.count", [](EngineConfig& c) { c.ranks.count = 0; }},
      {"ranks.count", [](EngineConfig& c) { c.ranks.count = 65; }},
      {"ranks.timeout_ms", [](EngineConfig& c) { c.ranks.timeout = Millis(0); }},
      {"ranks.cpu_threads", [](EngineConfig& c) { c.ranks.cpu_threads = -1; }},
      {"ranks.devices",
       [](EngineConfig& c) {
         c.ranks.devices = {0, 1};
       }},  // of CPU ranks
      {"ranks.devices", [cuda](EngineConfig& c) { c.ranks = cuda({0}); }},
      {"ranks.devices",
       [cuda](EngineConfig& c) {
         c.ranks = cuda({0, -1});
       }},
      {"ranks.devices",
       [cuda](EngineConfig& c) {
         c.ranks = cuda({1, 1});
       }},
      {"ranks.graphs",
       [cuda](EngineConfig& c) {
         c.ranks = cuda({1, 1});
         c.ranks.share_devices = true;
         c.ranks.graphs = true;
       }},
      {"model.layers", [](EngineConfig& c) { c.model.layers = 0; }},
      {"model.heads", [](EngineConfig& c) { c.model.heads = 0; }},
      {"model.heads", [](EngineConfig& c) { c.model.heads = 7; }},  // 2 ranks
      {"model.kv_lora_rank", [](EngineConfig& c) { c.model.kv_lora_rank = 0; }},
      {"model.rope_dim", [](EngineConfig& c) { c.model.rope_dim = -1; }},
      {"model.softmax_scale", [](EngineConfig& c) { c.model.softmax_scale = 0; }},
      {"model.softmax_scale", [](EngineConfig& c) { c.model.softmax_scale = NAN; }},
      {"model.softmax_scale", [](EngineConfig& c) { c.model.softmax_scale = INFINITY; }},
      {"kv.page_tokens", [](EngineConfig& c) { c.kv.page_tokens = 257; }},
      {"kv.interleave", [](EngineConfig& c) { c.kv.interleave = 3; }},
      {"kv.blocks", [](EngineConfig& c) { c.kv.blocks = 0; }},
      {"kv.blocks", [](EngineConfig& c) { c.kv.blocks = 1LL << 40; }},
      {"limits.max_sequences", [](EngineConfig& c) { c.limits.max_sequences = 0; }},
      {"limits.max_context", [](EngineConfig& c) { c.limits.max_context = 0; }},
      {"limits.max_batch", [](EngineConfig& c) { c.limits.max_batch = 0; }},
      {"limits.max_query_tokens", [](EngineConfig& c) { c.limits.max_query_tokens = 0; }},
      {"limits.max_step_tokens", [](EngineConfig& c) { c.limits.max_step_tokens = 1; }},
      {"limits.max_queue", [](EngineConfig& c) { c.limits.max_queue = 0; }},
      {"limits.max_inflight", [](EngineConfig& c) { c.limits.max_inflight = 0; }},
      {"limits.max_open_appends", [](EngineConfig& c) { c.limits.max_open_appends = 0; }},
      {"limits.max_step_timeout_ms", [](EngineConfig& c) { c.limits.max_step_timeout = {}; }},
      {"limits.default_step_timeout_ms",
       [](EngineConfig& c) { c.limits.default_step_timeout = Millis(60001); }},
      {"limits.append_idle_timeout_ms",
       [](EngineConfig& c) { c.limits.append_idle_timeout = Millis(0); }},
  };
  for (const Case& broken : cases) {
    EngineConfig config = good;
    broken.breaks(config);
    const Status status = Validate(config);
    INFO(broken.key << ": " << status.message());
    CHECK(status.reason() == Reason::kConfig);
    CHECK(status.message().find(broken.key) != std::string::npos);
    CHECK(status.message().find("expected") + status.message().find("must") !=
          2 * std::string::npos);
    CHECK_FALSE(Engine::Create(config).ok());
  }
}

TEST_CASE("a pool larger than the host's memory is refused with the numbers") {
  EngineConfig config = testing::MakeConfig({});
  config.model.layers = 1024;
  config.kv.blocks = (1LL << 31) - 1;
  const auto engine = Engine::Create(config);
  CHECK(engine.status().reason() == Reason::kKvCapacity);
  CHECK(engine.status().message().find("GiB") != std::string::npos);
}

TEST_CASE("CUDA ranks where they cannot be are refused with the reason") {
  EngineConfig config = testing::MakeConfig({});
  config.ranks.device = RankDevice::kCuda;
  config.ranks.devices = {1000, 1001};  // no host has them, and this build may not have CUDA
  REQUIRE(Validate(config).ok());
  const auto engine = Engine::Create(config);
  REQUIRE(!engine.ok());
  CHECK(engine.status().reason() == Reason::kConfig);
  CHECK(engine.status().message().find("CUDA") != std::string::npos);
}

}  // namespace dcp
