// The subcommands of dcpctl. Each adds itself to the parser; the chosen one sets `action`, which
// runs after parsing and returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace dcp {

struct Globals {
  std::string server = "127.0.0.1:7400";
  bool json = false;
};

using Action = std::function<int()>;

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

void AddInspectCommands(CLI::App& app, const Globals& globals, Action& action);
void AddStepCommand(CLI::App& app, const Globals& globals, Action& action);
void AddReplayCommand(CLI::App& app, const Globals& globals, Action& action);
void AddGenerateTraceCommand(CLI::App& app, const Globals& globals, Action& action);

}  // namespace dcp
