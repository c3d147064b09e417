// The engine's end of a rank. Local ranks are threads of this process; the same port reaches ranks
// elsewhere, because its messages are flat (runtime/rank_message.h).
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "kernels/attention_backend.h"
#include "runtime/config.h"
#include "runtime/rank_message.h"

namespace dcp {

// Called by a rank on entering a phase; a returned error fails the rank there, blocking stalls it.
using RankFaultHook = std::function<Status(int rank, RankPhase phase)>;

// Runs on the rank's thread, once per Start, and must not block.
using RankDone = std::function<void(const RankResult&)>;

struct RankSetup {
  int rank = 0;
  std::shared_ptr<const EngineConfig> config;
  BackendEntry backend;
  std::shared_ptr<WorkerPool> pool;  // shared by the ranks
  bool poison_kv = false;
  RankFaultHook fault;
  RankDone done;
};

class RankPort {
 public:
  // Waits for the rank if it is idle or returns soon; a rank stuck in a step is left behind with
  // everything it may touch (it owns a share of that), and never joined.
  virtual ~RankPort() = default;

  // Gives the rank its end of a new group. Precondition: the rank is idle.
  virtual void SetCommunicator(std::unique_ptr<Communicator> comm) = 0;

  // Begins a step and returns at once; `done` follows. The rank keeps a copy of `step`, and with it
  // step.hold, until it is done. Precondition: the rank is idle and has a communicator.
  virtual void Start(const RankStep& step) = 0;

  // Poisons the rank's group; from any thread.
  virtual void Abort(const Status& why) = 0;

  // Where the rank is now: names a late rank's phase.
  virtual RankPhase phase() const = 0;
};

using MakeRankPortFn = std::function<Result<std::unique_ptr<RankPort>>(const RankSetup&)>;

// A rank that is a thread of this process. Allocates its KV pool and buffers, makes the backend and
// probes its contract. Errors: KV_CAPACITY, BACKEND_CONTRACT, what the backend's factory answers.
Result<std::unique_ptr<RankPort>> MakeLocalRankPort(const RankSetup& setup);

}  // namespace dcp
