// Output rows of sm90_dense, as both of its kernels write them.
#pragma once

#include <cstdint>

#include "kernels/backends/sm90_dense_kernels.h"
#include "kernels/backends/sm90_dense_plan.h"
#include "kernels/device/mma.cuh"

namespace dcp::sm90 {

// Where row token * heads + head goes.
struct RowTarget {
  std::byte* out;
  float* lse;
};
__device__ __forceinline__ RowTarget Target(const Params& p, int row) {
  const int token = row / p.heads;
  const int head = row % p.heads;
  const int group = head / p.partial.heads_per_group;
  const std::int64_t in_group =
      std::int64_t{token} * p.partial.heads_per_group + head % p.partial.heads_per_group;
  const int item_bytes = p.partial_dtype == DType::kBf16 ? 2 : 4;
  return {p.partial.out + group * p.partial.out_group_stride + in_group * kDv * item_bytes,
          reinterpret_cast<float*>(p.partial.lse + group * p.partial.lse_group_stride) + in_group};
}

// Scores are compared with this instead of a maximum of -inf, which has no difference to itself.
__device__ __forceinline__ float Reference(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of what was summed with the maximum `from`, once it is `to`.
__device__ __forceinline__ float Rescale(float from, float to) {
  const float factor = Exp2(from - to);  // not in a branch
  return from == to ? 1.0f : factor;
}

}  // namespace dcp::sm90
