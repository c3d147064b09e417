#include <algorithm>

#include "base/bf16.h"
#include "base/cuda.h"
#include "comm/sum_ranks.h"

namespace dcp {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;

__device__ float Load(const Bf16* p, std::size_t i) { return ToFloat(p[i]); }
__device__ float Load(const float* p, std::size_t i) { return p[i]; }
__device__ void Store(Bf16* p, std::size_t i, float x) { p[i] = ToBf16(x); }
__device__ void Store(float* p, std::size_t i, float x) { p[i] = x; }

template <class T>
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ SumRanksArgs args) {
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < args.elements;
       i += step) {
    float sum = 0;
    for (int r = 0; r < args.ranks; ++r) {
      sum = __fadd_rn(sum, Load(static_cast<const T*>(args.in[r]), i));
    }
    Store(static_cast<T*>(args.out), i, sum);
  }
}

}  // namespace

Status SumRanks(const SumRanksArgs& args, StreamRef stream) {
  if (args.elements == 0) return Status::Ok();
  const std::size_t wanted = (args.elements + kThreads - 1) / kThreads;
  const int blocks = static_cast<int>(std::min<std::size_t>(wanted, kMaxBlocks));
  if (args.dtype == DType::kBf16) {
    SumKernel<Bf16><<<blocks, kThreads, 0, cuda::Raw(stream)>>>(args);
  } else {
    SumKernel<float><<<blocks, kThreads, 0, cuda::Raw(stream)>>>(args);
  }
  return cuda::CheckLaunch("SumRanks");
}

}  // namespace dcp
