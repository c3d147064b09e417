#include "runtime/sequence.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dcp {

std::int64_t Sequence::LongestLayer() const {
  return std::ranges::max(layers, {}, &LayerState::length).length;
}

std::int64_t Sequence::ShortestLayer() const {
  return std::ranges::min(layers, {}, &LayerState::length).length;
}

std::int64_t Sequence::ReservedEnd() const {
  std::int64_t end = LongestLayer();
  for (const auto& [id, range] : open_appends) end = std::max(end, range.second);
  return end;
}

std::uint64_t Sequence::MaxStepId() const {
  return std::ranges::max(layers, {}, &LayerState::step_id).step_id;
}

BlockId Sequence::WriteBlock(std::int64_t block) const {
  const auto it = staged.find(block);
  return it != staged.end() ? it->second : table[static_cast<std::size_t>(block)];
}

void Sequence::AdoptStaged(std::int64_t block, BlockPool& pool) {
  const auto it = staged.find(block);
  if (it == staged.end()) return;
  pool.Unref(std::exchange(table[static_cast<std::size_t>(block)], it->second));
  staged.erase(it);
}

void Sequence::Trim(const ShardMap& shards, BlockPool& pool) {
  const std::int64_t keep = shards.Blocks(Tokens(ReservedEnd()));
  while (static_cast<std::int64_t>(table.size()) > keep) {
    pool.Unref(table.back());
    table.pop_back();
  }
  std::erase_if(staged, [&](const auto& item) {
    const bool needed = std::ranges::any_of(open_appends, [&](const auto& append) {
      const auto [start, end] = append.second;
      return start < end && shards.Block(GlobalPos(start)) <= item.first &&
             item.first <= shards.Block(GlobalPos(end - 1));
    });
    if (!needed) pool.Unref(item.second);
    return !needed;
  });
}

void Sequence::FreeAll(BlockPool& pool) {
  for (const BlockId b : table) pool.Unref(b);
  for (const auto& [block, b] : staged) pool.Unref(b);
  table.clear();
  staged.clear();
}

Result<Sequence*> SequenceTable::Find(const SequenceRef& ref) {
  Sequence* sequence = FindId(ref.id);
  if (sequence == nullptr) {
    return Status(Reason::kSequenceNotFound, "sequence \"" + ref.id + "\" does not exist");
  }
  if (sequence->generation != ref.generation) {
    return Status(Reason::kSequenceGeneration, "sequence \"" + ref.id + "\" has generation " +
                                                   std::to_string(sequence->generation) +
                                                   ", the request names " +
                                                   std::to_string(ref.generation))
        .With("generation", std::to_string(sequence->generation));
  }
  Renew(*sequence);
  return sequence;
}

Sequence* SequenceTable::FindId(std::string_view id) {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : it->second.get();
}

Result<Sequence*> SequenceTable::FindEarlier(const std::string& id, const Origin& origin) {
  Sequence* sequence = FindId(id);
  if (sequence == nullptr) return sequence;
  if (sequence->origin == origin) {
    Renew(*sequence);
    return sequence;
  }
  return Status(Reason::kSequenceExists,
                "sequence \"" + id + "\" exists, made by another request (request_id \"" +
                    sequence->origin.request_id + "\", this one is \"" + origin.request_id + "\")");
}

Result<Sequence*> SequenceTable::Add(std::string id, Origin origin, int layers) {
  if (size() >= max_sequences_) {
    return Status(Reason::kSequenceLimit,
                  "limits.max_sequences = " + std::to_string(max_sequences_) + " are live");
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = std::move(id);
  sequence->generation = next_generation_++;
  sequence->origin = std::move(origin);
  sequence->layers.resize(static_cast<std::size_t>(layers));
  if (sequence->origin.lease) ++leased_;
  Renew(*sequence);
  Sequence* raw = sequence.get();
  by_id_.emplace(raw->id, std::move(sequence));
  return raw;
}

void SequenceTable::Remove(const Sequence& sequence) {
  if (sequence.origin.lease) --leased_;
  by_id_.erase(by_id_.find(sequence.id));
}

void SequenceTable::Renew(Sequence& sequence) {
  if (sequence.origin.lease) sequence.lease_end = Clock::now() + *sequence.origin.lease;
}

}  // namespace dcp
