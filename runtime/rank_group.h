// All ranks as one: starts a step on each, waits bounded, names the rank that failed or is late,
// and rebuilds the group under a new epoch. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "runtime/config.h"
#include "runtime/rank_message.h"
#include "runtime/rank_port.h"

namespace dcp {

// The bytes of a step that ranks read and write. Ranks hold a reference while they run; a buffer
// whose ranks never came back is left to them.
struct StepBuffers {
  std::vector<std::byte> common;
  std::vector<std::vector<std::int64_t>> slots;  // [ranks][tokens]: the own parts
  ConstBytes query, new_kv;
  std::shared_ptr<const void> keepalive;  // owns the bytes behind query and new_kv
  std::string output;                     // [T, H, d_v]
  std::vector<float> lse;                 // [T, H] or empty
};

struct StepOutcome {
  Status status;  // OK, or RANK_FAILED naming rank and phase
  std::int32_t mismatch_token = -1;
  std::int64_t faulty_rows = 0;
  Nanos write{}, attend{}, exchange{}, merge{};  // the slowest rank's
};

class RankGroup {
 public:
  // Makes every rank, connects them and has them agree on their contract.
  static Result<std::unique_ptr<RankGroup>> Create(
      const std::shared_ptr<const EngineConfig>& config, const BackendEntry& backend,
      bool poison_kv, const RankFaultHook& fault, const MakeRankPortFn& make_port,
      MakeGroupFn make_group);
  ~RankGroup();

  std::uint64_t epoch() const { return epoch_; }
  bool down() const { return down_; }  // a rank did not come back

  // A buffer that no rank uses, with capacity from earlier steps.
  std::shared_ptr<StepBuffers> Buffers();

  // Fills ticket, epoch and timeout of the header in buffers->common and runs the step. On failure
  // aborts the group, waits for the ranks, rebuilds the group under a new epoch (a few attempts,
  // each bounded) or becomes down(). Precondition: !down().
  StepOutcome Run(const std::shared_ptr<StepBuffers>& buffers);

 private:
  struct Board;
  explicit RankGroup(std::shared_ptr<const EngineConfig> config);
  Status Connect();
  StepOutcome RunOnce(const std::shared_ptr<StepBuffers>& buffers);
  void Start(const std::shared_ptr<StepBuffers>& buffers);
  StepOutcome Collect() const;
  Status Fail();
  void Rebuild();

  std::shared_ptr<const EngineConfig> config_;
  MakeGroupFn make_group_;
  std::shared_ptr<Board> board_;
  std::vector<std::unique_ptr<RankPort>> ports_;
  std::shared_ptr<StepBuffers> spare_;
  std::uint64_t epoch_ = 0;
  std::uint64_t ticket_ = 0;
  bool down_ = false;
};

}  // namespace dcp
