// Plans of cuda_portable cover every row and key once, in fixed chunks, within their slots.
#include "kernels/backends/cuda_portable_plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace dcp::portable {
namespace {

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

struct Plan {
  std::vector<PlanItem> items;
  std::vector<PlanGroup> groups;
  std::vector<std::int32_t> bounds;
};

template <class T>
std::vector<T> Read(const std::vector<std::byte>& bytes, std::int32_t offset, std::size_t count) {
  CHECK(offset % alignof(T) == 0);
  std::vector<T> items(count);
  REQUIRE(offset + count * sizeof(T) <= bytes.size());
  if (count > 0) std::memcpy(items.data(), bytes.data() + offset, count * sizeof(T));
  return items;
}

Plan Write(Planner& planner, const Step& step) {
  std::vector<std::byte> bytes(planner.MaxBytes());
  const auto used = planner.Write(step.Get(), bytes);
  REQUIRE(used.ok());
  bytes.resize(*used);
  const PlanHeader header = Read<PlanHeader>(bytes, 0, 1)[0];
  return {Read<PlanItem>(bytes, header.items_offset, header.items),
          Read<PlanGroup>(bytes, header.groups_offset, header.groups),
          Read<std::int32_t>(bytes, header.bounds_offset, step.bounds.size())};
}

bool IsBorder(std::int32_t key) {
  std::int32_t border = 0;
  while (border < key) border = ChunkEnd(border);
  return border == key;
}

void CheckPlan(const Plan& plan, const Step& step, int heads, std::int64_t slot_rows) {
  CHECK(plan.bounds == step.bounds);
  std::map<std::int32_t, std::vector<PlanItem>> tiles;  // by first row
  for (const PlanItem& item : plan.items) tiles[item.first_row].push_back(item);
  std::map<std::int32_t, PlanGroup> groups;
  for (const PlanGroup& group : plan.groups) CHECK(groups.emplace(group.first_row, group).second);

  std::vector<bool> slot_used(static_cast<std::size_t>(slot_rows), false);
  std::int32_t next_row = 0;
  for (auto& [first_row, items] : tiles) {
    CHECK(first_row == next_row);
    const int rows = items[0].rows;
    next_row += rows;
    CHECK((rows >= 1 && rows <= kTileRows));
    const int entry = items[0].entry;
    CHECK(first_row >= step.entry_begin[entry] * heads);
    CHECK(next_row <= step.entry_begin[entry + 1] * heads);
    std::int32_t max_bound = 0;
    std::int32_t min_bound = 0;
    for (std::int32_t row = first_row; row < next_row; ++row) {
      const std::int32_t bound = step.bounds[row / heads];
      max_bound = std::max(max_bound, bound);
      if (bound > 0) min_bound = min_bound == 0 ? bound : std::min(min_bound, bound);
    }
    std::sort(items.begin(), items.end(),
              [](const PlanItem& a, const PlanItem& b) { return a.key_begin < b.key_begin; });
    const auto group = groups.find(first_row);
    CHECK((items.size() > 1) == (group != groups.end()));
    std::int32_t key = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const PlanItem& item = items[i];
      CHECK((item.rows == rows && item.entry == entry && item.min_bound == min_bound));
      CHECK(item.key_begin == key);
      CHECK(IsBorder(item.key_begin));
      if (i > 0) CHECK(item.key_end == std::min(ChunkEnd(key), max_bound));
      key = item.key_end;
      if (items.size() == 1) {
        CHECK(item.slot_row == -1);
        continue;
      }
      CHECK(IsBorder(i + 1 < items.size() ? key : item.key_begin));
      CHECK(item.slot_row == group->second.slot_row + static_cast<int>(i) * rows);
      REQUIRE((item.slot_row >= 0 && item.slot_row + rows <= slot_rows));
      for (int r = 0; r < rows; ++r) {
        CHECK_FALSE(slot_used[item.slot_row + r]);
        slot_used[item.slot_row + r] = true;
      }
    }
    CHECK(key == max_bound);
    if (group != groups.end()) {
      CHECK(group->second.rows == rows);
      CHECK(group->second.items == static_cast<int>(items.size()));
      groups.erase(group);
    }
  }
  CHECK(next_row == static_cast<std::int32_t>(step.bounds.size()) * heads);
  CHECK(groups.empty());
}

}  // namespace

TEST_CASE("Chunk borders are multiples of a tile and grow with the position") {
  std::int32_t border = 0;
  int chunks = 0;
  while (border < 1 << 20) {
    const std::int32_t end = ChunkEnd(border);
    CHECK(end > border);
    CHECK((end - border) % kTileKeys == 0);
    CHECK(end - border <= std::max(kMinChunkKeys, border / 32));
    border = end;
    ++chunks;
  }
  CHECK(border == 1 << 20);
  CHECK(chunks == 256);
}

TEST_CASE("Plans cover every row and key once") {
  std::mt19937 random(3);
  for (const int heads : {1, 5, 16, 64, 100, 128}) {
    for (const std::int64_t slot_rows : {0, 100, 3000, 200'000}) {
      for (int round = 0; round < 20; ++round) {
        const int max_tokens = 64;
        Planner planner(heads, max_tokens, 132, slot_rows);
        Step step;
        const int entries = 1 + static_cast<int>(random() % 16);
        const int longest = round % 4 == 0 ? 100'000 : 3000;
        for (int e = 0; e < entries; ++e) {
          std::vector<std::int32_t> entry(1 + random() % 4);
          const auto bound = static_cast<std::int32_t>(random() % longest);
          for (std::int32_t& b : entry) {
            b = random() % 5 == 0 ? 0 : bound + static_cast<std::int32_t>(random() % 3);
          }
          step.Add(entry);
        }
        INFO(heads << " heads, " << slot_rows << " slot rows, round " << round);
        CheckPlan(Write(planner, step), step, heads, slot_rows);
      }
    }
  }
}

TEST_CASE("Long tiles are split so that no block has much more than its share") {
  Step one;
  one.Add({16384});
  Planner planner(128, 64, 132, 100'000);
  const Plan plan = Write(planner, one);
  CHECK(plan.items.size() == 2 * 64);
  CHECK(plan.groups.size() == 2);

  Step many;  // more tiles than blocks, all alike: nothing to gain
  for (int e = 0; e < 64; ++e) many.Add({4096, 4097, 4098, 4099});
  Planner wide(128, 256, 132, 100'000);
  CHECK(Write(wide, many).groups.empty());
}

TEST_CASE("A plan that does not fit is refused") {
  Planner planner(16, 4, 8, 1000);
  Step step;
  step.Add({100, 101});
  std::vector<std::byte> small(48);
  CHECK(planner.Write(step.Get(), small).status().reason() == Reason::kInternal);
  step.Add({1, 2, 3});
  std::vector<std::byte> large(1 << 16);
  CHECK(planner.Write(step.Get(), large).status().reason() == Reason::kInternal);
}

TEST_CASE("Slot rows follow the largest step and stay within the budget") {
  CHECK(SlotRows(128, 16384, 512, std::size_t{1} << 30) == 128 * 64);
  CHECK(SlotRows(128, 0, 512, std::size_t{1} << 30) == 128);
  CHECK(SlotRows(128 * 256, 1 << 20, 512, std::size_t{1} << 20) == (1 << 20) / (514 * 4));
}

}  // namespace dcp::portable
