// Ranks that are threads of one process and exchange through its memory.
#pragma once

#include "comm/communicator.h"

namespace dcp {

// Each operation waits for all peers twice (inputs published, inputs read) and copies once.
Result<std::vector<std::unique_ptr<Communicator>>> MakeInProcessGroup(const GroupSpec& spec);

}  // namespace dcp
