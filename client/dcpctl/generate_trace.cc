// generate-trace: writes a trace in the Mooncake schema.
#include <fmt/core.h>
#include <fmt/ostream.h>

#include <fstream>
#include <iostream>
#include <memory>

#include "client/dcpctl/commands.h"
#include "client/dcpctl/output.h"
#include "client/workload/replay_plan.h"
#include "client/workload/trace_generator.h"

namespace dcp {
namespace {

int Generate(const Globals& globals, const TraceOptions& options, const std::string& path) {
  const std::vector<TraceRow> rows = GenerateTrace(options);
  if (path == "-") {
    WriteMooncake(std::cout, rows);
  } else {
    std::ofstream out(path);
    WriteMooncake(out, rows);
    out.close();
    if (!out) return Fail(globals, Status(Reason::kConfig, path + ": cannot be written"));
  }
  const ReplayPlan plan = PlanReplay(rows, *LengthScale::Parse("1"));
  const Json summary = {
      {"requests", rows.size()},
      {"input_tokens", plan.input_tokens},
      {"output_tokens", plan.output_tokens},
      {"shared_share", plan.SharedShare()},
      {"fork_depth", plan.fork_depth},
      {"prefixes", plan.prefixes.size()},
      {"duration_s", rows.back().timestamp_ms / 1000},
  };
  if (globals.json && path != "-") {
    fmt::print("{}\n", summary.dump(2));
  } else {
    fmt::print(stderr, "{}\n", summary.dump());
  }
  return kExitOk;
}

}  // namespace

void AddGenerateTraceCommand(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* command = app.add_subcommand(
      "generate-trace", "Write a trace of multi-turn conversations in the Mooncake schema");
  command->fallthrough();
  auto options = std::make_shared<TraceOptions>();
  auto path = std::make_shared<std::string>("-");
  TraceOptions& o = *options;
  constexpr std::int64_t kMany = 1'000'000;
  command->add_option("--out", *path, "File to write, - for stdout")->capture_default_str();
  command->add_option("--requests", o.requests, "Rows")
      ->check(CLI::Range(std::int64_t{1}, kMany))
      ->capture_default_str();
  command->add_option("--seed", o.seed, "Same seed, same trace")->capture_default_str();
  command->add_option("--shared-share", o.shared_share, "Share of a turn's input that is shared")
      ->check(NumberIn(0, 0.95))
      ->capture_default_str();
  command->add_option("--fork-depth", o.fork_depth, "Turns of every third conversation")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{64}))
      ->capture_default_str();
  command->add_option("--system-prompts", o.system_prompts, "Different system prompts")
      ->check(CLI::Range(std::int64_t{1}, kMany))
      ->capture_default_str();
  command->add_option("--max-input", o.max_input, "Longest input in tokens")
      ->check(CLI::Range(2 * kTraceBlockTokens + 1, kMany))
      ->capture_default_str();
  command->add_option("--mean-output", o.mean_output, "Mean output in tokens")
      ->check(CLI::Range(std::int64_t{1}, kMany))
      ->capture_default_str();
  command->add_option("--duration", o.duration_s, "About the seconds in which conversations begin")
      ->check(NumberIn(0, 1e6))
      ->capture_default_str();
  command->add_option("--burst", o.burst, "Conversations that begin at the same moment")
      ->check(CLI::Range(std::int64_t{1}, kMany))
      ->capture_default_str();
  command
      ->add_option("--regenerate-share", o.regenerate_share,
                   "Share of requests that repeat the input before them")
      ->check(NumberIn(0, 1))
      ->capture_default_str();
  command->callback([&globals, &action, options, path] {
    action = [&globals, options, path] { return Generate(globals, *options, *path); };
  });
}

}  // namespace dcp
