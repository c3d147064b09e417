#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/log.h"
#include "base/version.h"
#include "server/decode_service.h"

namespace dcp {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";

// gRPC removes the socket file of a server that still runs, so we look first.
bool SomeoneListens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

std::string WithPort(const std::string& address, int port) {
  return address.substr(0, address.rfind(':') + 1) + std::to_string(port);
}

std::chrono::system_clock::time_point ToSystem(TimePoint deadline) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(deadline - Clock::now());
}

void SetChannelArguments(const ServerConfig& config, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(config.max_message_bytes));
  // gRPC checks that size after it has decompressed, and a thousandth of a message can be all that
  // was sent. Tensors do not compress: compressed messages answer UNIMPLEMENTED.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  // A port in use is an error, not a second server on it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ping every 10 s (a second less for their clocks), in idle times too; ours finds
  // clients whose host is gone.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 9000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  // What is taken from a client before anything reads it; left to itself gRPC goes up to many MiB.
  // A message that is being read may use a window of its own size.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 20);
  // The synchronous API serves reflection only.
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
}

}  // namespace

Server::Server(const ServerConfig& config, Engine& engine, Health& health)
    : health_(health),
      context_{.engine = engine,
               .service = service_,
               .live = live_,
               .facts = {.version = std::string(kVersion),
                         .git_hash = std::string(kGitHash),
                         .max_message_bytes = config.max_message_bytes},
               .config = config.engine} {}

Result<std::unique_ptr<Server>> Server::Start(const ServerConfig& config, Engine& engine,
                                              Health& health) {
  std::unique_ptr<Server> server(new Server(config, engine, health));
  DCP_RETURN_IF_ERROR(server->Listen(config));
  return server;
}

Status Server::Listen(const ServerConfig& config) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  grpc::ServerBuilder builder;
  SetChannelArguments(config, builder);
  builder.RegisterService(&service_);
  for (int i = 0; i < config.threads; ++i) {
    loops_.push_back(std::make_unique<CompletionLoop>(builder.AddCompletionQueue(), config.poll));
  }
  const auto credentials = grpc::InsecureServerCredentials();
  std::vector<int> ports(config.listen.size(), 0);
  for (std::size_t i = 0; i < config.listen.size(); ++i) {
    const std::string& address = config.listen[i];
    if (address.starts_with(kUnixPrefix) && SomeoneListens(address.substr(kUnixPrefix.size()))) {
      return Status(Reason::kConfig,
                    "server.listen = \"" + address + "\": another process listens there");
    }
    builder.AddListeningPort(address, credentials, &ports[i]);
  }
  grpc_ = builder.BuildAndStart();
  if (!grpc_) {
    std::string failed;
    for (std::size_t i = 0; i < ports.size(); ++i) {
      if (ports[i] == 0) failed += (failed.empty() ? "\"" : ", \"") + config.listen[i] + "\"";
    }
    return Status(Reason::kConfig, "server.listen = " + failed +
                                       ": cannot listen there (in use, not permitted or not an "
                                       "address of this host)");
  }
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const std::string& address = config.listen[i];
    addresses_.push_back(address.starts_with(kUnixPrefix) ? address : WithPort(address, ports[i]));
  }
  health_.Attach(grpc_->GetHealthCheckService());
  for (const auto& loop : loops_) {
    AcceptCalls(context_, loop->queue());
    loop->Start();
  }
  return Status::Ok();
}

bool Server::Stop(TimePoint deadline) {
  if (stopped_) return true;
  health_.SetStopping();
  // What follows the drain needs a little time too, and must have it before the bound.
  const auto left = std::max<Nanos>(deadline - Clock::now(), Nanos{0});
  const TimePoint drain_deadline = deadline - std::min<Nanos>(left / 4, Millis{500});
  const bool drained = context_.engine.Drain(drain_deadline);
  if (!drained) spdlog::error("drain: a rank is stuck or the bound has passed");
  live_.DrainStreams();
  if (!live_.WaitForNoneInProgress(drain_deadline)) {
    spdlog::warn("drain: clients that do not read their answers are cut off");
  }
  // What is left is calls that arrive until gRPC stops listening, which are refused at once, but
  // need a moment on a busy host; and connections: idle clients take up to 5 s to close theirs.
  const Nanos last_calls =
      std::min<Nanos>(std::max<Nanos>(deadline - Clock::now(), Nanos{0}) / 2, Millis{1000});
  grpc_->Shutdown(ToSystem(Clock::now() + last_calls));
  return TakeDown(deadline) && drained;
}

bool Server::TakeDown(TimePoint deadline) {
  if (!live_.WaitForNone(deadline)) return false;
  health_.Attach(nullptr);
  for (const auto& loop : loops_) loop->Stop();
  stopped_ = true;
  return true;
}

Server::~Server() {
  if (!grpc_) return;
  if (stopped_ || Stop(Clock::now() + std::chrono::seconds(10))) return;
  // Calls are left in the engine's hands. Their queues and the gRPC server must outlive them, and
  // the rest of this object dies: only a process about to end may come here.
  spdlog::critical("server: calls are left over, aborting");
  std::abort();
}

}  // namespace dcp
