// The engine's state and what each request does to it: sequences, blocks, open appends, the ranks.
// Plain synchronous calls from one thread; runtime/engine.cc puts the queue and the thread around.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime/block_pool.h"
#include "runtime/rank_group.h"
#include "runtime/requests.h"
#include "runtime/sequence.h"
#include "runtime/shard_map.h"
#include "runtime/step_plan.h"

namespace dcp {

// Counters that other threads may read at any time.
struct EngineCounters {
  std::atomic<int> sequences{0}, open_appends{0};
  std::atomic<std::int64_t> free_blocks{0}, cow_blocks{0}, steps{0}, failed_steps{0};
  std::atomic<std::int64_t> faulty_rows{0}, rank_failures{0};
  std::atomic<std::uint64_t> epoch{0};
};

class EngineCore {
 public:
  EngineCore(std::shared_ptr<const EngineConfig> config, std::unique_ptr<RankGroup> group);

  bool ranks_down() const { return group_->down(); }
  const EngineCounters& counters() const { return counters_; }
  void CountStep(bool ok) { ++(ok ? counters_.steps : counters_.failed_steps); }

  Result<CreateReply> Create(const CreateRequest& request);
  Result<CreateReply> Fork(const ForkRequest& request);
  Result<SequenceInfo> Truncate(const TruncateRequest& request);
  Result<ReleaseReply> Release(const ReleaseRequest& request);
  Result<SequenceInfo> Get(const GetSequenceRequest& request);
  Result<ListReply> List(const ListRequest& request);

  // Fills every timing but queue and total.
  Result<StepReply> Step(const StepRequest& request);

  Result<AppendId> BeginAppend(const AppendRequest& request, std::function<void(Status)> on_lost);
  Result<AppendId> WriteAppend(AppendId id, const AppendChunk& chunk);
  Result<AppendReply> CommitAppend(AppendId id);
  void CancelAppend(AppendId id);
  void LoseAppends(const Status& why);  // all of them

  // Releases sequences whose lease has ended and appends that fell silent. `waits` says whether a
  // request of an append is in the queue: then it is not the caller who is silent.
  void Expire(TimePoint now, const std::function<bool(AppendId)>& waits);
  // Whether Expire has anything to watch.
  bool HasTimers() const { return sequences_.leased() > 0 || !appends_.empty(); }

 private:
  struct OpenAppend {
    Sequence* sequence = nullptr;
    AppendRequest request;
    bool replay = false;
    std::vector<std::vector<bool>> covered;  // [layer_count][count]
    std::int64_t missing = 0;                // (layer, token) pairs
    TimePoint last_activity;                 // when a request of it last waited or ended
    std::function<void(Status)> on_lost;
  };

  Status CheckEpoch(const std::optional<std::uint64_t>& expected) const;
  Status PlanStep(const StepRequest& request);
  Status CheckStepShape(const StepRequest& request);
  Status CompareReplays(const StepRequest& request);
  StepOutcome RunRanks(const std::shared_ptr<StepBuffers>& buffers);
  Result<Verdict> JudgeAppend(const Sequence& sequence, const AppendRequest& request) const;
  Status StageBlocks(Sequence& sequence, const AppendRequest& request);
  Status WriteChunk(OpenAppend& append, const AppendChunk& chunk);
  void EndAppend(AppendId id);
  void LoseAppend(AppendId id, const Status& why);
  void RemoveSequence(Sequence& sequence, const Status& why);
  SequenceInfo InfoOf(const Sequence& sequence) const;
  void PublishCounters();

  const std::shared_ptr<const EngineConfig> config_;
  const ShardMap shards_;
  std::unique_ptr<RankGroup> group_;
  BlockPool pool_;
  SequenceTable sequences_;
  std::map<AppendId, OpenAppend> appends_;
  AppendId next_append_ = 1;
  StepPlan plan_;
  EngineCounters counters_;
};

}  // namespace dcp
