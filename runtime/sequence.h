// A live sequence: per-layer lengths, its block table, and what it takes to judge requests against
// them. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "runtime/block_pool.h"
#include "runtime/requests.h"
#include "runtime/shard_map.h"

namespace dcp {

// The last write applied to a layer, and the layer's length.
struct LayerState {
  std::int64_t length = 0;
  std::uint64_t step_id = 0;  // 0: nothing applied yet
  std::int64_t start = 0;
  std::int64_t count = 0;
  AppendId open_append = 0;  // 0: none
};

// What an idempotent Create or Fork was asked, to recognise the same request again.
struct Origin {
  std::string request_id;
  double softmax_scale = 0;  // Create
  std::string parent;        // Fork
  std::uint64_t parent_generation = 0;
  std::int64_t at_length = 0;
  std::optional<Millis> lease;
  friend bool operator==(const Origin&, const Origin&) = default;
};

struct Sequence {
  std::string id;
  std::uint64_t generation = 0;
  Origin origin;
  std::vector<LayerState> layers;
  // Block k covers tokens [k, k + 1) * block_tokens of every layer. The table reaches over the
  // longest layer and the end of every open append.
  std::vector<BlockId> table;
  // Private copies of shared blocks that open appends write into, by block index. They replace the
  // table's block when the append commits or when a step writes into the block, and are freed when
  // no open append needs them any more.
  std::map<std::int64_t, BlockId> staged;
  std::map<AppendId, std::pair<std::int64_t, std::int64_t>> open_appends;  // [start, end) tokens
  TimePoint lease_end{};  // meaningful with origin.lease

  std::int64_t LongestLayer() const;
  std::int64_t ShortestLayer() const;
  std::int64_t ReservedEnd() const;  // tokens the table must reach over
  std::uint64_t MaxStepId() const;

  BlockId WriteBlock(std::int64_t block) const;  // where an open append writes
  // Makes the staged copy of `block`, if any, the table's block.
  void AdoptStaged(std::int64_t block, BlockPool& pool);
  // Frees table blocks past ReservedEnd() and staged blocks of no open append.
  void Trim(const ShardMap& shards, BlockPool& pool);
  void FreeAll(BlockPool& pool);
};

class SequenceTable {
 public:
  // Generations count on from `first_generation`, so that those of an earlier server differ.
  SequenceTable(int max_sequences, std::uint64_t first_generation)
      : max_sequences_(max_sequences), next_generation_(first_generation) {}

  int size() const { return static_cast<int>(by_id_.size()); }
  int leased() const { return leased_; }

  // Errors: SEQUENCE_NOT_FOUND, SEQUENCE_GENERATION. Renews the lease.
  Result<Sequence*> Find(const SequenceRef& ref);
  Sequence* FindId(std::string_view id);  // null when there is none

  // An earlier answer to the same request, null when the id is free. Errors: SEQUENCE_EXISTS when
  // the id is taken by another request.
  Result<Sequence*> FindEarlier(const std::string& id, const Origin& origin);
  // Precondition: the id is free. Errors: SEQUENCE_LIMIT.
  Result<Sequence*> Add(std::string id, Origin origin, int layers);
  void Remove(const Sequence& sequence);

  // Ordered by id; from the first id greater than `after`.
  template <class F>
  void ForEachAfter(std::string_view after, F visit) {  // visit returns false to stop
    for (auto it = after.empty() ? by_id_.begin() : by_id_.upper_bound(after); it != by_id_.end();
         ++it) {
      if (!visit(*it->second)) return;
    }
  }

 private:
  void Renew(Sequence& sequence);
  int max_sequences_;
  int leased_ = 0;
  std::uint64_t next_generation_;
  std::map<std::string, std::unique_ptr<Sequence>, std::less<>> by_id_;
};

}  // namespace dcp
