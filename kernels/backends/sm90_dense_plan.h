// Who computes what in a step of sm90_dense: plain data, made on the host, read by the kernels.
//
// The rows (token, head) of an entry form tiles of up to kTileRows, and its keys form blocks of
// kBlockKeys. Every thread block has a list of items: ranges of key blocks of one tile. Lists are
// balanced, so where a tile is split depends on the whole step. A tile of several items leaves
// their results in slots, one slot row for each of its rows and items, and the second kernel adds
// them in key order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/attention_backend.h"

namespace dcp::sm90 {

inline constexpr int kTileRows = 64;
inline constexpr int kBlockKeys = 64;

struct PlanItem {
  std::int32_t entry;
  std::int32_t first_row;  // token * heads + head, in the step; the tile's rows follow each other
  std::int32_t rows;       // 0: no item
  std::int32_t key_begin;  // a block border
  std::int32_t key_end;    // a block border or the tile's largest bound
  std::int32_t min_bound;  // smallest bound of the tile's rows that see a key
  std::int32_t slot_row;   // where the result of row 0 goes; -1: the whole tile, to the output
  std::int32_t next;       // the same thread block's next item; -1: none
};

struct PlanGroup {  // of items that form one tile
  std::int32_t first_row;
  std::int32_t rows;
  std::int32_t slot_row;  // item i, row r: slot_row + i * rows + r
  std::int32_t items;
};

// At the start of the plan. The items follow: first one for each thread block, where its list
// begins, so that a block finds it without reading anything else.
struct PlanHeader {
  std::int32_t groups;
  std::int32_t groups_offset;  // PlanGroup[groups]; in bytes from the plan's start
  std::int32_t bounds_offset;  // int32[tokens]
  std::int32_t unused;
};
static_assert(sizeof(PlanItem) == 32 && sizeof(PlanGroup) == 16 && sizeof(PlanHeader) == 16);

// One caller at a time; allocates when made only.
class Planner {
 public:
  // For `blocks` thread blocks, one on each multiprocessor.
  Planner(int heads, int max_tokens, int blocks);

  // Slot rows that any plan uses at most.
  static std::int64_t SlotRows(int blocks) { return std::int64_t{2} * blocks * kTileRows; }

  std::size_t MaxBytes() const;
  // Writes the plan to the start of `to`, which is aligned to 16. Returns the bytes used.
  // Errors: INTERNAL if the step is larger than the planner was made for or `to` is too small.
  Result<std::size_t> Write(const AttentionStep& step, std::span<std::byte> to);

 private:
  // Up to `team_` tiles of one entry, whose items of the same keys run at the same time on
  // neighbouring thread blocks, so that the keys come from memory once.
  struct Unit {
    std::int32_t entry;
    std::int32_t first_row;
    std::int32_t rows;
    std::int32_t key_blocks;
  };
  struct Tile {
    std::int32_t first_row;
    std::int32_t rows;
    std::int32_t min_bound;
    std::int32_t max_bound;
  };
  // Key blocks of a unit for one team.
  struct Share {
    std::int32_t unit;
    std::int32_t team;
    std::int32_t begin;
    std::int32_t end;
  };

  void MakeUnits(const AttentionStep& step);
  // Whole units to teams; returns the cost of the team with the most work.
  std::int64_t ShareOutWhole();
  void ShareOutSplit(std::int32_t share);
  void ShareOut();
  void MakeItems(const AttentionStep& step);
  Tile TileOf(const AttentionStep& step, const Unit& unit, int member) const;
  void Append(int block, const PlanItem& item);

  const int heads_;
  const int max_tokens_;
  const int blocks_;
  int team_ = 1;
  std::vector<Unit> units_;
  std::vector<Share> shares_;
  std::vector<PlanItem> items_;
  std::vector<std::int32_t> last_item_;  // of each thread block
  struct Load {
    std::int64_t cost;
    std::int32_t team;
  };
  std::vector<Load> loads_;
  std::vector<PlanGroup> groups_;
};

}  // namespace dcp::sm90
