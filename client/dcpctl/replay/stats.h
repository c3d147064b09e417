// Counters that the replay's threads share.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <cstdint>
#include <string_view>

#include "client/cpp/rpc_error.h"

namespace dcp {

struct ReplayStats {
  std::atomic<std::int64_t> requests{0};  // ended well
  std::atomic<std::int64_t> forks{0};
  std::atomic<std::int64_t> forked_tokens{0};
  std::atomic<std::int64_t> appended_tokens{0};
  std::atomic<std::int64_t> retries{0};
  std::atomic<std::int64_t> errors{0};

  // Counts an error and shows the first few.
  void Error(std::string_view what, const RpcError& error) {
    constexpr std::int64_t kShown = 10;
    if (errors.fetch_add(1) < kShown) {
      fmt::print(stderr, "dcpctl: {}: {}\n", what, error.ToString());
    }
  }
};

}  // namespace dcp
