// The table of communicators that the conformance suite of a program walks.
#pragma once

#include <vector>

#include "comm/communicator.h"

namespace dcp::testing {

struct CommunicatorEntry {
  const char* name;
  int max_size;      // ranks
  MakeGroupFn make;  // communicators that take host memory and the host's stream
};

std::vector<CommunicatorEntry> Communicators();

}  // namespace dcp::testing
