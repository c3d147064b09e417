// What the calls of every method share: their tags on the completion queue, their lifetime, and the
// count by which the server knows that none is left.
//
// A call lives as long as something may still come back to it. Each operation started on its
// completion queue holds a share of it (CallTag), and so does each completion given to the engine;
// nothing else does, and nothing deletes a call.
//
// All tags of one call come out of one completion queue and run on that queue's only thread, one
// after the other. Completions run on the engine's thread or inside the call to the engine.
#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "base/status.h"
#include "server/live_calls.h"

namespace dcp {

class RpcCall : public std::enable_shared_from_this<RpcCall> {
 public:
  explicit RpcCall(LiveCalls& live) : live_(live) { live_.Add(); }
  virtual ~RpcCall() { live_.Remove(this, accepted_); }
  RpcCall(const RpcCall&) = delete;
  RpcCall& operator=(const RpcCall&) = delete;

  // A handler or a completion of this call threw `why`: ends the call as far as that is possible.
  virtual void Abandon(const Status& why) = 0;

  // The server stops: a call that may stay open for ever ends once it owes no answer.
  virtual void Drain() {}

 protected:
  LiveCalls& live() { return live_; }
  // A client has made this call.
  void SetAccepted() {
    accepted_ = true;
    live_.Accepted();
  }

 private:
  LiveCalls& live_;
  bool accepted_ = false;
};

// Logs the exception in flight and makes a status of it. Precondition: inside a catch block.
Status StatusFromException() noexcept;

// Runs `body`; an exception must not reach gRPC or the engine and ends the call instead.
template <class Body>
void Guarded(RpcCall& call, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
  } catch (...) {
    const Status why = StatusFromException();
    try {
      call.Abandon(why);
    } catch (...) {
      static_cast<void>(StatusFromException());
    }
  }
}

// What the completion queue's thread sees of an operation.
class CompletionTag {
 public:
  virtual void Complete(bool ok) noexcept = 0;

 protected:
  ~CompletionTag() = default;
};

// One kind of operation of a call of type Call, a member of it. Armed while the operation is
// outstanding.
template <class Call>
class CallTag final : public CompletionTag {
 public:
  using Handler = void (Call::*)(bool ok);
  CallTag(Call* call, Handler handler) : call_(call), handler_(handler) {}

  // The tag to start the operation with.
  void* Arm() {
    keep_ = call_->shared_from_this();
    return static_cast<CompletionTag*>(this);
  }
  // The operation will not come back.
  void Disarm() { keep_.reset(); }

  void Complete(bool ok) noexcept override {
    const std::shared_ptr<RpcCall> keep = std::move(keep_);
    // By locals: through `this`, GCC 12 calls a null one where it checks for undefined behaviour.
    Call& call = *call_;
    const Handler handler = handler_;
    Guarded(call, [&] { (call.*handler)(ok); });
  }

 private:
  Call* const call_;
  const Handler handler_;
  std::shared_ptr<RpcCall> keep_;
};

}  // namespace dcp
