// Byte layout of the exchange's messages, the same on hosts and devices.
//   a2a    to each rank: [tokens, heads / N, d_v] partials, [tokens, heads / N] LSE, each padded to
//          16 bytes
//   ag_rs  partials [N groups][tokens, heads / N, d_v]; LSE [N groups][tokens, heads / N]
#pragma once

#include <cstddef>

#include "base/tensor.h"

namespace dcp {

struct ExchangeShape {
  int ranks = 0;
  int heads = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  int heads_per_rank() const { return heads / ranks; }

  // Of one rank's heads.
  std::size_t PartialBytes(int tokens) const { return Rows(tokens) * d_v * SizeOf(partial_dtype); }
  std::size_t LseBytes(int tokens) const { return Rows(tokens) * sizeof(float); }
  // In a message of a2a.
  std::size_t LseOffset(int tokens) const { return Padded(PartialBytes(tokens)); }
  std::size_t MessageBytes(int tokens) const {
    return LseOffset(tokens) + Padded(LseBytes(tokens));
  }

 private:
  static std::size_t Padded(std::size_t bytes) { return (bytes + 15) & ~std::size_t{15}; }
  std::size_t Rows(int tokens) const {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads_per_rank());
  }
};

}  // namespace dcp
