#include "kernels/backends/cuda_portable_plan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dcp::portable {
namespace {

// Later chunks that may become items of their own, per thread block: enough to balance any batch,
// and a bound on the size of plans.
constexpr int kTailsPerBlock = 32;
// A tile that is this much longer than a block's share of the step is still not worth splitting.
constexpr int kSlackOfShare = 8;

template <class T>
std::size_t Put(const std::vector<T>& items, std::span<std::byte> to, std::size_t at) {
  if (!items.empty()) std::memcpy(to.data() + at, items.data(), items.size() * sizeof(T));
  return at + items.size() * sizeof(T);
}

std::int64_t Chunks(std::int64_t begin, std::int64_t end) {
  std::int64_t count = 0;
  for (; begin < end; begin = ChunkEnd(static_cast<std::int32_t>(begin))) ++count;
  return count;
}

}  // namespace

std::int64_t SlotRows(std::int64_t rows, std::int64_t max_keys, int d_v, std::size_t bytes) {
  const auto row_bytes = static_cast<std::int64_t>((static_cast<std::size_t>(d_v) + 2) * 4);
  return std::min(rows * std::max<std::int64_t>(Chunks(0, max_keys), 1),
                  static_cast<std::int64_t>(bytes) / row_bytes);
}

Planner::Planner(int heads, int max_tokens, int blocks, std::int64_t slot_rows)
    : heads_(heads),
      max_tokens_(max_tokens),
      blocks_(blocks),
      slot_rows_(slot_rows),
      max_tails_(static_cast<std::size_t>(blocks) * kTailsPerBlock) {
  const int tiles_per_token = (heads + kTileRows - 1) / kTileRows;
  tiles_.reserve(static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(tiles_per_token));
  items_.reserve(tiles_.capacity() + max_tails_);
  groups_.reserve(std::min(tiles_.capacity(), max_tails_));
  splits_.reserve(groups_.capacity());
}

std::size_t Planner::MaxBytes() const {
  return sizeof(PlanHeader) + items_.capacity() * sizeof(PlanItem) +
         groups_.capacity() * sizeof(PlanGroup) +
         static_cast<std::size_t>(max_tokens_) * sizeof(std::int32_t);
}

void Planner::MakeTiles(const AttentionStep& step) {
  tiles_.clear();
  for (int e = 0; e < step.entries; ++e) {
    const std::int32_t begin = step.entry_begin[e] * heads_;
    const std::int32_t end = step.entry_begin[e + 1] * heads_;
    for (std::int32_t row = begin; row < end; row += kTileRows) {
      Tile tile{.entry = e, .first_row = row, .rows = std::min(kTileRows, end - row)};
      const std::int32_t last_token = (row + tile.rows - 1) / heads_;
      for (std::int32_t t = row / heads_; t <= last_token; ++t) {
        const std::int32_t bound = step.bound[t];
        tile.max_bound = std::max(tile.max_bound, bound);
        if (bound > 0 && (tile.min_bound == 0 || bound < tile.min_bound)) tile.min_bound = bound;
      }
      tiles_.push_back(tile);
    }
  }
  std::sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
    return a.max_bound != b.max_bound ? a.max_bound > b.max_bound : a.first_row < b.first_row;
  });
}

void Planner::MakeItems() {
  items_.clear();
  groups_.clear();
  splits_.clear();
  std::int64_t total = 0;
  for (const Tile& tile : tiles_) total += tile.max_bound;
  const std::int64_t share = total / blocks_;
  std::int64_t slot_row = 0;
  auto tails_left = static_cast<std::int64_t>(max_tails_);
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    const Tile& tile = tiles_[i];
    PlanItem item{.entry = tile.entry,
                  .first_row = tile.first_row,
                  .rows = tile.rows,
                  .key_begin = 0,
                  .key_end = tile.max_bound,
                  .slot_row = -1,
                  .min_bound = tile.min_bound};
    if (tile.max_bound > share + share / kSlackOfShare) {
      std::int32_t prefix_end = ChunkEnd(0);
      while (ChunkEnd(prefix_end) <= share) prefix_end = ChunkEnd(prefix_end);
      std::int64_t tails = Chunks(prefix_end, tile.max_bound);
      const std::int64_t slots_left = (slot_rows_ - slot_row) / tile.rows;
      for (; tails > 0 && tails > std::min(tails_left, slots_left - 1); --tails) {
        prefix_end = ChunkEnd(prefix_end);
      }
      if (tails > 0) {
        item.key_end = prefix_end;
        item.slot_row = static_cast<std::int32_t>(slot_row);
        groups_.push_back({.first_row = tile.first_row,
                           .rows = tile.rows,
                           .slot_row = item.slot_row,
                           .items = static_cast<std::int32_t>(tails + 1)});
        splits_.push_back({.tile = static_cast<std::int32_t>(i), .prefix_end = prefix_end});
        slot_row += (tails + 1) * tile.rows;
        tails_left -= tails;
      }
    }
    items_.push_back(item);
  }
}

void Planner::AddTails() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Tile& tile = tiles_[static_cast<std::size_t>(splits_[g].tile)];
    std::int32_t slot_row = groups_[g].slot_row;
    const auto first = static_cast<std::ptrdiff_t>(items_.size());
    for (std::int32_t key = splits_[g].prefix_end; key < tile.max_bound; key = ChunkEnd(key)) {
      slot_row += tile.rows;
      items_.push_back({.entry = tile.entry,
                        .first_row = tile.first_row,
                        .rows = tile.rows,
                        .key_begin = key,
                        .key_end = std::min(ChunkEnd(key), tile.max_bound),
                        .slot_row = slot_row,
                        .min_bound = tile.min_bound});
    }
    std::reverse(items_.begin() + first, items_.end());  // late chunks are longer
  }
}

Result<std::size_t> Planner::Write(const AttentionStep& step, std::span<std::byte> to) {
  if (step.tokens > max_tokens_) {
    return Status(Reason::kInternal, "cuda_portable: plan of " + std::to_string(step.tokens) +
                                         " tokens, made for " + std::to_string(max_tokens_));
  }
  MakeTiles(step);
  MakeItems();
  AddTails();
  PlanHeader header{.items = static_cast<std::int32_t>(items_.size()),
                    .groups = static_cast<std::int32_t>(groups_.size())};
  const std::size_t groups_at = sizeof(header) + items_.size() * sizeof(PlanItem);
  const std::size_t bounds_at = groups_at + groups_.size() * sizeof(PlanGroup);
  const std::size_t bound_bytes = static_cast<std::size_t>(step.tokens) * sizeof(std::int32_t);
  if (bounds_at + bound_bytes > to.size()) {
    return Status(Reason::kInternal, "cuda_portable: a plan of " +
                                         std::to_string(bounds_at + bound_bytes) +
                                         " bytes does not fit in " + std::to_string(to.size()));
  }
  header.items_offset = sizeof(header);
  header.groups_offset = static_cast<std::int32_t>(groups_at);
  header.bounds_offset = static_cast<std::int32_t>(bounds_at);
  std::memcpy(to.data(), &header, sizeof(header));
  Put(items_, to, sizeof(header));
  Put(groups_, to, groups_at);
  if (step.tokens > 0) std::memcpy(to.data() + bounds_at, step.bound, bound_bytes);
  return bounds_at + bound_bytes;
}

}  // namespace dcp::portable
