// Logging: spdlog. The program sets up the sink, level and format; libraries only log.
#pragma once

#include <spdlog/spdlog.h>

namespace dcp {
namespace log = spdlog;
}  // namespace dcp
