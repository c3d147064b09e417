// One AppendKv: the header opens an append in the engine, chunks are copied into its reserved pages
// one at a time, half-close commits.
//
//   Read header ─▶ BeginAppend ─▶ ┌▶ Read chunk ─▶ WriteAppend ─┐
//                                 └─────────────────────────────┘
//                  half-close ─▶ fence ─▶ CommitAppend ─▶ Finish
//
// The fence: a failed Read means half-close, or that gRPC has refused a message (over the limit)
// and cancelled the call, which must not commit. An empty write tells the two apart: on a cancelled
// call it fails.
//
// One arrow at a time is in progress and starts the next, so that at most one chunk is in this
// process's memory beside what gRPC has of the next. Beside that sequence, at any time: the client
// vanishes, the engine ends the append by itself (on_lost), the server drains. Whoever sets `over_`
// answers.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <optional>

#include "server/rpc_call.h"
#include "server/service_context.h"

namespace dcp {

class AppendStream final : public RpcCall {
 public:
  // Waits for one stream; each that arrives makes its successor.
  static void Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue);

  AppendStream(ServiceContext& context, grpc::ServerCompletionQueue& queue);

  void Abandon(const Status& why) override;
  void Drain() override;

 private:
  // On the queue's thread.
  void OnAccepted(bool ok);
  void OnRead(bool ok);
  void OnFence(bool ok);
  void OnFinished(bool) {}
  void OnDone(bool);

  void StartRead();
  void Begin(const v1::AppendKvHeader& header);
  void Write(AppendChunk chunk);
  void Commit();

  // Completions.
  void OnBegun(const Result<AppendId>& id);
  void OnCommitted(const Result<AppendReply>& reply);

  void Fail(const Status& status);
  void Vanish();  // the client is gone, or gRPC has ended the call
  std::shared_ptr<AppendStream> Self();

  ServiceContext& context_;
  grpc::ServerCompletionQueue& queue_;
  grpc::ServerContext rpc_;
  grpc::ServerAsyncReader<grpc::ByteBuffer, grpc::ByteBuffer> stream_{&rpc_};
  grpc::ByteBuffer incoming_;  // of the outstanding Read
  CallTag<AppendStream> accepted_{this, &AppendStream::OnAccepted};
  CallTag<AppendStream> read_{this, &AppendStream::OnRead};
  CallTag<AppendStream> fence_{this, &AppendStream::OnFence};
  CallTag<AppendStream> finished_{this, &AppendStream::OnFinished};
  CallTag<AppendStream> done_{this, &AppendStream::OnDone};

  std::mutex mutex_;  // guards what follows, and starting a Read
  std::optional<AppendId> id_;
  bool over_ = false;  // Finish has begun or the client is gone
};

}  // namespace dcp
