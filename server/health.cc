#include "server/health.h"

#include "server/decode_service.h"

namespace dcp {

void Health::Set(EngineState state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
  Publish();
}

void Health::SetStopping() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  Publish();
}

void Health::Attach(grpc::HealthCheckServiceInterface* service) {
  const std::lock_guard lock(mutex_);
  service_ = service;
  Publish();
}

void Health::Publish() {
  if (service_ == nullptr) return;
  const bool serving = state_ == EngineState::kServing && !stopping_;
  service_->SetServingStatus("", serving);
  service_->SetServingStatus(kServiceName, serving);
}

}  // namespace dcp
