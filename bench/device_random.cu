#include <cuda_runtime.h>

#include "base/cuda.h"
#include "bench/device_random.h"

namespace dcp::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4096;

__global__ void __launch_bounds__(kThreads)
    FillKernel(Bf16* to, std::int64_t count, std::uint64_t seed) {
  const std::int64_t step = std::int64_t{kBlocks} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    to[i] = RandomAt(seed, static_cast<std::uint64_t>(i));
  }
}

}  // namespace

Status FillRandom(Bf16* to, std::int64_t count, std::uint64_t seed, StreamRef stream) {
  FillKernel<<<kBlocks, kThreads, 0, cuda::Raw(stream)>>>(to, count, seed);
  return cuda::CheckLaunch("FillRandom");
}

}  // namespace dcp::bench
