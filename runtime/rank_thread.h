// A rank that is a thread of this process: the thread, its hand-over of steps and results, and what
// the thread and the port share. What the rank does in a step is a function, made by local_rank.cc
// for CPUs and by cuda_rank.cc for GPUs.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/communicator.h"
#include "runtime/rank_port.h"

namespace dcp {

// Where a rank is and whom it talks to. Shared by its thread, its port and whatever the rank leaves
// behind on a device.
class RankLink {
 public:
  explicit RankLink(RankSetup setup) : setup_(std::move(setup)) {}

  const RankSetup& setup() const { return setup_; }
  const EngineConfig& config() const { return *setup_.config; }
  int rank() const { return setup_.rank; }

  void SetCommunicator(std::shared_ptr<Communicator> comm);
  std::shared_ptr<Communicator> communicator() const;

  RankPhase phase() const { return phase_.load(std::memory_order_relaxed); }
  void SetPhase(RankPhase phase) { phase_.store(phase, std::memory_order_relaxed); }
  // Enters a phase; the test hook may fail the rank here, or block.
  Status Enter(RankPhase phase);

 private:
  const RankSetup setup_;
  mutable std::mutex mutex_;
  std::shared_ptr<Communicator> comm_;  // guarded by mutex_; Abort comes from other threads
  std::atomic<RankPhase> phase_{RankPhase::kIdle};
};

// Runs one step; called by the rank's thread only, and destroyed by it.
using RankRun = std::function<Status(const RankStep& step, RankResult& result)>;

// The port of a thread that runs `run`. The function and the link stay alive as long as the thread:
// one that is stuck when its port goes away still has all it may use when it wakes.
std::unique_ptr<RankPort> StartRankThread(std::shared_ptr<RankLink> link, RankRun run);

}  // namespace dcp
