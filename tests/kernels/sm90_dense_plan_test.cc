// Plans of sm90_dense cover every row and key once, within their slots, and are balanced.
#include "kernels/backends/sm90_dense_plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <random>
#include <vector>

namespace dcp::sm90 {
namespace {

constexpr int kBlocks = 132;

struct Step {
  std::vector<std::int32_t> entry_begin{0};
  std::vector<std::int32_t> bounds;
  void Add(const std::vector<std::int32_t>& entry) {
    bounds.insert(bounds.end(), entry.begin(), entry.end());
    entry_begin.push_back(static_cast<std::int32_t>(bounds.size()));
  }
  AttentionStep Get() const {
    return {.entry_begin = entry_begin.data(),
            .bound = bounds.data(),
            .entries = static_cast<int>(entry_begin.size()) - 1,
            .tokens = static_cast<int>(bounds.size())};
  }
};

template <class T>
std::vector<T> Read(const std::vector<std::byte>& bytes, std::size_t offset, std::size_t count) {
  std::vector<T> items(count);
  REQUIRE(offset % alignof(T) == 0);
  REQUIRE(offset + count * sizeof(T) <= bytes.size());
  if (count > 0) std::memcpy(items.data(), bytes.data() + offset, count * sizeof(T));
  return items;
}

// Checks the plan and returns the most key blocks of one thread block.
std::int64_t CheckPlan(Planner& planner, const Step& step, int heads) {
  std::vector<std::byte> bytes(planner.MaxBytes());
  const auto used = planner.Write(step.Get(), bytes);
  REQUIRE(used.ok());
  bytes.resize(*used);
  const auto header = Read<PlanHeader>(bytes, 0, 1)[0];
  const auto items = Read<PlanItem>(bytes, sizeof(PlanHeader),
                                    (header.groups_offset - sizeof(PlanHeader)) / sizeof(PlanItem));
  const auto groups = Read<PlanGroup>(bytes, header.groups_offset, header.groups);
  CHECK(Read<std::int32_t>(bytes, header.bounds_offset, step.bounds.size()) == step.bounds);

  std::map<std::int32_t, std::vector<PlanItem>> tiles;  // by first row
  std::int64_t longest = 0;
  std::size_t reached = 0;
  for (int block = 0; block < kBlocks; ++block) {
    std::int64_t key_blocks = 0;
    for (int i = block; i >= 0; i = items[i].next) {
      ++reached;
      if (items[i].rows == 0) break;
      tiles[items[i].first_row].push_back(items[i]);
      key_blocks += (items[i].key_end - items[i].key_begin + kBlockKeys - 1) / kBlockKeys;
    }
    longest = std::max(longest, key_blocks);
  }
  CHECK(reached == items.size());

  std::map<std::int32_t, PlanGroup> split;
  for (const PlanGroup& group : groups) CHECK(split.emplace(group.first_row, group).second);
  std::vector<bool> slot_used(static_cast<std::size_t>(Planner::SlotRows(kBlocks)), false);
  std::int32_t next_row = 0;
  for (auto& [first_row, parts] : tiles) {
    CHECK(first_row == next_row);
    const PlanItem& one = parts[0];
    next_row += one.rows;
    CHECK(one.rows <= kTileRows);
    CHECK(step.entry_begin[one.entry] * heads <= first_row);
    CHECK(next_row <= step.entry_begin[one.entry + 1] * heads);
    std::int32_t most = 0;
    std::int32_t least = 0;
    for (std::int32_t row = first_row; row < next_row; ++row) {
      const std::int32_t bound = step.bounds[row / heads];
      most = std::max(most, bound);
      if (bound > 0 && (least == 0 || bound < least)) least = bound;
    }
    std::sort(parts.begin(), parts.end(),
              [](const PlanItem& a, const PlanItem& b) { return a.slot_row < b.slot_row; });
    std::int32_t key = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      CHECK(parts[i].key_begin == key);
      CHECK((key % kBlockKeys == 0 || key == most));
      CHECK(parts[i].rows == one.rows);
      CHECK(parts[i].min_bound == least);
      key = parts[i].key_end;
      if (parts.size() == 1) {
        CHECK(one.slot_row == -1);
        continue;
      }
      const PlanGroup& group = split.at(first_row);
      CHECK(group.rows == one.rows);
      CHECK(group.items == static_cast<std::int32_t>(parts.size()));
      CHECK(parts[i].slot_row == group.slot_row + static_cast<std::int32_t>(i) * one.rows);
      for (std::int32_t r = 0; r < one.rows; ++r) {
        const auto slot = static_cast<std::size_t>(parts[i].slot_row + r);
        REQUIRE(slot < slot_used.size());
        CHECK_FALSE(slot_used[slot]);
        slot_used[slot] = true;
      }
    }
    CHECK(key == most);
  }
  CHECK(next_row == static_cast<std::int32_t>(step.bounds.size()) * heads);
  return longest;
}

}  // namespace

TEST_CASE("Plans of random steps cover every row and key once") {
  std::mt19937 random(1);
  for (const int heads : {1, 16, 48, 128}) {
    Planner planner(heads, 512, kBlocks);
    for (int round = 0; round < 30; ++round) {
      Step step;
      const int entries = static_cast<int>(random() % 60) + 1;
      const int most_tokens = static_cast<int>(random() % 8) + 1;
      for (int e = 0; e < entries; ++e) {
        std::vector<std::int32_t> entry;
        const auto keys = static_cast<std::int32_t>(random() % (1u << (random() % 18)));
        const int tokens = static_cast<int>(random() % most_tokens) + 1;
        for (int t = 0; t < tokens; ++t) entry.push_back(keys + t / 2);
        step.Add(entry);
      }
      INFO("heads " << heads << ", round " << round);
      CheckPlan(planner, step, heads);
    }
  }
}

TEST_CASE("Equal entries are shared out evenly") {
  for (const int heads : {16, 128}) {
    const int tiles = heads > kTileRows ? 2 : 1;
    for (const int entries : {1, 8, 32, 256}) {
      Planner planner(heads, entries, kBlocks);
      for (const std::int32_t keys : {16384, 131072}) {
        Step step;
        for (int e = 0; e < entries; ++e) step.Add({keys});
        const double even = 1.0 * keys / kBlockKeys * entries * tiles / kBlocks;
        INFO("heads " << heads << ", entries " << entries << ", keys " << keys);
        CHECK(static_cast<double>(CheckPlan(planner, step, heads)) <= even * 1.05 + 8);
      }
    }
  }
}

TEST_CASE("A step that is too large or a place that is too small is refused") {
  Planner planner(16, 2, kBlocks);
  Step step;
  step.Add({5, 5, 5});
  std::vector<std::byte> bytes(planner.MaxBytes());
  CHECK(planner.Write(step.Get(), bytes).status().reason() == Reason::kInternal);
  Step fits;
  fits.Add({5});
  CHECK(planner.Write(fits.Get(), std::span(bytes).first(64)).status().reason() ==
        Reason::kInternal);
}

}  // namespace dcp::sm90
