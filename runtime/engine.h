// The engine: owns every sequence and the ranks, and runs all requests one after the other on one
// thread, so that a request sees the effects of all before it and of none after it.
//
// Thread-safe. Each call takes a completion that runs exactly once, on the engine's thread or, when
// the request is refused at once (OVERLOADED, RANKS_DOWN, DRAINING, a step's TIMEOUT), inside the
// call. Completions must not block and must not call the blocking helpers below.
//
// A step or an append applies as a whole or not at all. If a rank fails, the running step answers
// RANK_FAILED; when all ranks return within ranks.timeout the group is rebuilt under a new epoch
// and every sequence is served at its committed length, else the engine answers RANKS_DOWN from
// then on.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>

#include "comm/communicator.h"
#include "kernels/attention_backend.h"
#include "runtime/config.h"
#include "runtime/rank_port.h"
#include "runtime/requests.h"

namespace dcp {

template <class T>
using Done = std::function<void(Result<T>)>;

// What a program or a test may put in place of the defaults.
struct EngineHooks {
  std::span<const BackendEntry> backends;     // empty: Backends()
  MakeGroupFn make_group;                     // empty: what config.ranks asks for
  MakeRankPortFn make_port;                   // likewise
  RankFaultHook rank_fault;                   // called in every phase of every rank; tests only
  bool poison_kv = false;                     // fill the KV pool with NaN at start
  std::function<void(EngineState)> on_state;  // called on the engine's thread at each change
};

// Cancels a step that has not been launched; one that has finishes. Safe to keep after completion.
class StepHandle {
 public:
  StepHandle() = default;
  explicit StepHandle(std::shared_ptr<std::atomic<bool>> flag) : flag_(std::move(flag)) {}
  void Cancel() {
    if (flag_) flag_->store(true, std::memory_order_relaxed);
  }

 private:
  std::shared_ptr<std::atomic<bool>> flag_;
};

class Engine {
 public:
  // Starts the ranks, probes the backend's contract on each and makes them agree. Errors: CONFIG,
  // UNSUPPORTED, BACKEND_CONTRACT, RANK_FAILED, KV_CAPACITY (pool does not fit into memory).
  static Result<std::unique_ptr<Engine>> Create(const EngineConfig& config, EngineHooks hooks = {});
  ~Engine();  // answers what is queued with DRAINING, waits for the ranks (bounded by
              // ranks.timeout)

  EngineInfo info() const;
  LoadInfo load() const;  // a snapshot; never waits for a step
  EngineState state() const;

  void CreateSequence(CreateRequest request, Done<CreateReply> done);
  void ForkSequence(ForkRequest request, Done<CreateReply> done);
  void TruncateSequence(TruncateRequest request, Done<SequenceInfo> done);
  void ReleaseSequences(ReleaseRequest request, Done<ReleaseReply> done);
  void GetSequence(GetSequenceRequest request, Done<SequenceInfo> done);
  void ListSequences(ListRequest request, Done<ListReply> done);

  // May answer at once: OVERLOADED, RANKS_DOWN, DRAINING, and TIMEOUT if the step's timeout is not
  // above 0 or beyond limits.max_step_timeout.
  StepHandle SubmitStep(StepRequest request, Done<StepReply> done);

  // Begin reserves; WriteAppend copies a chunk into reserved pages (the chunk's bytes are free
  // again at completion); Commit makes all layers visible at once or answers COVERAGE; Cancel
  // returns every block. Any error but OVERLOADED ends the append. `on_lost` runs once if the
  // engine ends it by itself: APPEND_IDLE (nothing from the caller for limits.append_idle_timeout;
  // what waits in the queue or runs is not silence), APPEND_CANCELLED (release, lease), DRAINING,
  // RANKS_DOWN.
  void BeginAppend(AppendRequest request, std::function<void(Status)> on_lost, Done<AppendId> done);
  void WriteAppend(AppendId append, AppendChunk chunk, Done<AppendId> done);
  void CommitAppend(AppendId append, Done<AppendReply> done);
  void CancelAppend(AppendId append);

  // Stops taking new requests; those queued finish, open appends are cancelled. Returns true when
  // all is done, false at the deadline or when a rank is stuck.
  bool Drain(TimePoint deadline);

 private:
  class Impl;
  explicit Engine(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// Blocking form for programs and tests:  Await<CreateReply>([&](auto done) {
//   engine.CreateSequence(request, std::move(done)); })
template <class T, class F>
Result<T> Await(F&& start);

}  // namespace dcp

#include "runtime/await.h"  // IWYU pragma: export
