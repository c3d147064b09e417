// The plan of one step: which blocks each write needs, and the message every rank gets. Planning
// touches no rank and no sequence; a plan is then committed or dropped.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "runtime/block_pool.h"
#include "runtime/rank_group.h"
#include "runtime/rank_message.h"
#include "runtime/sequence.h"
#include "runtime/shard_map.h"
#include "runtime/step_rules.h"

namespace dcp {

// What a write does to one sequence's block table.
struct BlockChanges {
  struct Replace {
    std::int64_t block;  // index in the table
    BlockId to;
    bool staged;  // `to` is the copy that an open append has staged: not ours to free
  };
  std::vector<Replace> replaced;  // shared blocks, copied on write
  std::vector<BlockId> added;     // appended to the table, in order

  // The block that the step reads and writes at `block`.
  BlockId At(const Sequence& sequence, std::int64_t block) const;
};

// Reserves blocks for a write of [start, start + count): blocks past the table's end are taken, and
// shared ones are replaced by fresh ones, whose copies are added to `copies`. Blocks stay with
// `changes` until Apply or Drop. Errors: KV_CAPACITY; nothing is taken then.
Status ReserveBlocks(const Sequence& sequence, std::int64_t start, std::int64_t count,
                     const ShardMap& shards, BlockPool& pool, BlockChanges& changes,
                     std::vector<PageCopy>& copies);
void ApplyBlocks(Sequence& sequence, BlockChanges& changes, BlockPool& pool);
void DropBlocks(BlockChanges& changes, BlockPool& pool);

struct PlannedEntry {
  Sequence* sequence = nullptr;
  Verdict verdict = Verdict::kRead;
  std::int64_t start = 0;
  std::int64_t count = 0;
  BlockChanges blocks;
};

// A reusable plan; vectors keep their capacity.
struct StepPlan {
  std::int32_t layer = 0;
  std::uint64_t step_id = 0;
  std::int64_t tokens = 0;
  std::vector<PlannedEntry> entries;
  std::vector<PageCopy> copies;

  bool HasVerdict(Verdict verdict) const;
  std::int64_t CowBlocks() const { return static_cast<std::int64_t>(copies.size()); }

  // Takes every entry's blocks or none. Errors: KV_CAPACITY.
  Status Reserve(const ShardMap& shards, BlockPool& pool);
  // A rewind's shorter length holds from launch on, whatever becomes of the step.
  void BeginRewinds();
  void Commit(const ShardMap& shards, BlockPool& pool);
  void Drop(const ShardMap& shards, BlockPool& pool);
};

struct MessageOptions {
  RankMode mode = RankMode::kAttend;
  DType output_dtype = DType::kBf16;
  bool return_lse = false;
  LogBase lse_base = LogBase::kE;
};

// Fills buffers.common and buffers.slots from a reserved plan. kCompare carries the slots of
// replayed entries only, kAttend those of appends and rewinds.
void WriteMessage(const StepPlan& plan, const ShardMap& shards, const MessageOptions& options,
                  StepBuffers& buffers);

// The message of a bare write (or compare) of consecutive tokens of one sequence, whose block b is
// block_at(b), preceded by `copies`.
void WriteTokensMessage(RankMode mode, std::int32_t layer, std::int64_t start, std::int64_t count,
                        const std::function<BlockId(std::int64_t)>& block_at,
                        std::span<const PageCopy> copies, const ShardMap& shards,
                        StepBuffers& buffers);

}  // namespace dcp
