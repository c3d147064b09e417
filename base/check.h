// DCP_CHECK aborts on a broken invariant of our own code, never on input.
#pragma once

namespace dcp {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
}  // namespace dcp

#define DCP_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::dcp::CheckFailed(__FILE__, __LINE__, #condition))
