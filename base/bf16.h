// bfloat16: the upper half of an IEEE float. Conversion rounds to nearest even and keeps NaN a NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "base/strong.h"

namespace dcp {

struct Bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(Bf16, Bf16) = default;
};
static_assert(sizeof(Bf16) == 2);

DCP_HD constexpr float ToFloat(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

DCP_HD constexpr Bf16 ToBf16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline constexpr Bf16 kBf16NaN{0x7fc1};

}  // namespace dcp
