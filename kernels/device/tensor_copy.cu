#include <cuda_runtime.h>

#include <string>

#include "base/cuda.h"
#include "kernels/device/tensor_copy.cuh"

namespace dcp::device {

Result<CUtensorMap> MakeRowTensorMap(const Bf16* base, std::int64_t rows, int row_items,
                                     int box_rows) {
  // Asked of the runtime, so that nothing links with the driver's library.
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  DCP_RETURN_IF_ERROR(
      cuda::Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                   cudaEnableDefault, &result),
                  "cudaGetDriverEntryPointByVersion"));
  if (result != cudaDriverEntryPointSuccess) {
    return Status(Reason::kUnsupported, "the CUDA driver has no cuTensorMapEncodeTiled");
  }
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  CUtensorMap map;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(row_items), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_items) * sizeof(Bf16)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult encoded =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<Bf16*>(base), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded == CUDA_SUCCESS) return map;
  return Status(Reason::kInternal, "cuTensorMapEncodeTiled: error " + std::to_string(encoded));
}

}  // namespace dcp::device
