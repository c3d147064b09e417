// One DecodeStream: items in, answers out in the same order.
//
//   Read ─▶ parse, bind ─▶ Engine::SubmitStep ─▶ completion ─▶ item ready ─▶ Write when in front
//
// At most max_inflight items are unanswered; an item counts until its answer is written, so a
// client that does not read its answers stops its own stream and no other.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>

#include "server/rpc_call.h"
#include "server/service_context.h"

namespace dcp {

class DecodeStream final : public RpcCall {
 public:
  // Waits for one stream; each that arrives makes its successor.
  static void Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue);

  DecodeStream(ServiceContext& context, grpc::ServerCompletionQueue& queue);

  void Abandon(const Status& why) override;
  void Drain() override;

 private:
  struct Item {
    StepHandle handle;
    bool ready = false;
    grpc::ByteBuffer answer;
  };

  // On the queue's thread.
  void OnAccepted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool) {}
  void OnDone(bool);

  // Takes no more items; the stream ends with `status` after the answers it owes.
  void EndAfterAnswers(const Status& status);
  // The client is gone: drops every answer, cancels every step that has not been launched.
  void Vanish();
  void DropItems();  // under the lock
  void Submit(const std::shared_ptr<Item>& item, std::shared_ptr<v1::DecodeStepRequest> message);
  void SetAnswer(Item& item, const v1::DecodeStepResponse& response);
  void SetFailure(Item& item, std::uint64_t tag, const Status& status);
  // Starts whatever can be started now: a read, a write, the end.
  void Advance();

  ServiceContext& context_;
  grpc::ServerCompletionQueue& queue_;
  grpc::ServerContext rpc_;
  grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> stream_{&rpc_};
  grpc::ByteBuffer incoming_;  // of the outstanding Read
  CallTag<DecodeStream> accepted_{this, &DecodeStream::OnAccepted};
  CallTag<DecodeStream> read_{this, &DecodeStream::OnRead};
  CallTag<DecodeStream> written_{this, &DecodeStream::OnWritten};
  CallTag<DecodeStream> finished_{this, &DecodeStream::OnFinished};
  CallTag<DecodeStream> done_{this, &DecodeStream::OnDone};

  std::mutex mutex_;                         // guards what follows, and starting a Read
  std::deque<std::shared_ptr<Item>> items_;  // unanswered, in the order sent
  bool taking_ = true;                       // more items are welcome
  bool reading_ = false;                     // a Read is outstanding
  bool writing_ = false;                     // a Write, of items_.front(), is outstanding
  bool over_ = false;                        // Finish has begun or the client is gone
  Status end_;                               // how the stream ends once !taking_ and no items
};

}  // namespace dcp
