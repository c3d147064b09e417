#include "runtime/step_plan.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "runtime/sabotage.h"

namespace dcp {
namespace {

// Where token p lives on rank r, or -1 if r does not own it.
std::int64_t SlotOn(const ShardMap& shards, Rank r, GlobalPos p, BlockId block) {
  Rank owner = shards.Owner(p);
  if (Sabotaged(Fault::kOwnerOffAtPageEdge) && shards.SlotInPage(p) == shards.page_tokens() - 1) {
    owner = Rank((owner.value() + 1) % shards.ranks());
  }
  if (owner != r) return -1;
  return static_cast<std::int64_t>(block) * shards.page_tokens() + shards.SlotInPage(p);
}

std::int32_t RowBound(const ShardMap& shards, const PlannedEntry& entry, std::int64_t j, Rank r) {
  const GlobalPos start(entry.start);
  if (Sabotaged(Fault::kBoundLocalMinusK)) {
    const Tokens whole = shards.LocalLength(Tokens(entry.start + entry.count), r);
    return static_cast<std::int32_t>(
        std::max<std::int64_t>(0, whole.value() - (entry.count - 1 - j)));
  }
  if (Sabotaged(Fault::kLastTokenMissed)) j -= 1;
  if (Sabotaged(Fault::kTokenBeyondSeen)) j += 1;
  return static_cast<std::int32_t>(shards.CausalBound(start, j, r).value());
}

}  // namespace

BlockId BlockChanges::At(const Sequence& sequence, std::int64_t block) const {
  const auto size = static_cast<std::int64_t>(sequence.table.size());
  if (block >= size) return added[static_cast<std::size_t>(block - size)];
  for (const Replace& r : replaced) {
    if (r.block == block) return r.to;
  }
  return sequence.table[static_cast<std::size_t>(block)];
}

Status ReserveBlocks(const Sequence& sequence, std::int64_t start, std::int64_t count,
                     const ShardMap& shards, BlockPool& pool, BlockChanges& changes,
                     std::vector<PageCopy>& copies) {
  const auto size = static_cast<std::int64_t>(sequence.table.size());
  const std::int64_t first = shards.Block(GlobalPos(start));
  const std::int64_t last = shards.Block(GlobalPos(start + count - 1));
  const auto shared = [&](std::int64_t b) {
    return pool.refs(sequence.table[static_cast<std::size_t>(b)]) > 1;
  };
  std::int64_t needed = std::max<std::int64_t>(0, last + 1 - std::max(first, size));
  for (std::int64_t b = first; b <= std::min(last, size - 1); ++b) {
    if (!sequence.staged.contains(b) && shared(b)) ++needed;
  }
  if (needed > pool.free()) {
    return Status(Reason::kKvCapacity, "sequence \"" + sequence.id + "\" needs " +
                                           std::to_string(needed) + " blocks, " +
                                           std::to_string(pool.free()) + " of " +
                                           std::to_string(pool.total()) + " are free");
  }
  for (std::int64_t b = first; b <= last; ++b) {
    if (b >= size) {
      changes.added.push_back(pool.Take());
    } else if (const auto it = sequence.staged.find(b); it != sequence.staged.end()) {
      changes.replaced.push_back({b, it->second, true});
    } else if (shared(b)) {
      const BlockId fresh = pool.Take();
      changes.replaced.push_back({b, fresh, false});
      copies.push_back({sequence.table[static_cast<std::size_t>(b)], fresh});
    }
  }
  return Status::Ok();
}

void ApplyBlocks(Sequence& sequence, BlockChanges& changes, BlockPool& pool) {
  for (const BlockChanges::Replace& r : changes.replaced) {
    if (r.staged) {
      sequence.AdoptStaged(r.block, pool);
    } else {
      pool.Unref(std::exchange(sequence.table[static_cast<std::size_t>(r.block)], r.to));
    }
  }
  sequence.table.insert(sequence.table.end(), changes.added.begin(), changes.added.end());
  changes = {};
}

void DropBlocks(BlockChanges& changes, BlockPool& pool) {
  for (const BlockChanges::Replace& r : changes.replaced) {
    if (!r.staged) pool.Unref(r.to);
  }
  for (const BlockId b : changes.added) pool.Unref(b);
  changes = {};
}

bool StepPlan::HasVerdict(Verdict verdict) const {
  return std::ranges::any_of(entries, [&](const PlannedEntry& e) { return e.verdict == verdict; });
}

namespace {
bool Writes(const PlannedEntry& e) {
  return e.verdict == Verdict::kAppend || e.verdict == Verdict::kRewind;
}
}  // namespace

Status StepPlan::Reserve(const ShardMap& shards, BlockPool& pool) {
  copies.clear();
  for (PlannedEntry& e : entries) {
    if (!Writes(e)) continue;
    Status status = ReserveBlocks(*e.sequence, e.start, e.count, shards, pool, e.blocks, copies);
    if (!status.ok()) {
      for (PlannedEntry& taken : entries) DropBlocks(taken.blocks, pool);
      return status;
    }
  }
  return Status::Ok();
}

void StepPlan::BeginRewinds() {
  for (PlannedEntry& e : entries) {
    if (e.verdict == Verdict::kRewind) {
      e.sequence->layers[static_cast<std::size_t>(layer)].length = e.start;
    }
  }
}

void StepPlan::Commit(const ShardMap& shards, BlockPool& pool) {
  for (PlannedEntry& e : entries) {
    if (!Writes(e)) continue;
    ApplyBlocks(*e.sequence, e.blocks, pool);
    LayerState& state = e.sequence->layers[static_cast<std::size_t>(layer)];
    state.length = e.start + e.count;
    state.step_id = step_id;
    state.start = e.start;
    state.count = e.count;
    if (e.verdict == Verdict::kRewind) e.sequence->Trim(shards, pool);
  }
}

void StepPlan::Drop(const ShardMap& shards, BlockPool& pool) {
  for (PlannedEntry& e : entries) {
    DropBlocks(e.blocks, pool);
    if (e.verdict == Verdict::kRewind) e.sequence->Trim(shards, pool);
  }
}

void WriteMessage(const StepPlan& plan, const ShardMap& shards, const MessageOptions& options,
                  StepBuffers& buffers) {
  const std::int64_t ranks = shards.ranks();
  std::int64_t stride = 0;
  for (const PlannedEntry& e : plan.entries) {
    stride = std::max(stride, shards.Blocks(Tokens(e.start + e.count)));
  }
  const MutableStep m = LayOutCommon(
      {.layer = plan.layer,
       .ranks = shards.ranks(),
       .entries = static_cast<std::int32_t>(plan.entries.size()),
       .tokens = static_cast<std::int32_t>(plan.tokens),
       .table_stride = static_cast<std::int32_t>(stride),
       .copies =
           options.mode == RankMode::kCompare ? 0 : static_cast<std::int32_t>(plan.copies.size()),
       .mode = static_cast<std::uint8_t>(options.mode),
       .has_new_kv = buffers.new_kv.empty() ? std::uint8_t{0} : std::uint8_t{1},
       .output_dtype = static_cast<std::uint8_t>(options.output_dtype),
       .return_lse = options.return_lse ? std::uint8_t{1} : std::uint8_t{0},
       .lse_base = static_cast<std::uint8_t>(options.lse_base)},
      buffers.common);
  std::ranges::copy(std::span(plan.copies).first(m.copies.size()), m.copies.begin());
  for (auto& slots : buffers.slots) {
    slots.assign(static_cast<std::size_t>(plan.tokens), std::int64_t{-1});
  }

  std::int64_t token = 0;
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const PlannedEntry& e = plan.entries[i];
    m.entry_begin[i] = static_cast<std::int32_t>(token);
    // A comparison runs before blocks are reserved: only what is stored already has any.
    const bool compares = options.mode == RankMode::kCompare;
    const bool carries = compares ? e.verdict == Verdict::kReplay : Writes(e);
    const std::int64_t blocks = compares && !carries ? 0 : shards.Blocks(Tokens(e.start + e.count));
    const auto row = m.block_table.subspan(i * static_cast<std::size_t>(stride),
                                           static_cast<std::size_t>(stride));
    const auto in_table = static_cast<std::int64_t>(e.sequence->table.size());
    for (std::int64_t b = 0; b < stride; ++b) {
      // Items past the entry's own blocks are never read; 0 keeps them inside the pool.
      const bool stale = Sabotaged(Fault::kStalePageTable) && b < in_table;
      row[static_cast<std::size_t>(b)] = b >= blocks ? 0
                                         : stale ? e.sequence->table[static_cast<std::size_t>(b)]
                                                 : e.blocks.At(*e.sequence, b);
    }
    const std::int64_t old_length = e.sequence->layers[static_cast<std::size_t>(plan.layer)].length;
    for (std::int64_t j = 0; j < e.count; ++j, ++token) {
      const GlobalPos p(e.start + j);
      const BlockId block = carries ? e.blocks.At(*e.sequence, shards.Block(p)) : 0;
      const bool keeps_old = Sabotaged(Fault::kRewindKeepsOld) && e.verdict == Verdict::kRewind &&
                             p.value() < old_length;
      for (std::int64_t r = 0; r < ranks; ++r) {
        const Rank rank(static_cast<std::int32_t>(r));
        m.bounds[static_cast<std::size_t>(r * plan.tokens + token)] = RowBound(shards, e, j, rank);
        if (carries && !keeps_old) {
          buffers.slots[static_cast<std::size_t>(r)][static_cast<std::size_t>(token)] =
              SlotOn(shards, rank, p, block);
        }
      }
    }
  }
  m.entry_begin[plan.entries.size()] = static_cast<std::int32_t>(token);
}

void WriteTokensMessage(RankMode mode, std::int32_t layer, std::int64_t start, std::int64_t count,
                        const std::function<BlockId(std::int64_t)>& block_at,
                        std::span<const PageCopy> copies, const ShardMap& shards,
                        StepBuffers& buffers) {
  const MutableStep m = LayOutCommon({.layer = layer,
                                      .ranks = shards.ranks(),
                                      .tokens = static_cast<std::int32_t>(count),
                                      .copies = static_cast<std::int32_t>(copies.size()),
                                      .mode = static_cast<std::uint8_t>(mode),
                                      .has_new_kv = 1},
                                     buffers.common);
  std::ranges::copy(copies, m.copies.begin());
  for (std::size_t r = 0; r < buffers.slots.size(); ++r) {
    buffers.slots[r].resize(static_cast<std::size_t>(count));
    for (std::int64_t j = 0; j < count; ++j) {
      const GlobalPos p(start + j);
      buffers.slots[r][static_cast<std::size_t>(j)] =
          SlotOn(shards, Rank(static_cast<std::int32_t>(r)), p, block_at(shards.Block(p)));
    }
  }
}

}  // namespace dcp
