// What all commands print with.
#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"
#include "client/cpp/rpc_error.h"
#include "client/dcpctl/commands.h"

namespace dcp {

using Json = nlohmann::ordered_json;

// Field names as in the proto; enums by name, durations in seconds; absent messages are left out,
// bytes too.
Json ToJson(const google::protobuf::Message& message);

// Nested objects become "a.b" keys, one line each.
void PrintFields(const Json& object);

enum class Paint { kBold, kGood, kBad };
// Escape codes only when stdout is a terminal and NO_COLOR is not set.
std::string Painted(Paint paint, std::string_view text);

// Print to stderr, with --json also {"error": ...} to stdout; return kExitFailed.
int Fail(const Globals& globals, const RpcError& error);
int Fail(const Globals& globals, const Status& status);

}  // namespace dcp
