// dcp-server as a function: flags, configuration, logging, signals, exit codes. The hooks are the
// tests' way in.
#pragma once

#include "runtime/engine.h"

namespace dcp {

// Exit codes: 0 stopped by a signal and drained; 1 did not start; 2 bad flags or configuration;
// 70 a rank is stuck or the drain's bound has passed. A second signal ends the process at once with
// 128 + its number. Does not return when a rank is stuck.
int ServerMain(int argc, char** argv, EngineHooks hooks = {});

}  // namespace dcp
