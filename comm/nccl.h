// Ranks that are threads of one process, one GPU each, and exchange through NCCL.
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace dcp {

struct NcclVersion {
  int code = 0;      // 10000 major + 100 minor + patch, of the library that was loaded
  std::string path;  // of that library
};
// Loads NCCL. Errors: CONFIG.
Result<NcclVersion> LoadedNccl();

// Groups whose rank r runs on devices[r]; no device twice. The communicators are non-blocking, and
// NVLink multicast is off (NCCL_NVLS_ENABLE=0).
//
// Operations need a CUDA stream of the rank's device and may be captured. When the group is
// poisoned, each rank's communicator is aborted by a thread of its own, which ends NCCL's kernels;
// the rank then drains its stream and destroys the graphs that hold operations of the communicator
// before it destroys the communicator. The destructor waits for NCCL within a bound and otherwise
// leaks what NCCL still holds.
// Errors of the returned function: CONFIG, RANK_FAILED.
MakeGroupFn NcclGroups(std::vector<int> devices, Nanos timeout);

}  // namespace dcp
