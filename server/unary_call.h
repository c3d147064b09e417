// A unary call. The method's handler binds the request, gives it to the engine and returns; the
// engine's completion answers.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "server/rpc_call.h"
#include "server/service_context.h"
#include "server/status_grpc.h"

namespace dcp {

template <class Request, class Reply>
class UnaryCall;

template <class Request, class Reply>
struct UnaryMethod {
  using Call = UnaryCall<Request, Reply>;
  // AsyncService's RequestX.
  void (AsyncService::*request)(grpc::ServerContext*, Request*,
                                grpc::ServerAsyncResponseWriter<Reply>*, grpc::CompletionQueue*,
                                grpc::ServerCompletionQueue*, void*);
  void (*handle)(ServiceContext& context, const std::shared_ptr<Call>& call);
  // The handler may use OnCancel: costs one more event per call.
  bool cancellable = false;
};

template <class Request, class Reply>
class UnaryCall final : public RpcCall {
 public:
  using Method = UnaryMethod<Request, Reply>;

  // Waits for one call of the method; each call that arrives makes its successor.
  static void Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue,
                     const Method& method) {
    std::make_shared<UnaryCall>(context, queue, method)->Start();
  }

  UnaryCall(ServiceContext& context, grpc::ServerCompletionQueue& queue, const Method& method)
      : RpcCall(context.live), context_(context), queue_(queue), method_(method) {}

  // In a shared pointer of its own: the engine may need its bytes after this call is gone.
  const std::shared_ptr<Request>& request() const { return request_; }

  // Called once if the client cancels, its deadline passes or its connection ends. To be set by the
  // handler, before it returns.
  void OnCancel(std::function<void()> f) { on_cancel_ = std::move(f); }

  // One of them answers, the first to be called.
  void Answer(const Reply& reply) {
    if (!answered_.exchange(true)) writer_.Finish(reply, grpc::Status::OK, finished_.Arm());
  }
  void Fail(const Status& status) {
    if (!answered_.exchange(true)) writer_.FinishWithError(ToGrpc(status), finished_.Arm());
  }

  void Abandon(const Status& why) override { Fail(why); }

 private:
  void Start() {
    if (method_.cancellable) rpc_.AsyncNotifyWhenDone(done_.Arm());
    (context_.service.*method_.request)(&rpc_, request_.get(), &writer_, &queue_, &queue_,
                                        accepted_.Arm());
  }

  void OnAccepted(bool ok) {
    if (!ok) {  // the server stops; the done tag of a call that never was does not come
      answered_ = true;
      done_.Disarm();
      return;
    }
    SetAccepted();
    Accept(context_, queue_, method_);
    method_.handle(context_, std::static_pointer_cast<UnaryCall>(shared_from_this()));
  }

  void OnFinished(bool) {}

  void OnDone(bool) {
    if (rpc_.IsCancelled() && on_cancel_) on_cancel_();
    on_cancel_ = nullptr;
  }

  ServiceContext& context_;
  grpc::ServerCompletionQueue& queue_;
  const Method& method_;
  grpc::ServerContext rpc_;
  std::shared_ptr<Request> request_ = std::make_shared<Request>();
  grpc::ServerAsyncResponseWriter<Reply> writer_{&rpc_};
  std::atomic<bool> answered_{false};
  std::function<void()> on_cancel_;
  CallTag<UnaryCall> accepted_{this, &UnaryCall::OnAccepted};
  CallTag<UnaryCall> finished_{this, &UnaryCall::OnFinished};
  CallTag<UnaryCall> done_{this, &UnaryCall::OnDone};
};

}  // namespace dcp
