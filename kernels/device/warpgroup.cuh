// What groups of four warps do together: registers, barriers, launches that overlap.
#pragma once

#include <cstdint>

namespace dcp::device {

// Every warp of a warpgroup; multiples of 8. Without a register cap at the kernel's entry the
// compiler ignores them, and says so.
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers of some of a block's warps, by number: 1 to 15, 0 is __syncthreads. Sync waits for
// `threads` arrivals, its own among them; Arrive does not wait.
__device__ __forceinline__ void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A kernel launched behind this one with programmatic stream serialization may start when all
// blocks have said so; there it waits until this one has ended and its writes are visible.
// GPUs before sm_90 know no such launches.
__device__ __forceinline__ void LetDependentsStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForPrimary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace dcp::device
