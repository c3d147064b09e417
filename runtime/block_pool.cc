#include "runtime/block_pool.h"

#include "base/check.h"

namespace dcp {

BlockPool::BlockPool(std::int64_t blocks) : refs_(static_cast<std::size_t>(blocks), 0) {
  free_.reserve(refs_.size());
  for (std::int64_t b = blocks; b-- > 0;) free_.push_back(static_cast<BlockId>(b));
}

BlockId BlockPool::Take() {
  DCP_CHECK(!free_.empty());
  const BlockId b = free_.back();
  free_.pop_back();
  refs_[static_cast<std::size_t>(b)] = 1;
  return b;
}

void BlockPool::Ref(BlockId b) {
  DCP_CHECK(refs(b) > 0);
  ++refs_[static_cast<std::size_t>(b)];
}

void BlockPool::Unref(BlockId b) {
  DCP_CHECK(refs(b) > 0);
  if (--refs_[static_cast<std::size_t>(b)] == 0) free_.push_back(b);
}

}  // namespace dcp
