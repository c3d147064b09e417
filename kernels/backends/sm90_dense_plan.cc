#include "kernels/backends/sm90_dense_plan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dcp::sm90 {
namespace {

// What an item costs beside its keys, in key blocks: query, first keys, results.
constexpr std::int32_t kItemCost = 3;
// Items shorter than this cost almost as much as this.
constexpr std::int32_t kMinItemBlocks = 2;
// What it costs a step that its tiles are split at all: the second kernel reads their results.
constexpr std::int64_t kSplitCost = 4;
constexpr int kMaxTeam = 4;

std::int32_t CeilDiv(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>((a + b - 1) / b);
}

template <class T>
void Put(const std::vector<T>& items, std::span<std::byte> to, std::size_t at) {
  if (!items.empty()) std::memcpy(to.data() + at, items.data(), items.size() * sizeof(T));
}

}  // namespace

Planner::Planner(int heads, int max_tokens, int blocks)
    : heads_(heads),
      max_tokens_(max_tokens),
      blocks_(blocks),
      last_item_(static_cast<std::size_t>(blocks)) {
  loads_.reserve(static_cast<std::size_t>(blocks));
  const auto tokens = static_cast<std::size_t>(max_tokens);
  const auto tiles = tokens * static_cast<std::size_t>(CeilDiv(heads, kTileRows));
  const auto teams = static_cast<std::size_t>(blocks);
  units_.reserve(tiles);
  shares_.reserve(tiles + teams);
  items_.reserve(tiles + 2 * teams);
  groups_.reserve(teams);
}

std::size_t Planner::MaxBytes() const {
  return sizeof(PlanHeader) + items_.capacity() * sizeof(PlanItem) +
         groups_.capacity() * sizeof(PlanGroup) +
         static_cast<std::size_t>(max_tokens_) * sizeof(std::int32_t);
}

void Planner::MakeUnits(const AttentionStep& step) {
  int most_tiles = 1;
  for (int e = 0; e < step.entries; ++e) {
    const int tokens = step.entry_begin[e + 1] - step.entry_begin[e];
    most_tiles = std::max(most_tiles, CeilDiv(std::int64_t{tokens} * heads_, kTileRows));
  }
  team_ = most_tiles <= kMaxTeam ? most_tiles : 2;
  team_ = std::min(team_, blocks_);
  units_.clear();
  for (int e = 0; e < step.entries; ++e) {
    const std::int32_t end = step.entry_begin[e + 1] * heads_;
    std::int32_t row = step.entry_begin[e] * heads_;
    while (row < end) {
      const std::int32_t rows = std::min(team_ * kTileRows, end - row);
      std::int32_t most = 0;
      for (std::int32_t t = row / heads_; t <= (row + rows - 1) / heads_; ++t) {
        most = std::max(most, step.bound[t]);
      }
      units_.push_back(
          {.entry = e, .first_row = row, .rows = rows, .key_blocks = CeilDiv(most, kBlockKeys)});
      row += rows;
    }
  }
}

std::int64_t Planner::ShareOutWhole() {
  const int teams = blocks_ / team_;
  const auto more = [](const Load& a, const Load& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.team > b.team;
  };
  loads_.clear();
  for (int team = 0; team < teams; ++team) loads_.push_back({.cost = 0, .team = team});
  std::int64_t most = 0;
  shares_.clear();
  for (std::size_t u = 0; u < units_.size(); ++u) {
    std::pop_heap(loads_.begin(), loads_.end(), more);
    Load& least = loads_.back();
    shares_.push_back({.unit = static_cast<std::int32_t>(u),
                       .team = least.team,
                       .begin = 0,
                       .end = units_[u].key_blocks});
    least.cost += units_[u].key_blocks + kItemCost;
    most = std::max(most, least.cost);
    std::push_heap(loads_.begin(), loads_.end(), more);
  }
  return most;
}

void Planner::ShareOut() {
  const int teams = blocks_ / team_;
  std::int64_t total = 0;
  for (const Unit& unit : units_) total += unit.key_blocks + kItemCost;
  const std::int32_t share = std::max(CeilDiv(total, teams), kMinItemBlocks) + kItemCost;
  if (ShareOutWhole() > share + kSplitCost) ShareOutSplit(share);
}

// Team after team takes key blocks of the units, in their order, until it has its share of the
// step. So every team but one ends inside at most one unit.
void Planner::ShareOutSplit(std::int32_t share) {
  const int teams = blocks_ / team_;
  shares_.clear();
  int team = 0;
  std::int32_t left = share;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const std::int32_t all = units_[u].key_blocks;
    std::int32_t begin = 0;
    do {
      const std::int32_t rest = all - begin;
      std::int32_t take = rest;
      const bool last_team = team == teams - 1;
      if (!last_team && rest + kItemCost > left) {
        // Both parts of a split are worth an item of their own, or the whole rest moves on.
        take = std::min(left - kItemCost, rest - kMinItemBlocks);
        if (take < kMinItemBlocks) take = left < share ? 0 : rest;
      }
      if (take > 0 || rest == 0) {
        shares_.push_back({.unit = static_cast<std::int32_t>(u),
                           .team = team,
                           .begin = begin,
                           .end = begin + take});
        begin += take;
        left -= take + kItemCost;
      }
      if (!last_team && (begin < all || left <= kItemCost)) {
        ++team;
        left = share;
      }
    } while (begin < all);
  }
}

Planner::Tile Planner::TileOf(const AttentionStep& step, const Unit& unit, int member) const {
  const std::int32_t offset = member * kTileRows;
  Tile tile{.first_row = unit.first_row + offset,
            .rows = std::clamp(unit.rows - offset, 0, kTileRows)};
  if (tile.rows == 0) return tile;
  for (std::int32_t t = tile.first_row / heads_; t <= (tile.first_row + tile.rows - 1) / heads_;
       ++t) {
    const std::int32_t bound = step.bound[t];
    tile.max_bound = std::max(tile.max_bound, bound);
    if (bound > 0 && (tile.min_bound == 0 || bound < tile.min_bound)) tile.min_bound = bound;
  }
  return tile;
}

void Planner::Append(int block, const PlanItem& item) {
  const auto b = static_cast<std::size_t>(block);
  if (items_[b].rows == 0) {
    items_[b] = item;
    return;
  }
  const auto at = static_cast<std::int32_t>(items_.size());
  items_[static_cast<std::size_t>(last_item_[b])].next = at;
  last_item_[b] = at;
  items_.push_back(item);
}

void Planner::MakeItems(const AttentionStep& step) {
  items_.assign(static_cast<std::size_t>(blocks_), {.next = -1});
  for (int b = 0; b < blocks_; ++b) last_item_[static_cast<std::size_t>(b)] = b;
  groups_.clear();
  std::int32_t slot_row = 0;
  for (std::size_t first = 0; first < shares_.size();) {
    std::size_t last = first;
    while (last + 1 < shares_.size() && shares_[last + 1].unit == shares_[first].unit) ++last;
    const Unit& unit = units_[static_cast<std::size_t>(shares_[first].unit)];
    const auto parts = static_cast<std::int32_t>(last - first + 1);
    for (int member = 0; member < team_; ++member) {
      const Tile tile = TileOf(step, unit, member);
      if (tile.rows == 0) continue;
      if (parts > 1) groups_.push_back({tile.first_row, tile.rows, slot_row, parts});
      for (std::size_t s = first; s <= last; ++s) {
        const std::int32_t begin = shares_[s].begin * kBlockKeys;
        Append(shares_[s].team * team_ + member,
               {.entry = unit.entry,
                .first_row = tile.first_row,
                .rows = tile.rows,
                .key_begin = std::min(begin, tile.max_bound),
                .key_end = std::min(shares_[s].end * kBlockKeys, tile.max_bound),
                .min_bound = tile.min_bound,
                .slot_row = parts > 1 ? slot_row : -1,
                .next = -1});
        if (parts > 1) slot_row += tile.rows;
      }
    }
    first = last + 1;
  }
}

Result<std::size_t> Planner::Write(const AttentionStep& step, std::span<std::byte> to) {
  if (step.tokens > max_tokens_) {
    return Status(Reason::kInternal, "sm90_dense: plan of " + std::to_string(step.tokens) +
                                         " tokens, made for " + std::to_string(max_tokens_));
  }
  MakeUnits(step);
  ShareOut();
  MakeItems(step);
  const std::size_t items_at = sizeof(PlanHeader);
  const std::size_t groups_at = items_at + items_.size() * sizeof(PlanItem);
  const std::size_t bounds_at = groups_at + groups_.size() * sizeof(PlanGroup);
  const std::size_t bound_bytes = static_cast<std::size_t>(step.tokens) * sizeof(std::int32_t);
  const std::size_t bytes = bounds_at + bound_bytes;
  if (bytes > to.size()) {
    return Status(Reason::kInternal, "sm90_dense: a plan of " + std::to_string(bytes) +
                                         " bytes does not fit in " + std::to_string(to.size()));
  }
  const PlanHeader header{.groups = static_cast<std::int32_t>(groups_.size()),
                          .groups_offset = static_cast<std::int32_t>(groups_at),
                          .bounds_offset = static_cast<std::int32_t>(bounds_at),
                          .unused = 0};
  std::memcpy(to.data(), &header, sizeof(header));
  Put(items_, to, items_at);
  Put(groups_, to, groups_at);
  if (step.tokens > 0) std::memcpy(to.data() + bounds_at, step.bound, bound_bytes);
  return bytes;
}

}  // namespace dcp::sm90
