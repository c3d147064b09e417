// What a server is made from: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config.h"

namespace dcp {

enum class PollMode : std::uint8_t { kBlock, kSpin };
enum class LogFormat : std::uint8_t { kText, kJson };

struct LogConfig {
  std::string level = "info";  // trace, debug, info, warn, error, critical, off
  LogFormat format = LogFormat::kText;
};

struct ServerConfig {
  EngineConfig engine;
  std::vector<std::string> listen = {"127.0.0.1:7400"};  // host:port or unix:PATH
  PollMode poll = PollMode::kBlock;
  int threads = 2;  // completion queues, a thread each
  std::int64_t max_message_bytes = 64LL << 20;
  Millis drain_timeout{10000};
  LogConfig log;
};

}  // namespace dcp
