#include "tests/support/serialising_port.h"

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace dcp::testing {
namespace {

// The far side's memory for one step.
struct Remote {
  std::vector<std::byte> common, own, query, new_kv, output, lse;
  RankStep caller;  // where outputs go back to
};

std::vector<std::byte> Copy(ConstBytes bytes) { return {bytes.begin(), bytes.end()}; }

StridedBytes Dense(std::vector<std::byte>& storage, const StridedBytes& like) {
  storage.assign(static_cast<std::size_t>(like.rows * like.row_bytes), std::byte{0xee});
  return {.data = storage.data(),
          .rows = like.rows,
          .row_bytes = like.row_bytes,
          .stride = like.row_bytes};
}

void CopyBack(const std::vector<std::byte>& from, const StridedBytes& to) {
  if (from.empty()) return;  // a write or a comparison has no output, and no memory to copy from
  for (std::int64_t i = 0; i < to.rows; ++i) {
    std::memcpy(to.data + i * to.stride, from.data() + i * to.row_bytes,
                static_cast<std::size_t>(to.row_bytes));
  }
}

// Shared with the rank's callback, which may outlive the port.
struct Slot {
  std::mutex mutex;
  std::shared_ptr<Remote> remote;
};

class SerialisingPort final : public RankPort {
 public:
  SerialisingPort(std::shared_ptr<Slot> slot, std::unique_ptr<RankPort> rank)
      : slot_(std::move(slot)), rank_(std::move(rank)) {}

  void SetCommunicator(std::unique_ptr<Communicator> comm) override {
    rank_->SetCommunicator(std::move(comm));
  }
  void Abort(const Status& why) override { rank_->Abort(why); }
  RankPhase phase() const override { return rank_->phase(); }

  void Start(const RankStep& step) override {
    auto remote = std::make_shared<Remote>();
    remote->common = Copy(step.common);
    remote->own = Copy(step.own);
    remote->query = Copy(step.query);
    remote->new_kv = Copy(step.new_kv);
    remote->caller = step;
    const RankStep there{.common = remote->common,
                         .own = remote->own,
                         .query = remote->query,
                         .new_kv = remote->new_kv,
                         .output = Dense(remote->output, step.output),
                         .lse = Dense(remote->lse, step.lse),
                         .hold = remote};
    {
      const std::lock_guard lock(slot_->mutex);
      slot_->remote = remote;
    }
    rank_->Start(there);
  }

 private:
  std::shared_ptr<Slot> slot_;
  std::unique_ptr<RankPort> rank_;
};

}  // namespace

Result<std::unique_ptr<RankPort>> MakeSerialisingPort(const RankSetup& setup) {
  auto slot = std::make_shared<Slot>();
  RankSetup there = setup;
  // Its own copies of what ranks of one process share.
  there.config = std::make_shared<const EngineConfig>(*setup.config);
  there.done = [slot, done = setup.done](const RankResult& result) {
    std::shared_ptr<Remote> remote;
    {
      const std::lock_guard lock(slot->mutex);
      remote = std::move(slot->remote);
    }
    if (remote && result.status.ok()) {
      CopyBack(remote->output, remote->caller.output);
      CopyBack(remote->lse, remote->caller.lse);
    }
    remote.reset();
    done(result);
  };
  DCP_ASSIGN_OR_RETURN(std::unique_ptr<RankPort> rank, MakeLocalRankPort(there));
  return std::unique_ptr<RankPort>(
      std::make_unique<SerialisingPort>(std::move(slot), std::move(rank)));
}

}  // namespace dcp::testing
