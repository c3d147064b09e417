// Which calls exist: waiting to be accepted, in progress, or being taken down. Thread-safe.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/time.h"

namespace dcp {

class RpcCall;

class LiveCalls {
 public:
  void Add();
  void Accepted();
  void Remove(const RpcCall* call, bool accepted);

  // Registers an accepted call for DrainStreams; false: streams drain already.
  bool AddStream(const std::shared_ptr<RpcCall>& call);
  // Calls Drain() of every registered call, and makes AddStream answer false from now on.
  void DrainStreams();

  // True when no call is in progress, or none at all is left; false at the deadline.
  bool WaitForNoneInProgress(TimePoint deadline);
  bool WaitForNone(TimePoint deadline);

 private:
  std::mutex mutex_;
  std::condition_variable fewer_;
  int count_ = 0;     // all
  int accepted_ = 0;  // of those, in progress or being taken down
  bool draining_ = false;
  std::unordered_map<const RpcCall*, std::weak_ptr<RpcCall>> streams_;
};

}  // namespace dcp
