#include "server/rpc_call.h"

#include <new>

#include "base/log.h"

namespace dcp {

Status StatusFromException() noexcept {
  try {
    throw;
  } catch (const std::exception& e) {
    spdlog::error("exception in a call: {}", e.what());
  } catch (...) {
    spdlog::error("exception in a call");
  }
  // Short enough to need no memory.
  return Status(Reason::kInternal, "exception");
}

}  // namespace dcp
