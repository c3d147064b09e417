// Boxes of a tensor from global to shared memory by the copy engine; sm_90 and later.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/bf16.h"
#include "base/status.h"

namespace dcp::device {

// A tensor of bf16 rows, copied in boxes of `box_rows` rows by 64 columns. In shared memory a row
// of a box takes 128 bytes, and its 16-byte piece c lies where piece c ^ (row % 8) would
// ("128-byte swizzle"); boxes lie at multiples of 1024 bytes. `rows` is only an upper limit: memory
// of rows that are never copied need not exist. `base` is a multiple of 16.
Result<CUtensorMap> MakeRowTensorMap(const Bf16* base, std::int64_t rows, int row_items,
                                     int box_rows);

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of the box at (row, column). Its bytes count for `barrier`.
__device__ __forceinline__ void CopyBox(std::uint32_t to, const CUtensorMap* map, int column,
                                        int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// What this thread wrote to shared memory becomes visible to the copy engine and the tensor cores;
// for other threads' use of them, before a barrier.
__device__ __forceinline__ void FenceAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace dcp::device
