#include "comm/nccl_api.h"

#include <dlfcn.h>

#include <cstdlib>

namespace dcp {
namespace {

constexpr int kMajor = 10000;  // NCCL_VERSION_CODE = 10000 major + 100 minor + patch

template <class F>
bool Find(void* library, const char* name, F& function, std::string& missing) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
  return function != nullptr;
}

Result<NcclApi> LoadOnce() {
  const char* named = std::getenv("DCP_NCCL_LIBRARY");
  const char* file = named != nullptr ? named : "libnccl.so.2";
  void* library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status(Reason::kConfig, std::string("NCCL cannot be loaded: ") +
                                       (why != nullptr ? why : file) +
                                       "; install it or name the library in DCP_NCCL_LIBRARY");
  }
  NcclApi api{};
  std::string missing;
  Find(library, "ncclGetVersion", api.get_version, missing);
  Find(library, "ncclGetUniqueId", api.get_unique_id, missing);
  Find(library, "ncclCommInitRankConfig", api.comm_init_rank_config, missing);
  Find(library, "ncclCommGetAsyncError", api.comm_get_async_error, missing);
  Find(library, "ncclCommFinalize", api.comm_finalize, missing);
  Find(library, "ncclCommDestroy", api.comm_destroy, missing);
  Find(library, "ncclCommAbort", api.comm_abort, missing);
  Find(library, "ncclGetErrorString", api.get_error_string, missing);
  Find(library, "ncclGroupStart", api.group_start, missing);
  Find(library, "ncclGroupEnd", api.group_end, missing);
  Find(library, "ncclAllGather", api.all_gather, missing);
  Find(library, "ncclReduceScatter", api.reduce_scatter, missing);
  Find(library, "ncclAllReduce", api.all_reduce, missing);
  Find(library, "ncclSend", api.send, missing);
  Find(library, "ncclRecv", api.recv, missing);
  if (!missing.empty()) {
    return Status(Reason::kConfig, std::string(file) + " has no " + missing);
  }
  Dl_info info{};
  api.path = ::dladdr(reinterpret_cast<void*>(api.get_version), &info) != 0 && info.dli_fname
                 ? info.dli_fname
                 : file;
  if (api.get_version(&api.version) != ncclSuccess || api.version / kMajor != NCCL_MAJOR) {
    return Status(Reason::kConfig, api.path + " is NCCL version " + std::to_string(api.version) +
                                       ", this build needs " + std::to_string(NCCL_MAJOR) + ".x");
  }
  return api;
}

}  // namespace

Result<const NcclApi*> NcclApi::Load() {
  static const Result<NcclApi> loaded = LoadOnce();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace dcp
