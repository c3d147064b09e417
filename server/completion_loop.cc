#include "server/completion_loop.h"

#include "server/rpc_call.h"

namespace dcp {
namespace {

void RelaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void RunBlocking(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) static_cast<CompletionTag*>(tag)->Complete(ok);
}

void RunSpinning(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  while (true) {
    switch (queue.AsyncNext(&tag, &ok, gpr_inf_past(GPR_CLOCK_MONOTONIC))) {
      case grpc::CompletionQueue::GOT_EVENT: static_cast<CompletionTag*>(tag)->Complete(ok); break;
      case grpc::CompletionQueue::TIMEOUT:
        RelaxCpu();
        std::this_thread::yield();  // where cores are scarce, what we wait for needs this one
        break;
      case grpc::CompletionQueue::SHUTDOWN: return;
    }
  }
}

}  // namespace

void CompletionLoop::Start() {
  thread_ = std::thread([this] {
    if (poll_ == PollMode::kSpin) {
      RunSpinning(*queue_);
    } else {
      RunBlocking(*queue_);
    }
  });
}

void CompletionLoop::Stop() {
  if (stopped_) return;
  stopped_ = true;
  queue_->Shutdown();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    RunBlocking(*queue_);  // never started: what is left must still be taken out
  }
}

}  // namespace dcp
