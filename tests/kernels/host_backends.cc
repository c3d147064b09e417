// For programs that check the host lines of the table.
#include <vector>

#include "tests/kernels/attention_problem.h"

namespace dcp::test {

std::span<const BackendEntry> BackendsUnderTest() {
  static const std::vector<BackendEntry> kEntries = [] {
    std::vector<BackendEntry> host;
    for (const BackendEntry& entry : Backends()) {
      if (entry.caps.arch == Arch::kHost) host.push_back(entry);
    }
    return host;
  }();
  return kEntries;
}

}  // namespace dcp::test
