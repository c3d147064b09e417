// Who computes what in a step of cuda_portable: plain data, made on the host, read by the kernels.
//
// The rows (token, head) of an entry form tiles of up to kTileRows; the keys form chunks whose
// borders depend on nothing but the key index. A row's result is by definition the fold, in order,
// of its chunks' results, so it has the same bits however chunks were shared out. An item is a
// range of chunks of one tile for one thread block: the first chunks of a tile, folded by the block
// itself, or one later chunk. A tile that is not one item leaves its items' results in slots, one
// slot row for each of its rows and items, and the second kernel folds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/strong.h"
#include "kernels/attention_backend.h"

namespace dcp::portable {

inline constexpr int kTileRows = 64;
inline constexpr int kTileKeys = 32;  // keys in shared memory at a time; divides every chunk
inline constexpr int kMinChunkKeys = 256;

// The chunk that begins at `begin` (a chunk border) ends here. 256 keys up to 16 k, then doubling
// with the position: a chunk is a small part of all keys before it, and a million keys are 256
// chunks.
DCP_HD constexpr std::int32_t ChunkEnd(std::int32_t begin) {
  std::int32_t keys = kMinChunkKeys;
  while (keys <= begin / 64) keys *= 2;
  return begin + keys;
}

struct PlanItem {
  std::int32_t entry;
  std::int32_t first_row;  // token * heads + head, in the step; the tile's rows follow each other
  std::int32_t rows;
  std::int32_t key_begin;  // a chunk border
  std::int32_t key_end;    // a chunk border or the tile's largest bound
  std::int32_t slot_row;   // where the result of row 0 goes; -1: the whole tile, to the output
  std::int32_t min_bound;  // smallest bound of the tile's rows that see a key
  std::int32_t unused;
};

struct PlanGroup {  // of items that form one tile
  std::int32_t first_row;
  std::int32_t rows;
  std::int32_t slot_row;  // item i, row r: slot_row + i * rows + r
  std::int32_t items;
};

// At the start of the plan; offsets in bytes from there.
struct PlanHeader {
  std::int32_t items;
  std::int32_t groups;
  std::int32_t items_offset;   // PlanItem[items], longest first
  std::int32_t groups_offset;  // PlanGroup[groups]
  std::int32_t bounds_offset;  // int32[tokens]
  std::int32_t unused[3];
};
static_assert(sizeof(PlanItem) % 16 == 0 && sizeof(PlanGroup) % 16 == 0);
static_assert(sizeof(PlanHeader) % 16 == 0);

// One caller at a time; allocates when made only.
class Planner {
 public:
  // For `blocks` thread blocks and `slot_rows` slot rows.
  Planner(int heads, int max_tokens, int blocks, std::int64_t slot_rows);

  std::size_t MaxBytes() const;
  // Writes the plan to the start of `to`, which is aligned to 16. Returns the bytes used.
  // Errors: INTERNAL if the step is larger than the planner was made for or `to` is too small.
  Result<std::size_t> Write(const AttentionStep& step, std::span<std::byte> to);

 private:
  struct Tile {
    std::int32_t entry;
    std::int32_t first_row;
    std::int32_t rows;
    std::int32_t min_bound;
    std::int32_t max_bound;
  };
  void MakeTiles(const AttentionStep& step);
  void MakeItems();
  void AddTails();

  const int heads_;
  const int max_tokens_;
  const int blocks_;
  const std::int64_t slot_rows_;
  const std::size_t max_tails_;
  std::vector<Tile> tiles_;
  std::vector<PlanItem> items_;
  std::vector<PlanGroup> groups_;
  struct Split {
    std::int32_t tile;
    std::int32_t prefix_end;
  };
  std::vector<Split> splits_;  // of groups_
};

// Slot rows worth having for steps of up to max_tokens * heads rows and max_keys keys, within
// `bytes`.
std::int64_t SlotRows(std::int64_t rows, std::int64_t max_keys, int d_v, std::size_t bytes);

}  // namespace dcp::portable
