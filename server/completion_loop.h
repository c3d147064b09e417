// A completion queue and the thread that runs what comes out of it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <thread>

#include "server/server_config.h"

namespace dcp {

class CompletionLoop {
 public:
  // The queue must be made by the builder of a server that has not started.
  CompletionLoop(std::unique_ptr<grpc::ServerCompletionQueue> queue, PollMode poll)
      : queue_(std::move(queue)), poll_(poll) {}
  ~CompletionLoop() { Stop(); }

  grpc::ServerCompletionQueue& queue() { return *queue_; }
  void Start();
  // Precondition: no call lives that may start an operation on the queue.
  void Stop();

 private:
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  PollMode poll_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace dcp
