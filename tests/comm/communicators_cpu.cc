#include "comm/in_process.h"
#include "tests/comm/communicators.h"

namespace dcp::testing {

std::vector<CommunicatorEntry> Communicators() {
  return {{.name = "in_process", .max_size = 8, .make = MakeInProcessGroup}};
}

}  // namespace dcp::testing
