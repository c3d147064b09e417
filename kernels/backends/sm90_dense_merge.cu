// Adds up the items of split tiles, in key order. A thread has four columns of a row, so 128
// threads make a row. Of tiles of few items a thread block takes four rows at a time; of others one
// row, whose items it shares out in four runs that are added in order at the end.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "base/cuda.h"
#include "kernels/backends/sm90_dense_kernels.h"
#include "kernels/backends/sm90_dense_plan.h"
#include "kernels/backends/sm90_dense_rows.cuh"
#include "kernels/device/warpgroup.cuh"

namespace dcp::sm90 {
namespace {

constexpr int kRowThreads = kDv / 4;
constexpr int kRuns = 4;
constexpr int kThreads = kRuns * kRowThreads;
constexpr int kBlocksOnMultiprocessor = 2;
constexpr int kFewItems = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

struct RowSum {
  float4 values;
  float weights;
};

__device__ __forceinline__ void Add(RowSum& to, const float4& x, float sum, float weight) {
  to.values.x = __fmaf_rn(x.x, weight, to.values.x);
  to.values.y = __fmaf_rn(x.y, weight, to.values.y);
  to.values.z = __fmaf_rn(x.z, weight, to.values.z);
  to.values.w = __fmaf_rn(x.w, weight, to.values.w);
  to.weights = __fmaf_rn(sum, weight, to.weights);
}

__device__ float LargestReference(const Params& p, const PlanGroup& group, int row) {
  float max = -INFINITY;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < group.items; i += 32) {
    max = fmaxf(max, p.slot_max[group.slot_row + i * group.rows + row]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, step));
  }
  return max;
}

// Items [begin, end) of a row, in this thread's columns.
__device__ RowSum AddItems(const Params& p, const PlanGroup& group, int row, int begin, int end,
                           float reference) {
  const int column = static_cast<int>(threadIdx.x) % kRowThreads * 4;
  RowSum total{};
#pragma unroll 8
  for (int i = begin; i < end; ++i) {
    const std::int64_t slot = group.slot_row + i * group.rows + row;
    const float4 x = *reinterpret_cast<const float4*>(p.slots + slot * kDv + column);
    Add(total, x, p.slot_sum[slot], Exp2(p.slot_max[slot] - reference));
  }
  return total;
}

__device__ void WriteRow(const Params& p, int row, const RowSum& total, float max) {
  const int quad = static_cast<int>(threadIdx.x) % kRowThreads;
  const float inverse = 1.0f / total.weights;
  const float4 x = make_float4(total.values.x * inverse, total.values.y * inverse,
                               total.values.z * inverse, total.values.w * inverse);
  const RowTarget to = Target(p, row);
  if (p.partial_dtype == DType::kBf16) {
    const uint2 pairs = make_uint2(device::PackBf16(x.x, x.y), device::PackBf16(x.z, x.w));
    if (p.wide_stores) {
      reinterpret_cast<uint2*>(to.out)[quad] = pairs;
    } else {
      reinterpret_cast<std::uint32_t*>(to.out)[quad * 2] = pairs.x;
      reinterpret_cast<std::uint32_t*>(to.out)[quad * 2 + 1] = pairs.y;
    }
  } else if (p.wide_stores) {
    reinterpret_cast<float4*>(to.out)[quad] = x;
  } else {
    auto* const out = reinterpret_cast<float*>(to.out) + quad * 4;
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
  }
  if (quad == 0) *to.lse = max + log2f(total.weights);
}

// Unit `part` of a group: kRuns rows, or one.
__device__ void MergePart(const Params& p, const PlanGroup& group, int part,
                          RowSum (&runs)[kRuns][kRowThreads]) {
  const int run = static_cast<int>(threadIdx.x) / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  if (group.items <= kFewItems) {
    const int row = part * kRuns + run;
    if (row >= group.rows) return;
    const float max = LargestReference(p, group, row);
    const RowSum total = AddItems(p, group, row, 0, group.items, Reference(max));
    WriteRow(p, group.first_row + row, total, max);
  } else if (part < group.rows) {
    const float max = LargestReference(p, group, part);
    runs[run][thread] = AddItems(p, group, part, group.items * run / kRuns,
                                 group.items * (run + 1) / kRuns, Reference(max));
    __syncthreads();
    if (run == 0) {
      RowSum total = runs[0][thread];
#pragma unroll
      for (int i = 1; i < kRuns; ++i) {
        Add(total, runs[i][thread].values, runs[i][thread].weights, 1.0f);
      }
      WriteRow(p, group.first_row + part, total, max);
    }
    __syncthreads();  // the next row's runs go to the same place
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnMultiprocessor) Merge(const Params p) {
  __shared__ RowSum runs[kRuns][kRowThreads];
  const std::byte* const plan = p.step->plan;
  const PlanHeader header = *reinterpret_cast<const PlanHeader*>(plan);
  const auto* const groups = reinterpret_cast<const PlanGroup*>(plan + header.groups_offset);
  const int units = header.groups * kTileRows;
  int unit = static_cast<int>(blockIdx.x);
  PlanGroup group{};
  if (unit < units) group = groups[unit / kTileRows];
  device::WaitForPrimary();
  while (unit < units) {
    MergePart(p, group, unit % kTileRows, runs);
    unit += static_cast<int>(gridDim.x);
    if (unit < units) group = groups[unit / kTileRows];
  }
}

}  // namespace

Status LaunchMerge(const Params& params, int blocks, StreamRef stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks * kBlocksOnMultiprocessor));
  config.blockDim = dim3(kThreads);
  config.stream = cuda::Raw(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cuda::Check(cudaLaunchKernelEx(&config, Merge, params), "launch of sm90_dense's merge");
}

}  // namespace dcp::sm90
