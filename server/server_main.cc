#include "server/server_main.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/log.h"
#include "base/version.h"
#include "server/config_loader.h"
#include "server/health.h"
#include "server/log_setup.h"
#include "server/server.h"

#if defined(DCP_WITH_CUDA)
#include "base/cuda.h"
#endif

namespace dcp {
namespace {

constexpr int kExitNotStarted = 1;
constexpr int kExitConfig = 2;
constexpr int kExitStuck = 70;

// The flags laid over the file; or the code to exit with.
std::variant<ServerConfig, int> ReadCommandLine(int argc, char** argv) {
  CLI::App app("dcp-server: decode context parallel attention for MLA models, over gRPC.",
               "dcp-server");
  std::string config_path;
  std::vector<std::string> listen;
  std::string log_level;
  app.add_option("--config", config_path, "Configuration, a TOML file (see configs/)")
      ->required()
      ->type_name("FILE");
  app.add_option("--listen", listen,
                 "Address to listen on: host:port (port 0: any free) or unix:PATH. Repeatable; "
                 "replaces server.listen")
      ->type_name("ADDR")
      ->take_all()
      ->expected(1)
      ->check([](const std::string& address) { return CheckAddress(address).message(); });
  app.add_option("--log-level", log_level,
                 "trace, debug, info, warn, error, critical or off; replaces log.level")
      ->type_name("LEVEL")
      ->check([](const std::string& level) {
        return IsLogLevel(level) ? "" : "expected trace, debug, info, warn, error, critical or off";
      });
  app.set_version_flag("--version",
                       "dcp-server " + std::string(kVersion) + " (" + std::string(kGitHash) + ")");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitConfig;
  }
  Result<ServerConfig> config = LoadConfig(config_path);
  if (!config.ok()) {
    std::fprintf(stderr, "dcp-server: %s\n", config.status().message().c_str());
    return kExitConfig;
  }
  if (!listen.empty()) config->listen = std::move(listen);
  if (!log_level.empty()) config->log.level = std::move(log_level);
  return *std::move(config);
}

void LogStart(const ServerConfig& config, const EngineInfo& info) {
  const EngineConfig& e = config.engine;
  constexpr double kMiB = 1024.0 * 1024.0;
  spdlog::info("dcp-server {} ({}), epoch {}", kVersion, kGitHash, info.epoch);
  spdlog::info("  model     {} layers, {} heads, {} + {} dims, softmax scale {}", e.model.layers,
               e.model.heads, e.model.kv_lora_rank, e.model.rope_dim, e.model.softmax_scale);
  const bool cuda = e.ranks.device == RankDevice::kCuda;
  spdlog::info("  ranks     {} on {}, timeout {} ms{}", e.ranks.count,
               RankDeviceName(e.ranks.device), e.ranks.timeout.count(),
               !cuda                   ? ""
               : e.ranks.share_devices ? ", devices shared, eager"
               : e.ranks.UseGraphs()   ? ", graphs"
                                       : ", eager");
  spdlog::info("  backend   {}, lse base {}, partials {}", info.backend,
               info.lse_base == LogBase::kE ? "e" : "2", DTypeName(e.attention.partial_dtype));
  spdlog::info("  exchange  {}", ExchangeName(e.exchange));
  spdlog::info("  kv        {} blocks of {} tokens (page {}, interleave {}), {:.1f} MiB per rank",
               e.kv.blocks, info.block_tokens, e.kv.page_tokens, e.kv.interleave,
               static_cast<double>(info.kv_bytes_per_rank) / kMiB);
  spdlog::info("  limits    {} sequences, context {}, batch {}, step {} tokens, message {:.0f} MiB",
               e.limits.max_sequences, e.limits.max_context, e.limits.max_batch,
               e.limits.max_step_tokens, static_cast<double>(config.max_message_bytes) / kMiB);
  spdlog::info("  server    {} threads, poll {}", config.threads,
               config.poll == PollMode::kSpin ? "spin" : "block");
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  return signals;
}

// As many connections as the host lets us have: gRPC 1.51 stops listening for good when it cannot
// accept one.
void RaiseFileLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &files) != 0) {
    spdlog::warn("the limit of open files stays as it is: {}", std::strerror(errno));
  }
}

// While the server stops: a second signal, or the bound, ends the process whatever hangs.
void GuardStop(TimePoint deadline) {
  std::thread([deadline] {
    const sigset_t signals = StopSignals();
    while (true) {
      const auto left = std::max<Nanos>(deadline - Clock::now(), Nanos{0});
      const timespec wait{.tv_sec = static_cast<std::time_t>(left.count() / 1'000'000'000),
                          .tv_nsec = static_cast<long>(left.count() % 1'000'000'000)};
      const int signal = sigtimedwait(&signals, nullptr, &wait);
      if (signal > 0) _exit(128 + signal);
      if (Clock::now() >= deadline) _exit(kExitStuck);
    }
  }).detach();
}

}  // namespace

int ServerMain(int argc, char** argv, EngineHooks hooks) {
  std::variant<ServerConfig, int> command = ReadCommandLine(argc, argv);
  if (const int* code = std::get_if<int>(&command)) return *code;
  const ServerConfig& config = std::get<ServerConfig>(command);
  SetUpLogging(config.log);
#if defined(DCP_WITH_CUDA)
  cuda::SetUpEnvironment();
#endif

  RaiseFileLimit();

  // Before any thread starts: all inherit the mask, and only sigwait gets these signals.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  Health health;
  hooks.on_state = [&health](EngineState state) { health.Set(state); };
  Result<std::unique_ptr<Engine>> engine = Engine::Create(config.engine, std::move(hooks));
  if (!engine.ok()) {
    spdlog::critical("engine: {}", engine.status().ToString());
    return kExitNotStarted;
  }
  Result<std::unique_ptr<Server>> server = Server::Start(config, **engine, health);
  if (!server.ok()) {
    spdlog::critical("server: {}", server.status().ToString());
    return kExitNotStarted;
  }
  LogStart(config, (*engine)->info());
  for (const std::string& address : (*server)->addresses()) {
    std::printf("listening on %s\n", address.c_str());
  }
  std::fflush(stdout);

  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("SIG{}: draining, at most {} ms", sigabbrev_np(signal),
               config.drain_timeout.count());
  const TimePoint deadline = Clock::now() + config.drain_timeout;
  GuardStop(deadline);
  if (!(*server)->Stop(deadline)) {
    spdlog::critical("stopped with a rank stuck or calls left over");
    spdlog::shutdown();
    _exit(kExitStuck);
  }
  spdlog::info("stopped");
  return 0;
}

}  // namespace dcp
