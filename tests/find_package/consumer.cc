// A program outside the project that uses an installed dcp.
#include <cstdio>

#include "base/version.h"
#include "runtime/config.h"
#include "runtime/engine.h"

int main() {
  // An EngineConfig of defaults lacks the model: every rule is alive behind the installed headers.
  const dcp::Status status = dcp::Validate(dcp::EngineConfig{});
  std::printf("dcp %.*s (%.*s): %s\n", static_cast<int>(dcp::kVersion.size()), dcp::kVersion.data(),
              static_cast<int>(dcp::kGitHash.size()), dcp::kGitHash.data(),
              status.ToString().c_str());
  return status.reason() == dcp::Reason::kConfig ? 0 : 1;
}
