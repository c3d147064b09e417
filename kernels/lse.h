// The log-sum-exp of an attention row, with its base in the type.
//
// LSE_B(row) = log_B(sum over visible keys of exp(softmax_scale * q.k)). Producers differ in B and
// in what they write for a row with no keys (FlashMLA: base e, +inf; FlashInfer: base 2, -inf), and
// reading one as the other changes results with no error. So a value of one base cannot be used as
// the other without LseCast, and no code decides emptiness by looking at the bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/strong.h"

namespace dcp {

enum class LogBase : std::uint8_t { kE, kTwo };
enum class EmptyMark : std::uint8_t { kNegInf, kPosInf };  // what a backend writes for no keys

constexpr std::string_view LogBaseName(LogBase b) { return b == LogBase::kE ? "e" : "2"; }
constexpr std::string_view EmptyMarkName(EmptyMark m) {
  return m == EmptyMark::kNegInf ? "-inf" : "+inf";
}
constexpr float EmptyMarkValue(EmptyMark m) {
  return m == EmptyMark::kNegInf ? -INFINITY : INFINITY;
}

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

// Same four bytes as float. No arithmetic: values of two bases never meet by accident.
template <LogBase B>
struct Lse {
  float raw;
};
static_assert(sizeof(Lse<LogBase::kE>) == sizeof(float));
static_assert(std::is_trivially_copyable_v<Lse<LogBase::kE>>);

template <LogBase To, LogBase From>
DCP_HD constexpr Lse<To> LseCast(Lse<From> x) {
  if constexpr (To == From) {
    return x;
  } else if constexpr (To == LogBase::kTwo) {
    return {static_cast<float>(x.raw * kLog2E)};
  } else {
    return {static_cast<float>(x.raw * kLn2)};
  }
}

// Calls f(std::integral_constant<LogBase, b>): the one place where a declared base becomes a
// compile-time constant.
template <class F>
constexpr decltype(auto) WithLogBase(LogBase b, F&& f) {
  return b == LogBase::kE ? f(std::integral_constant<LogBase, LogBase::kE>{})
                          : f(std::integral_constant<LogBase, LogBase::kTwo>{});
}

}  // namespace dcp
