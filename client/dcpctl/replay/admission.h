// Brings requests in at their time, on a thread of its own: waits for the scheduled moment and for
// room, makes the prefix sequences that a request needs, forks or creates it, appends its prompt.
// The driver takes the ready sessions and gives ended ones back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/time.h"
#include "client/dcpctl/replay/server_calls.h"
#include "client/dcpctl/replay/stats.h"
#include "client/workload/replay_plan.h"

namespace dcp {

// A live request.
struct Session {
  const RequestPlan* plan = nullptr;
  v1::SequenceRef sequence;
  TimePoint scheduled;
  std::int64_t decoded = 0;  // tokens
  bool failed = false;
  // Position of the next token.
  std::int64_t position() const { return plan->input - 1 + decoded; }
};

struct AdmissionLimits {
  double time_scale = 1;
  int max_live = 64;
  std::int64_t free_blocks = 0;
  std::int64_t block_tokens = 1;
};

class Admission {
 public:
  Admission(const ReplayPlan& plan, const AdmissionLimits& limits, ServerCalls& calls,
            ReplayStats& stats, const std::atomic<bool>& stop);
  ~Admission();  // joins; releases what is left
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  TimePoint begin() const { return begin_; }
  // Sessions that became ready. Waits up to `patience` for one; zero does not wait.
  std::vector<std::unique_ptr<Session>> TakeReady(Millis patience);
  // No session is ready and none will come.
  bool Exhausted() const;
  // Releases sessions, and prefixes without further users.
  void End(const std::vector<std::unique_ptr<Session>>& sessions);

 private:
  struct Prefix {
    std::optional<v1::SequenceRef> sequence;
    std::int64_t blocks = 0;
    int users_left = 0;
  };

  void Run();
  bool WaitForRoom(const RequestPlan& request, TimePoint scheduled);
  void RenewPrefixes();
  RpcResult<v1::SequenceRef> Prepare(const RequestPlan& request);
  RpcResult<v1::SequenceRef> EnsurePrefix(int index);
  // Gives the room back and collects prefixes that nobody needs any more.
  void EndLocked(const RequestPlan& request, std::vector<v1::SequenceRef>& release);
  std::int64_t BlocksOf(std::int64_t length, std::int64_t fork_length) const;

  const ReplayPlan& plan_;
  const AdmissionLimits limits_;
  ServerCalls& calls_;
  ReplayStats& stats_;
  const std::atomic<bool>& stop_;
  const TimePoint begin_;
  TimePoint next_renewal_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Prefix> prefixes_;
  std::vector<std::unique_ptr<Session>> ready_;
  int live_ = 0;
  std::int64_t blocks_used_ = 0;  // at most, by live requests and prefixes
  bool done_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace dcp
