// For tests and debugging: ranks that are threads of one process and may share GPUs, several on
// one. Rank threads meet on the host in every operation, so that each stream waits only for events
// that have been recorded, and pull their bytes from their peers' buffers.
#pragma once

#include <vector>

#include "comm/communicator.h"

namespace dcp {

// Groups whose rank r runs on devices[r]; devices may repeat. Operations need a CUDA stream of the
// rank's device and cannot be captured. Peer access is enabled between the devices.
// Errors of the returned function: CONFIG.
MakeGroupFn SharedGpuGroups(std::vector<int> devices);

}  // namespace dcp
