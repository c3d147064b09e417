// grpc.health.v1: serving while the engine takes work. Thread-safe.
#pragma once

#include <grpcpp/health_check_service_interface.h>

#include <mutex>

#include "runtime/requests.h"

namespace dcp {

class Health {
 public:
  // The engine's state, from EngineHooks::on_state.
  void Set(EngineState state);
  // The server stops: not serving from now on, whatever the engine says.
  void SetStopping();

  // The health service of a server, from its start to its end; null detaches.
  void Attach(grpc::HealthCheckServiceInterface* service);

 private:
  void Publish();

  std::mutex mutex_;
  grpc::HealthCheckServiceInterface* service_ = nullptr;
  EngineState state_ = EngineState::kServing;
  bool stopping_ = false;
};

}  // namespace dcp
