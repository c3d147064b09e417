// The subcommands of dcpctl. Each adds itself to the parser; the chosen one sets `action`, which
// runs after parsing and returns the exit code.
#pragma once

#include <fmt/core.h>

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

// For options that are numbers: CLI::Range lets NaN through.
inline CLI::Validator NumberIn(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double number = 0;
        const bool within =
            CLI::detail::lexical_cast(text, number) && number >= low && number <= high;
        return within ? std::string() : fmt::format("is {}, expected {} to {}", text, low, high);
      },
      fmt::format("FLOAT in [{} - {}]", low, high));
}

void AddInspectCommands(CLI::App& app, const Globals& globals, Action& action);
void AddStepCommand(CLI::App& app, const Globals& globals, Action& action);
void AddReplayCommand(CLI::App& app, const Globals& globals, Action& action);
void AddGenerateTraceCommand(CLI::App& app, const Globals& globals, Action& action);

}  // namespace dcp
