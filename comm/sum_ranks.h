// The device arithmetic of a reduce-scatter.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/stream.h"
#include "base/tensor.h"

namespace dcp {

inline constexpr int kMaxSumRanks = 64;

struct SumRanksArgs {
  const void* in[kMaxSumRanks];  // [ranks][elements] bf16 | f32, device memory reachable from here
  int ranks = 0;
  void* out = nullptr;  // [elements]
  std::size_t elements = 0;
  DType dtype = DType::kBf16;
};

// out = sum over ranks, accumulated in f32 in rank order and rounded once. Enqueued on `stream`.
Status SumRanks(const SumRanksArgs& args, StreamRef stream);

}  // namespace dcp
