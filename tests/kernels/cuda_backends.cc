// For programs that check the CUDA lines of the table, and one more with an LSE in base 2. Without
// a device they fail.
#include <vector>

#include "tests/kernels/attention_problem.h"
#include "tests/kernels/cuda_portable_base2.h"

namespace dcp::test {

std::span<const BackendEntry> BackendsUnderTest() {
  static const std::vector<BackendEntry> kEntries = [] {
    std::vector<BackendEntry> cuda;
    for (const BackendEntry& entry : Backends()) {
      if (entry.caps.arch == Arch::kCuda) cuda.push_back(entry);
    }
    cuda.push_back(CudaPortableBase2());
    return cuda;
  }();
  return kEntries;
}

}  // namespace dcp::test
