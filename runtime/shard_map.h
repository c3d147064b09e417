// Which rank owns which token: the only place that knows. Pure functions, usable on a device.
//
// Tokens are dealt to N ranks round-robin in runs of I (the interleave):
//   owner(p) = (p / I) % N          local(p) = (p / (I*N)) * I + p % I
// A block is page_tokens * N consecutive tokens, one page on every rank. Because I divides
// page_tokens, token p of block k lies in local page k on its owner:
//   local(p) / page_tokens == p / (page_tokens * N).
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/strong.h"

namespace dcp {

class ShardMap {
 public:
  DCP_HD constexpr ShardMap(int ranks, int interleave, int page_tokens)
      : ranks_(ranks), interleave_(interleave), page_tokens_(page_tokens) {}

  // OK or CONFIG: ranks >= 1, interleave >= 1 and page_tokens a multiple of it.
  static Status Check(int ranks, int interleave, int page_tokens) {
    if (ranks < 1) {
      return Status(Reason::kConfig,
                    "ranks.count = " + std::to_string(ranks) + ", expected at least 1");
    }
    if (interleave < 1 || page_tokens < 1 || page_tokens % interleave != 0) {
      return Status(Reason::kConfig, "kv.interleave = " + std::to_string(interleave) +
                                         " must be at least 1 and divide kv.page_tokens = " +
                                         std::to_string(page_tokens));
    }
    return Status::Ok();
  }

  DCP_HD constexpr int ranks() const { return ranks_; }
  DCP_HD constexpr int page_tokens() const { return page_tokens_; }
  DCP_HD constexpr std::int64_t block_tokens() const {
    return static_cast<std::int64_t>(page_tokens_) * ranks_;
  }

  DCP_HD constexpr Rank Owner(GlobalPos p) const {
    return Rank(static_cast<std::int32_t>(p.value() / interleave_ % ranks_));
  }
  DCP_HD constexpr LocalPos Local(GlobalPos p) const {
    return LocalPos(p.value() / Round() * interleave_ + p.value() % interleave_);
  }
  DCP_HD constexpr GlobalPos Global(Rank r, LocalPos local) const {
    return GlobalPos(local.value() / interleave_ * Round() +
                     static_cast<std::int64_t>(r.value()) * interleave_ +
                     local.value() % interleave_);
  }

  // How many of the first `length` tokens rank r owns.
  DCP_HD constexpr Tokens LocalLength(Tokens length, Rank r) const {
    const std::int64_t rest =
        length.value() % Round() - static_cast<std::int64_t>(r.value()) * interleave_;
    const std::int64_t part = rest < 0 ? 0 : (rest > interleave_ ? interleave_ : rest);
    return Tokens(length.value() / Round() * interleave_ + part);
  }

  // Local keys that query token j of an entry starting at `start` sees on rank r: those of the
  // tokens [0, start + j]. Never LocalLength(L) - k: a rank owns only some of the last k tokens.
  DCP_HD constexpr Tokens CausalBound(GlobalPos start, std::int64_t j, Rank r) const {
    return LocalLength(Tokens(start.value() + j + 1), r);
  }

  DCP_HD constexpr std::int64_t Block(GlobalPos p) const { return p.value() / block_tokens(); }
  DCP_HD constexpr std::int64_t SlotInPage(GlobalPos p) const {
    return Local(p).value() % page_tokens_;
  }
  // Blocks that the first `length` tokens reach into.
  DCP_HD constexpr std::int64_t Blocks(Tokens length) const {
    return (length.value() + block_tokens() - 1) / block_tokens();
  }

 private:
  // Tokens after which ownership repeats.
  DCP_HD constexpr std::int64_t Round() const {
    return static_cast<std::int64_t>(interleave_) * ranks_;
  }
  std::int32_t ranks_;
  std::int32_t interleave_;
  std::int32_t page_tokens_;
};

}  // namespace dcp
