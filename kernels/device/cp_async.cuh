// Copies from global to shared memory that run beside the thread that started them.
#pragma once

#include <cstdint>

namespace dcp::device {

// Starts a copy of 16 bytes; both addresses are multiples of 16. If not `valid`, writes zeros and
// does not read `from`, which must still be some global address.
__device__ __forceinline__ void CopyAsync16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}

// Closes this thread's group of copies.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all of this thread's groups but the newest kNewest. Other threads see what was copied
// after a barrier.
template <int kNewest>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace dcp::device
