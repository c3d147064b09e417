// Barriers in shared memory that count arrivals and bytes of asynchronous copies; sm_90 and later.
// A barrier runs through phases: a phase ends when all its arrivals and announced bytes have come,
// and waiting for parity p returns once the phase of that parity (the first has 0) has ended.
#pragma once

#include <cstdint>

namespace dcp::device {

// `barrier` is the address of 8 bytes, aligned to 8. One thread; then FenceBarrierInit and a block
// barrier before anyone else uses it.
__device__ __forceinline__ void InitBarrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to what copies have to bring before the phase can end.
__device__ __forceinline__ void ArriveExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void WaitBarrier(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

}  // namespace dcp::device
