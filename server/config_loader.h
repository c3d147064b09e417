// Reads configs/*.toml. Every rule is checked here or in Validate (runtime/config.h); each message
// names file, line, key, value and rule.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "server/server_config.h"

namespace dcp {

// Errors: CONFIG.
Result<ServerConfig> LoadConfig(const std::string& path);

// The same from text; `name` stands for the file in messages.
Result<ServerConfig> ParseConfig(std::string_view text, std::string_view name);

// host:port (port 0 to 65535) or unix:PATH.
Status CheckAddress(std::string_view address);

bool IsLogLevel(std::string_view level);

// Bytes of the largest DecodeStep message, request or answer, that the limits allow.
std::int64_t LargestStepMessage(const EngineConfig& config);

}  // namespace dcp
