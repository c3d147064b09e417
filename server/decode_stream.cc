#include "server/decode_stream.h"

#include <utility>

#include "server/message_bytes.h"
#include "server/status_grpc.h"

namespace dcp {

void DecodeStream::Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue) {
  const auto call = std::make_shared<DecodeStream>(context, queue);
  call->rpc_.AsyncNotifyWhenDone(call->done_.Arm());
  context.service.RequestDecodeStream(&call->rpc_, &call->stream_, &queue, &queue,
                                      call->accepted_.Arm());
}

DecodeStream::DecodeStream(ServiceContext& context, grpc::ServerCompletionQueue& queue)
    : RpcCall(context.live), context_(context), queue_(queue) {}

void DecodeStream::OnAccepted(bool ok) {
  if (!ok) {  // the server stops; the done tag of a call that never was does not come
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    done_.Disarm();
    return;
  }
  SetAccepted();
  Accept(context_, queue_);
  if (live().AddStream(shared_from_this())) {
    Advance();
  } else {
    Drain();
  }
}

void DecodeStream::OnRead(bool ok) {
  std::shared_ptr<v1::DecodeStepRequest> message;
  std::shared_ptr<Item> item;
  Status end;
  if (ok) {
    message = std::make_shared<v1::DecodeStepRequest>();
    if (ParseAndClear(&incoming_, message.get())) {
      item = std::make_shared<Item>();
    } else {
      end = Status(Reason::kProtocol, "the message does not decode, expected a DecodeStepRequest");
    }
  }
  {
    const std::lock_guard lock(mutex_);
    reading_ = false;
    if (over_ || !taking_) return;
    if (item) items_.push_back(item);
  }
  if (!item) return EndAfterAnswers(end);
  // The next Read first: it can wait for its bytes while this item goes to the engine.
  Advance();
  Submit(item, std::move(message));
}

void DecodeStream::Submit(const std::shared_ptr<Item>& item,
                          std::shared_ptr<v1::DecodeStepRequest> message) {
  const std::uint64_t tag = message->tag();
  try {
    Result<StepRequest> request = Bind(std::shared_ptr<const v1::DecodeStepRequest>(message));
    if (!request.ok()) {
      SetFailure(*item, tag, request.status());
      return Advance();
    }
    const StepAnswerShape shape = AnswerShape(*message, *request, context_.config.model);
    message.reset();  // the request keeps it alive for as long as the engine needs it
    const StepHandle handle = context_.engine.SubmitStep(
        *std::move(request), [self = std::static_pointer_cast<DecodeStream>(shared_from_this()),
                              item, shape](Result<StepReply> reply) {
          Guarded(*self, [&] {
            if (reply.ok()) {
              v1::DecodeStepResponse response;
              Encode(*std::move(reply), shape, &response);
              self->SetAnswer(*item, response);
            } else {
              self->SetFailure(*item, shape.tag, reply.status());
            }
            self->Advance();
          });
        });
    const std::lock_guard lock(mutex_);
    item->handle = handle;
    if (over_) item->handle.Cancel();
  } catch (...) {
    SetFailure(*item, tag, StatusFromException());
    Advance();
  }
}

void DecodeStream::SetAnswer(Item& item, const v1::DecodeStepResponse& response) {
  // Serialised here, outside the lock, by whichever thread brings the answer.
  grpc::ByteBuffer bytes = Serialize(response);
  const std::lock_guard lock(mutex_);
  item.answer.Swap(&bytes);
  item.ready = true;
}

void DecodeStream::SetFailure(Item& item, std::uint64_t tag, const Status& status) {
  v1::DecodeStepResponse response;
  response.set_tag(tag);
  Encode(status, response.mutable_status());
  SetAnswer(item, response);
}

void DecodeStream::Advance() {
  std::shared_ptr<Item> write;
  bool finish = false;
  grpc::Status end;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    if (!writing_ && !items_.empty() && items_.front()->ready) {
      writing_ = true;
      write = items_.front();
    }
    if (!taking_ && items_.empty()) {
      over_ = finish = true;
      end = ToGrpc(end_);
    } else if (taking_ && !reading_ &&
               items_.size() < static_cast<std::size_t>(context_.config.limits.max_inflight)) {
      // Under the lock, so that no Read starts after Finish. It does not wait for anything.
      reading_ = true;
      stream_.Read(&incoming_, read_.Arm());
    }
  }
  // These two send bytes, and the engine's thread must not wait for that behind the lock;
  // `writing_` and `over_` make this thread the only one to be here.
  if (write) stream_.Write(write->answer, written_.Arm());
  if (finish) stream_.Finish(end, finished_.Arm());
}

void DecodeStream::OnWritten(bool ok) {
  if (!ok) return Vanish();
  std::shared_ptr<Item> answered;
  {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (over_) return;
    answered = std::move(items_.front());
    items_.pop_front();
  }
  Advance();
}

void DecodeStream::EndAfterAnswers(const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (taking_) end_ = status;
    taking_ = false;
  }
  Advance();
}

void DecodeStream::Drain() { EndAfterAnswers(Status(Reason::kDraining, "the server is stopping")); }

void DecodeStream::Abandon(const Status& why) {
  // What threw may have left an item that never becomes ready: no orderly end is left.
  bool finish = false;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    finish = !writing_;
    DropItems();
  }
  if (finish) {
    stream_.Finish(ToGrpc(why), finished_.Arm());
  } else {
    rpc_.TryCancel();
  }
}

void DecodeStream::OnDone(bool) {
  if (rpc_.IsCancelled()) Vanish();
}

void DecodeStream::Vanish() {
  const std::lock_guard lock(mutex_);
  DropItems();
}

void DecodeStream::DropItems() {
  over_ = true;
  for (const auto& item : items_) item->handle.Cancel();
  items_.clear();
}

}  // namespace dcp
