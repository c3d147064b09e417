// The pages of all ranks, as virtual blocks: block b is page b on every rank. Reference counts let
// sequences share blocks. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <vector>

namespace dcp {

using BlockId = std::int32_t;

class BlockPool {
 public:
  explicit BlockPool(std::int64_t blocks);

  std::int64_t total() const { return static_cast<std::int64_t>(refs_.size()); }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }
  int refs(BlockId b) const { return refs_[static_cast<std::size_t>(b)]; }

  BlockId Take();         // one reference; precondition: free() > 0
  void Ref(BlockId b);    // precondition: refs(b) > 0
  void Unref(BlockId b);  // frees at 0; precondition: refs(b) > 0

 private:
  std::vector<std::int32_t> refs_;
  std::vector<BlockId> free_;  // a stack: what was freed last is warm
};

}  // namespace dcp
