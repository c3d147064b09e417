// How ranks and their groups are made, by what the configuration asks for.
#pragma once

#include "base/status.h"
#include "comm/communicator.h"
#include "runtime/config.h"
#include "runtime/rank_port.h"

namespace dcp {

struct RankMakers {
  MakeRankPortFn port;
  MakeGroupFn group;
};

// CPU ranks exchange in the process's memory, CUDA ranks through NCCL, and those that share devices
// through copies between them. Errors: CONFIG: CUDA ranks in a build without CUDA, no such device,
// no NCCL.
Result<RankMakers> DefaultMakers(const RanksConfig& ranks);

}  // namespace dcp
