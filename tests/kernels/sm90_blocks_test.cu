// The wrappers in kernels/device that need sm_90a, one by one: boxes land where the comments say,
// and products are those of the rows and columns that the operands name.
#include <cuda_runtime.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/device/mbarrier.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/tensor_copy.cuh"
#include "kernels/device/wgmma.cuh"
#include "tests/kernels/on_device.h"

namespace dcp::test {
namespace {

constexpr int kRows = 64;
constexpr int kColumns = 256;
constexpr int kTiles = kColumns / 64;
constexpr std::uint32_t kTileBytes = kRows * 128;
constexpr int kThreads = 128;
constexpr std::size_t kSharedBytes = kTiles * kTileBytes + 1024;

struct Results {
  Bf16* shared;    // [kTiles, 64, 64] as the boxes landed
  float* rows;     // [64, 64] tile 0 * transposed tile 1
  float* columns;  // [64, 256] tile 2 * all tiles
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kCount>
__device__ void Store(const float (&d)[kCount], float* to, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[(row + i / 2 % 2 * 8) * stride + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}
#endif

enum class Product { kRows, kColumns, kColumnsOfRegisters };

// One product for each kernel: an accumulator takes half of a thread's registers.
template <Product kProduct>
__global__ void __launch_bounds__(kThreads, 1)
    UseBlocks(const __grid_constant__ CUtensorMap map, Results results) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared[];
  const std::uint32_t base = device::SharedAddress(shared);
  const std::uint32_t barrier = base + kTiles * kTileBytes;
  if (threadIdx.x == 0) {
    device::InitBarrier(barrier, 1);
    device::FenceBarrierInit();
    device::ArriveExpect(barrier, kTiles * kTileBytes);
    for (int tile = 0; tile < kTiles; ++tile) {
      for (int box = 0; box < 2; ++box) {
        device::CopyBox(base + tile * kTileBytes + box * kTileBytes / 2, &map, tile * 64, box * 32,
                        barrier);
      }
    }
  }
  __syncthreads();
  device::WaitBarrier(barrier, 0);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns; i += kThreads) {
    results.shared[i] = reinterpret_cast<const Bf16*>(shared)[i];
  }
  constexpr bool kIsRows = kProduct == Product::kRows;
  float d[kIsRows ? 32 : 128] = {};
  const std::uint32_t left = base + 2 * kTileBytes;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 16;
  const int half = static_cast<int>(threadIdx.x) % 32 / 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const device::Blocks4 a =
        device::LoadBlocks(left + row * 128 + ((k * 2 + half) ^ row % 8) * 16);
    device::KeepBehind(d);
    device::FenceProducts();
    if constexpr (kIsRows) {
      device::MultiplyRows64(d, device::RowsOperand(base + k * 32),
                             device::RowsOperand(base + kTileBytes + k * 32));
    } else if constexpr (kProduct == Product::kColumns) {
      device::MultiplyColumns256(d, device::RowsOperand(left + k * 32),
                                 device::ColumnsOperand(base + k * 2048, kTileBytes));
    } else {
      device::MultiplyColumns256(d, a.r, device::ColumnsOperand(base + k * 2048, kTileBytes));
    }
    device::CommitProducts();
    device::WaitProducts<0>();
    device::KeepBehind(d);
  }
  Store(d, kIsRows ? results.rows : results.columns, kIsRows ? 64 : kColumns);
#endif
}

template <Product kProduct>
void Run(const CUtensorMap& map, const Results& results) {
  RequireOk(
      cuda::Check(cudaFuncSetAttribute(UseBlocks<kProduct>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                  "cudaFuncSetAttribute"));
  UseBlocks<kProduct><<<1, kThreads, kSharedBytes, TestStream().raw()>>>(map, results);
  RequireOk(cuda::CheckLaunch("UseBlocks"));
}

}  // namespace

TEST_CASE("Boxes and products on sm_90a are laid out as documented") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<Bf16> x(static_cast<std::size_t>(kRows) * kColumns);
  for (Bf16& item : x) item = ToBf16(normal(random));
  const auto at = [&x](int row, int column) { return double{ToFloat(x[row * kColumns + column])}; };

  const cuda::DeviceBuffer from = ToDevice(x);
  const cuda::DeviceBuffer shared = DeviceBytes(x.size() * sizeof(Bf16));
  const cuda::DeviceBuffer rows = DeviceBytes(std::size_t{64} * 64 * 4);
  const cuda::DeviceBuffer columns = DeviceBytes(2 * x.size() * 4);
  const auto map = device::MakeRowTensorMap(from.as<Bf16>(), kRows, kColumns, 32);
  RequireOk(map.status());
  const std::size_t products = std::size_t{kRows} * kColumns;
  Run<Product::kRows>(*map, {shared.as<Bf16>(), rows.as<float>(), columns.as<float>()});
  Run<Product::kColumns>(*map, {shared.as<Bf16>(), rows.as<float>(), columns.as<float>()});
  Run<Product::kColumnsOfRegisters>(
      *map, {shared.as<Bf16>(), rows.as<float>(), columns.as<float>() + products});

  const std::vector<Bf16> landed = ToHost<Bf16>(shared);
  int misplaced = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const int piece = column % 64 / 8 ^ row % 8;
      const int to = column / 64 * kRows * 64 + row * 64 + piece * 8 + column % 8;
      misplaced += ToFloat(landed[to]) != ToFloat(x[row * kColumns + column]) ? 1 : 0;
    }
  }
  CHECK(misplaced == 0);

  const std::vector<float> row_products = ToHost<float>(rows);
  const std::vector<float> column_products = ToHost<float>(columns);
  double row_error = 0;
  double column_error[2] = {};
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 64; ++j) {
      double sum = 0;
      for (int k = 0; k < 64; ++k) sum += at(i, k) * at(j, 64 + k);
      row_error = std::fmax(row_error, std::fabs(sum - row_products[i * 64 + j]));
    }
    for (int j = 0; j < kColumns; ++j) {
      double sum = 0;
      for (int k = 0; k < 64; ++k) sum += at(i, 128 + k) * at(k, j);
      for (int v = 0; v < 2; ++v) {
        const float got = column_products[(v * kRows + i) * kColumns + j];
        column_error[v] = std::fmax(column_error[v], std::fabs(sum - got));
      }
    }
  }
  CHECK(row_error < 1e-3);
  CHECK(column_error[0] < 1e-3);
  CHECK(column_error[1] < 1e-3);
}

}  // namespace dcp::test
