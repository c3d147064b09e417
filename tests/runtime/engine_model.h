// A second implementation of the engine's rules, written from docs/api.md and the comments of
// runtime/requests.h: what every request must answer, and what it must leave. It is plain and slow,
// and shares no code with the engine: tokens are keys instead of bytes, a shared block is a shared
// pointer, and the pool is a count of the blocks that live.
//
// Each request is applied in the order in which the engine runs it. What only the engine can know
// (generations, append numbers, epochs) is learnt from its answers and checked for uniqueness.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/workload/synthetic.h"
#include "runtime/rank_message.h"
#include "runtime/requests.h"

namespace dcp::testing {

// A step and the keys of the latents it carries (one per token; unused by reads).
struct StepCase {
  StepRequest request;
  std::vector<TokenKey> keys;
  bool cancelled = false;  // its handle was cancelled before launch
  bool expired = false;    // its timeout passed before launch
};

struct ChunkCase {
  AppendId append = 0;
  AppendChunk chunk;
  std::vector<TokenKey> keys;
};

struct ModelLayer {
  std::vector<TokenKey> tokens;  // one per position: the layer's length
  std::uint64_t step_id = 0;     // the last write applied, and its range
  std::int64_t start = 0;
  std::int64_t count = 0;
  AppendId open_append = 0;
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  bool HasLastWrite() const { return count > 0 && length() >= start + count; }
};

class LiveBlock {
 public:
  explicit LiveBlock(std::int64_t& live) : live_(live) { ++live_; }
  ~LiveBlock() { --live_; }
  LiveBlock(const LiveBlock&) = delete;
  LiveBlock& operator=(const LiveBlock&) = delete;

 private:
  std::int64_t& live_;
};
using BlockRef = std::shared_ptr<LiveBlock>;

struct ModelSequence {
  std::string id;
  std::uint64_t generation = 0;
  std::string made_by;  // the Create or Fork, as text
  bool leased = false;
  std::vector<ModelLayer> layers;
  std::vector<BlockRef> blocks;
  std::map<std::int64_t, BlockRef> append_copies;  // of shared blocks that open appends write into
  std::set<AppendId> appends;

  std::int64_t Shortest() const;
  std::int64_t Longest() const;
  std::uint64_t NewestStep() const;
};

struct ModelAppend {
  std::string sequence;
  AppendRequest request;
  bool replay = false;
  std::vector<std::vector<std::optional<TokenKey>>> sent;  // [layer_count][count]
  std::int64_t Missing() const;
};

class EngineModel {
 public:
  EngineModel(const EngineConfig& config, std::uint64_t epoch);

  Reason Create(const CreateRequest& request);
  Reason Fork(const ForkRequest& request);
  Reason Truncate(const TruncateRequest& request);
  Reason Release(const ReleaseRequest& request, int& released);
  Reason Get(const GetSequenceRequest& request) const;
  Reason List(const ListRequest& request, std::vector<std::string>& ids,
              std::string& next_page_token) const;
  Reason Step(const StepCase& step);
  Reason BeginAppend(const AppendRequest& request);
  Reason WriteAppend(const ChunkCase& chunk);
  Reason CommitAppend(AppendId id, AppendReply& reply);
  void CancelAppend(AppendId id);
  void LoseAppends(Reason why);  // all of them

  // The next entry of one rank into `phase` fails.
  void ArmFault(RankPhase phase) { fault_ = phase; }
  bool fault_armed() const { return fault_.has_value(); }

  // What the engine answered; "" or what is wrong with it.
  std::string LearnGeneration(const std::string& id, std::uint64_t generation);
  std::string LearnAppend(AppendId id);
  std::string LearnEpoch(std::uint64_t epoch);

  const std::map<std::string, ModelSequence>& sequences() const { return sequences_; }
  const std::map<AppendId, ModelAppend>& appends() const { return appends_; }
  const ModelSequence* Find(const std::string& id) const;
  std::uint64_t epoch() const { return epoch_; }
  std::int64_t free_blocks() const { return config_.kv.blocks - live_blocks_; }
  // Every field of the answers of GetSequence and GetLoad but the remaining lease and the queue.
  SequenceInfo InfoOf(const ModelSequence& sequence) const;
  LoadInfo Load() const;
  // Appends that the engine ended by itself since the last call, and why.
  std::vector<std::pair<AppendId, Reason>> TakeLost() { return std::exchange(lost_, {}); }

 private:
  enum class Write { kAppend, kRewind, kReplay };
  struct Entry {
    ModelSequence* sequence;
    std::int64_t start, count;
    std::size_t first_key;
    std::optional<Write> write;  // absent: a read
  };
  // What a write takes from the pool.
  struct Claim {
    ModelSequence* sequence;
    std::vector<std::int64_t> copied;  // shared blocks to replace
    std::int64_t added = 0;
    std::int64_t Blocks() const { return static_cast<std::int64_t>(copied.size()) + added; }
  };

  bool WrongEpoch(const std::optional<std::uint64_t>& expected) const {
    return expected && *expected != epoch_;
  }
  Reason FindRef(const SequenceRef& ref, ModelSequence*& sequence);
  Reason JudgeWrite(const ModelLayer& layer, std::uint64_t step_id, std::int64_t start,
                    std::int64_t count, bool rewind, Write& write) const;
  Reason JudgeOvertaken(const ModelAppend& append) const;
  Reason CheckShape(const StepRequest& request) const;
  Reason StepUncounted(const StepCase& step);
  Claim ClaimFor(ModelSequence& sequence, std::int64_t start, std::int64_t count) const;
  void Trim(ModelSequence& sequence);
  void EndAppend(AppendId id);
  void Remove(const std::string& id, Reason why);
  bool RanksRun(bool attends);  // whether no rank fails
  BlockRef NewBlock() { return std::make_shared<LiveBlock>(live_blocks_); }
  std::int64_t BlockOf(std::int64_t position) const { return position / block_tokens_; }

  const EngineConfig config_;
  const std::int64_t block_tokens_;
  std::int64_t live_blocks_ = 0;  // before the sequences, which count it down
  std::map<std::string, ModelSequence> sequences_;
  std::map<AppendId, ModelAppend> appends_;
  std::optional<ModelAppend> beginning_;  // until its number is known
  std::uint64_t epoch_;
  std::uint64_t last_generation_ = 0;
  AppendId last_append_ = 0;
  std::optional<RankPhase> fault_;
  bool epoch_ends_ = false;  // a rank failed; the new epoch is not known yet
  LoadInfo counts_;          // steps, failed_steps, cow_blocks, rank_failures
  std::vector<std::pair<AppendId, Reason>> lost_;
};

// Whether a lease, an id and so on may be given; the limits of docs/api.md.
bool GoodId(const std::string& id);
bool GoodRequestId(const std::string& id);
bool GoodLease(const std::optional<Millis>& lease);

}  // namespace dcp::testing
