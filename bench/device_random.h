// Pseudo-random bf16 values by index: filled in on a device, recomputed on the host where needed.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "base/strong.h"

namespace dcp::bench {

// Evenly distributed with variance 1. Any mixing of the bits will do that tells neighbours apart.
DCP_HD inline Bf16 RandomAt(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = index + seed * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
  const auto bits = static_cast<std::int32_t>(static_cast<std::uint32_t>(x >> 32));
  return ToBf16(static_cast<float>(bits) * (1.7320508f * 0x1p-31f));
}

// to[i] = RandomAt(seed, i), i < count; `to` is device memory.
Status FillRandom(Bf16* to, std::int64_t count, std::uint64_t seed, StreamRef stream);

}  // namespace dcp::bench
