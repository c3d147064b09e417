// replay: runs a trace against a server and checks its answers.
#include <fmt/core.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <memory>
#include <thread>

#include "client/cpp/client.h"
#include "client/dcpctl/commands.h"
#include "client/dcpctl/output.h"
#include "client/dcpctl/replay/admission.h"
#include "client/dcpctl/replay/driver.h"
#include "client/dcpctl/replay/options.h"
#include "client/dcpctl/replay/progress.h"
#include "client/dcpctl/replay/report.h"
#include "client/dcpctl/replay/server_calls.h"
#include "client/dcpctl/replay/verifier.h"
#include "client/dcpctl/server_traits.h"
#include "client/workload/replay_plan.h"
#include "client/workload/trace.h"

namespace dcp {
namespace {

// Set by the first SIGINT or SIGTERM; the second one kills.
std::atomic<bool> g_stop{false};

void OnSignal(int signal) {
  g_stop = true;
  std::signal(signal, SIG_DFL);
}

Result<ReplayPlan> LoadPlan(const ReplayOptions& options) {
  DCP_ASSIGN_OR_RETURN(const LengthScale scale, LengthScale::Parse(options.length_scale));
  const TraceFormat format = options.format == "mooncake" ? TraceFormat::kMooncake
                             : options.format == "azure"  ? TraceFormat::kAzure
                                                          : GuessTraceFormat(options.trace);
  const std::size_t rows =
      options.max_requests > 0 ? static_cast<std::size_t>(options.max_requests) : kAllRows;
  DCP_ASSIGN_OR_RETURN(const std::vector<TraceRow> trace, ReadTrace(options.trace, format, rows));
  return PlanReplay(trace, scale);
}

ReplayReport Run(const ReplayOptions& options, const ReplayPlan& plan, Client& client,
                 const v1::GetLoadResponse& load) {
  const v1::GetServerInfoResponse& info = client.info();
  const Synthetic synthetic(GeometryOf(info), options.seed);
  const v1::DataType output_dtype =
      options.output_dtype == "fp32" ? v1::DATA_TYPE_FP32 : v1::DATA_TYPE_BF16;
  VerifierOptions checks;
  checks.synthetic = synthetic;
  checks.d_v = info.model().kv_lora_rank();
  checks.output_dtype = output_dtype;
  checks.limits = LimitsOf(info, output_dtype);
  checks.rate = options.verify_rate;
  checks.seed = options.seed;
  checks.epoch = info.epoch();
  AdmissionLimits limits;
  limits.time_scale = options.time_scale;
  limits.max_live = options.concurrency;
  limits.free_blocks = load.free_blocks();
  limits.block_tokens = std::max<std::int64_t>(1, info.kv().block_tokens());

  ReplayStats stats;
  ReplayReport report;
  const TimePoint begin = Clock::now();
  Verifier verifier(checks, static_cast<int>(std::thread::hardware_concurrency()));
  {
    ServerCalls calls(client, synthetic, stats, g_stop);
    Admission admission(plan, limits, calls, stats, g_stop);
    Progress progress(plan.output_tokens);
    Driver driver(client, synthetic, output_dtype, admission, calls, verifier, stats, g_stop,
                  [&](const DriverResult& r) {
                    progress.Show(r.tokens, stats.requests,
                                  static_cast<std::int64_t>(r.step_us.size()));
                  });
    DriverResult result = driver.Run();
    report.tokens = result.tokens;
    report.steps = static_cast<std::int64_t>(result.step_us.size());
    report.step_us = std::move(result.step_us);
    report.first_token_us = std::move(result.first_token_us);
    report.request_us = std::move(result.request_us);
    report.wall_s = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const RowCheckResult rows = verifier.Finish();
  report.rows_verified = rows.rows;
  report.rows_mismatched = rows.wrong;
  report.max_rel_error = rows.max_output_error;
  report.max_lse_error = rows.max_lse_error;
  report.error_limit = checks.limits.output;
  auto after = client.GetLoad();
  if (after.ok()) {
    report.cow_blocks = after->cow_blocks() - load.cow_blocks();
  } else {
    stats.Error("load", after.error());
  }
  report.trace_requests = static_cast<std::int64_t>(plan.requests.size());
  report.requests = stats.requests;
  report.forks = stats.forks;
  report.forked_tokens = stats.forked_tokens;
  report.appended_tokens = stats.appended_tokens;
  report.retries = stats.retries;
  report.errors = stats.errors;
  report.shared_share = plan.SharedShare();
  report.fork_depth = plan.fork_depth;
  return report;
}

int Replay(const Globals& globals, const ReplayOptions& options) {
  const Result<ReplayPlan> plan = LoadPlan(options);
  if (!plan.ok()) return Fail(globals, plan.status());
  auto client = Client::Connect(globals.server);
  if (!client.ok()) return Fail(globals, client.error());
  auto load = (*client)->GetLoad();
  if (!load.ok()) return Fail(globals, load.error());

  std::signal(SIGINT, OnSignal);
  std::signal(SIGTERM, OnSignal);
  const ReplayReport report = Run(options, *plan, **client, *load);
  const std::string json = ToJson(report).dump(2);
  const bool to_stdout = options.json == "-" || globals.json;
  if (to_stdout) {
    fmt::print("{}\n", json);
  } else {
    PrintTable(report);
  }
  if (!options.json.empty() && options.json != "-") {
    std::ofstream out(options.json);
    out << json << '\n';
    out.close();
    if (!out) return Fail(globals, Status(Reason::kConfig, options.json + ": cannot be written"));
  }
  if (g_stop) return kExitInterrupted;
  return report.Passed() ? kExitOk : kExitFailed;
}

}  // namespace

void AddReplayCommand(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* command =
      app.add_subcommand("replay", "Run a request trace against the server and check its answers");
  command->fallthrough();
  auto options = std::make_shared<ReplayOptions>();
  ReplayOptions& o = *options;
  command->add_option("--trace", o.trace, "Trace file")->required();
  command->add_option("--format", o.format, "mooncake, azure, or auto (by file name)")
      ->check(CLI::IsMember({"auto", "mooncake", "azure"}))
      ->capture_default_str();
  command->add_option("--max-requests", o.max_requests, "First rows of the trace; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--length-scale", o.length_scale,
                   "Scales inputs and outputs, e.g. 0.03125 or 1/32; 512 times it must be whole")
      ->capture_default_str();
  command
      ->add_option("--time-scale", o.time_scale, "Scales the trace's times; 0: as fast as possible")
      ->check(NumberIn(0, 1e9))
      ->capture_default_str();
  command
      ->add_option("--verify-rate", o.verify_rate,
                   "Share of (token, head, layer) rows to verify, besides one of every request")
      ->check(NumberIn(0, 1))
      ->capture_default_str();
  command->add_option("--concurrency", o.concurrency, "Most live requests")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--seed", o.seed, "Of data and of the choice of rows")->capture_default_str();
  command->add_option("--output-dtype", o.output_dtype, "bf16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  command->add_option("--json", o.json, "Write the report as JSON to this file, - for stdout");
  command->callback([&globals, &action, options] {
    action = [&globals, options] { return Replay(globals, *options); };
  });
}

}  // namespace dcp
