// Logging of the program: spdlog and gRPC's own messages to stderr.
#pragma once

#include "server/server_config.h"

namespace dcp {

// Precondition: config.level is a level (IsLogLevel).
void SetUpLogging(const LogConfig& config);

}  // namespace dcp
