#include "server/live_calls.h"

#include <vector>

#include "base/wait.h"
#include "server/rpc_call.h"

namespace dcp {

void LiveCalls::Add() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void LiveCalls::Accepted() {
  const std::lock_guard lock(mutex_);
  ++accepted_;
}

void LiveCalls::Remove(const RpcCall* call, bool accepted) {
  // Notifies under the lock: the waiter may destroy this object as soon as it gets it.
  const std::lock_guard lock(mutex_);
  streams_.erase(call);
  --count_;
  if (accepted) --accepted_;
  if (accepted_ == 0) fewer_.notify_all();
}

bool LiveCalls::AddStream(const std::shared_ptr<RpcCall>& call) {
  const std::lock_guard lock(mutex_);
  if (draining_) return false;
  streams_.emplace(call.get(), call);
  return true;
}

void LiveCalls::DrainStreams() {
  std::vector<std::shared_ptr<RpcCall>> calls;
  {
    const std::lock_guard lock(mutex_);
    draining_ = true;
    for (const auto& [key, weak] : streams_) {
      if (auto call = weak.lock()) calls.push_back(std::move(call));
    }
  }
  for (const auto& call : calls) Guarded(*call, [&] { call->Drain(); });
}

bool LiveCalls::WaitForNoneInProgress(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return WaitUntil(fewer_, lock, deadline, [this] { return accepted_ == 0; });
}

bool LiveCalls::WaitForNone(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return WaitUntil(fewer_, lock, deadline, [this] { return count_ == 0; });
}

}  // namespace dcp
