// The gRPC server: listens, serves dcp.v1.DecodeService, health and reflection from an engine.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "runtime/engine.h"
#include "server/completion_loop.h"
#include "server/health.h"
#include "server/server_config.h"
#include "server/service_context.h"

namespace dcp {

class Server {
 public:
  // Serves when it returns. `engine` and `health` outlive the server. Errors: CONFIG (an address
  // cannot be listened on).
  static Result<std::unique_ptr<Server>> Start(const ServerConfig& config, Engine& engine,
                                               Health& health);
  // Stops with a bound of its own if Stop was not called.
  ~Server();

  // The configured addresses, with the port chosen where the configuration says 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Health NOT_SERVING, new requests answer DRAINING, those in progress finish, streams end. True
  // when all is done by `deadline`. False: a rank is stuck or the bound has passed, calls are left
  // over, and the process can only be ended with _exit.
  bool Stop(TimePoint deadline);

 private:
  Server(const ServerConfig& config, Engine& engine, Health& health);
  Status Listen(const ServerConfig& config);
  bool TakeDown(TimePoint deadline);

  Health& health_;
  AsyncService service_;
  LiveCalls live_;
  ServiceContext context_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<CompletionLoop>> loops_;
  std::unique_ptr<grpc::Server> grpc_;
  bool stopped_ = false;
};

}  // namespace dcp
