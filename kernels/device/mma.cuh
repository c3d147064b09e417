// Tensor-core building blocks of the kernels: 8x8 blocks of 16-bit elements out of shared memory,
// and products of 16 x 16 by 16 x 8 tiles. In all of them lane l of a warp has g = l / 4 and t = l
// % 4.
#pragma once

#include <cstdint>

namespace dcp::device {

// One register per 8x8 block, each holding two neighbouring elements of the block.
struct Blocks4 {
  std::uint32_t r[4];
};

// The address that PTX wants of a pointer into shared memory.
__device__ __forceinline__ std::uint32_t SharedAddress(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// Loads four 8x8 blocks. Lanes 8i to 8i + 7 pass the addresses (16-byte aligned) of the eight rows
// of block i. Lane l gets elements (g, 2t) and (g, 2t + 1) of each block.
__device__ __forceinline__ Blocks4 LoadBlocks(std::uint32_t row) {
  Blocks4 b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3])
               : "r"(row)
               : "memory");
  return b;
}

// As LoadBlocks, each block transposed: lane l gets elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ Blocks4 LoadBlocksTransposed(std::uint32_t row) {
  Blocks4 b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3])
               : "r"(row)
               : "memory");
  return b;
}

// Stores four 8x8 blocks (sm_90 and later); rows and elements as in LoadBlocks.
__device__ __forceinline__ void StoreBlocks(std::uint32_t row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// c += a * b; a is 16 x 16, b is 16 x 8, c is 16 x 8 in f32.
//   a.r: blocks (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15)
//   b0, b1: k = 2t, 2t + 1 and k = 2t + 8, 2t + 9 of column g
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const Blocks4& a, std::uint32_t b0,
                                            std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

// Two floats as bf16, round to nearest even; `low` in the lower half.
__device__ __forceinline__ std::uint32_t PackBf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace dcp::device
