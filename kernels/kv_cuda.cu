#include <cuda_runtime.h>

#include "base/cuda.h"
#include "kernels/kv_cuda.h"

namespace dcp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 512;
constexpr int kCompareThreads = 1024;
constexpr int kItems = 8;  // bf16 elements of a uint4

__device__ std::int64_t ThreadIndex() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ std::int64_t GridThreads() { return std::int64_t{gridDim.x} * blockDim.x; }

__device__ uint4* Vectors(Bf16* p) { return reinterpret_cast<uint4*>(p); }
__device__ const uint4* Vectors(const Bf16* p) { return reinterpret_cast<const uint4*>(p); }

__global__ void __launch_bounds__(kThreads) CopyPagesKernel(KvPool pool, const DeviceStep* step) {
  const std::int64_t page_vectors = std::int64_t{pool.page_tokens} * pool.d_qk / kItems;
  const std::int64_t all = step->copies * pool.layers * page_vectors;
  for (std::int64_t i = ThreadIndex(); i < all; i += GridThreads()) {
    const std::int64_t page = i / page_vectors;  // copy * layers + layer
    const DevicePageCopy copy = step->page_copies[page / pool.layers];
    uint4* const layer = Vectors(pool.base) + page % pool.layers * pool.blocks * page_vectors;
    layer[copy.to * page_vectors + i % page_vectors] =
        layer[copy.from * page_vectors + i % page_vectors];
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteKvKernel(KvPool pool, const Bf16* latents, const DeviceStep* step) {
  if (!step->has_new_kv) return;
  const int row_vectors = pool.d_qk / kItems;
  uint4* const layer = Vectors(pool.base + step->kv_offset);
  const std::int64_t all = std::int64_t{step->tokens} * row_vectors;
  for (std::int64_t i = ThreadIndex(); i < all; i += GridThreads()) {
    const std::int64_t slot = step->slots[i / row_vectors];
    if (slot >= 0) layer[slot * row_vectors + i % row_vectors] = Vectors(latents)[i];
  }
}

// One thread block, so that the smallest index needs no memory that somebody clears first.
__global__ void __launch_bounds__(kCompareThreads)
    CompareKvKernel(KvPool pool, const Bf16* latents, const DeviceStep* step,
                    std::int32_t* first_difference) {
  __shared__ std::int32_t first;
  const std::int32_t none = step->tokens;
  if (threadIdx.x == 0) first = none;
  __syncthreads();
  const int row_vectors = pool.d_qk / kItems;
  const uint4* const layer = Vectors(pool.base + step->kv_offset);
  const std::int64_t all = step->has_new_kv ? std::int64_t{step->tokens} * row_vectors : 0;
  std::int32_t mine = none;
  for (std::int64_t i = threadIdx.x; i < all && mine == none; i += kCompareThreads) {
    const auto token = static_cast<std::int32_t>(i / row_vectors);
    const std::int64_t slot = step->slots[token];
    if (slot < 0) continue;
    const uint4 sent = Vectors(latents)[i];
    const uint4 stored = layer[slot * row_vectors + i % row_vectors];
    const bool same =
        sent.x == stored.x && sent.y == stored.y && sent.z == stored.z && sent.w == stored.w;
    if (!same) mine = token;
  }
  atomicMin(&first, mine);
  __syncthreads();
  if (threadIdx.x == 0) *first_difference = first == none ? -1 : first;
}

}  // namespace

Status CopyPages(const KvPool& pool, const DeviceStep* step, StreamRef stream) {
  CopyPagesKernel<<<kBlocks, kThreads, 0, cuda::Raw(stream)>>>(pool, step);
  return cuda::CheckLaunch("CopyPages");
}

Status WriteKv(const KvPool& pool, const Bf16* latents, const DeviceStep* step, StreamRef stream) {
  WriteKvKernel<<<kBlocks, kThreads, 0, cuda::Raw(stream)>>>(pool, latents, step);
  return cuda::CheckLaunch("WriteKv");
}

Status CompareKv(const KvPool& pool, const Bf16* latents, const DeviceStep* step,
                 std::int32_t* first_difference, StreamRef stream) {
  CompareKvKernel<<<1, kCompareThreads, 0, cuda::Raw(stream)>>>(pool, latents, step,
                                                                first_difference);
  return cuda::CheckLaunch("CompareKv");
}

}  // namespace dcp
