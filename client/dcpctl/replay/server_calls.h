// The unary calls and appends of a replay: overload answers are retried after their retry_delay and
// counted. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/dcpctl/replay/stats.h"
#include "client/workload/synthetic.h"

namespace dcp {

// How long an overloaded server is asked again before that is an error.
inline constexpr Millis kOverloadPatience(120'000);

class ServerCalls {
 public:
  // `stop` ends retries early. Sequence ids begin with a tag of this run.
  ServerCalls(Client& client, const Synthetic& synthetic, ReplayStats& stats,
              const std::atomic<bool>& stop);

  RpcResult<v1::SequenceRef> Create(const std::string& name);
  RpcResult<v1::SequenceRef> Fork(const v1::SequenceRef& parent, std::int64_t at_length,
                                  const std::string& name);
  // Appends positions [start, start + count) of `content` to all layers.
  RpcError Append(const v1::SequenceRef& sequence, const Content& content, std::int64_t start,
                  std::int64_t count);
  // Errors are counted, not returned.
  void Release(const std::vector<v1::SequenceRef>& sequences);
  // Renews the lease.
  void Touch(const v1::SequenceRef& sequence);

  // Larger than all before it, so that it increases along every chain of forks.
  std::uint64_t NextStepId() { return ++last_step_id_; }

 private:
  RpcError Retry(const std::function<RpcError()>& call);
  std::string Name(const std::string& name) const { return prefix_ + name; }

  Client& client_;
  const Synthetic synthetic_;
  ReplayStats& stats_;
  const std::atomic<bool>& stop_;
  std::string prefix_;
  std::atomic<std::uint64_t> last_step_id_{0};
};

}  // namespace dcp
