// Integers that carry their unit in the type: explicit in, explicit out. `Tokens + Pages` and a
// GlobalPos passed as a LocalPos do not compile.
#pragma once

#include <compare>
#include <cstdint>

#if defined(__CUDACC__)
#define DCP_HD __host__ __device__
#else
#define DCP_HD
#endif

namespace dcp {

template <class Rep, class Tag>
class Strong {
 public:
  Strong() = default;
  DCP_HD constexpr explicit Strong(Rep value) : value_(value) {}
  DCP_HD constexpr Rep value() const { return value_; }
  friend DCP_HD constexpr Strong operator+(Strong a, Strong b) {
    return Strong(a.value_ + b.value_);
  }
  friend DCP_HD constexpr Strong operator-(Strong a, Strong b) {
    return Strong(a.value_ - b.value_);
  }
  friend constexpr auto operator<=>(Strong, Strong) = default;

 private:
  Rep value_{};
};

using Tokens = Strong<std::int64_t, struct TokensTag>;        // a count of tokens
using Pages = Strong<std::int64_t, struct PagesTag>;          // a count of pages (blocks)
using Rank = Strong<std::int32_t, struct RankTag>;            // index of a rank in its group
using GlobalPos = Strong<std::int64_t, struct GlobalPosTag>;  // token position in its sequence
using LocalPos = Strong<std::int64_t, struct LocalPosTag>;    // token position in a rank's shard

}  // namespace dcp
