// NCCL's functions, found at run time: programs start on hosts that have no NCCL, and where several
// are installed the one to use can be named.
#pragma once

#include <nccl.h>

#include <string>

#include "base/status.h"

namespace dcp {

struct NcclApi {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclCommFinalize) comm_finalize;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclAllReduce) all_reduce;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) recv;
  int version = 0;   // as loaded, e.g. 22809
  std::string path;  // of the loaded library

  // Loads $DCP_NCCL_LIBRARY, else libnccl.so.2, once per process. Errors: CONFIG saying what the
  // loader said, or that the library is of another major version than the headers.
  static Result<const NcclApi*> Load();
};

}  // namespace dcp
