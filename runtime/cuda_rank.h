// A rank on a GPU; built with DCP_CUDA only.
#pragma once

#include "runtime/rank_port.h"

namespace dcp {

// A thread of this process that drives CUDA device config.ranks.Device(rank). Allocates the KV pool
// and every buffer, makes the backend and probes its contract; captures graphs, if they are wanted,
// each time its group agrees. Errors: CONFIG (no such device), KV_CAPACITY (does not fit, with the
// numbers), BACKEND_CONTRACT, what the backend's factory answers.
Result<std::unique_ptr<RankPort>> MakeCudaRankPort(const RankSetup& setup);

}  // namespace dcp
