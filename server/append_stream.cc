#include "server/append_stream.h"

#include <utility>

#include "server/message_bytes.h"
#include "server/status_grpc.h"

namespace dcp {
namespace {

Status ProtocolError(const char* message) { return Status(Reason::kProtocol, message); }

}  // namespace

void AppendStream::Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue) {
  const auto call = std::make_shared<AppendStream>(context, queue);
  call->rpc_.AsyncNotifyWhenDone(call->done_.Arm());
  context.service.RequestAppendKv(&call->rpc_, &call->stream_, &queue, &queue,
                                  call->accepted_.Arm());
}

AppendStream::AppendStream(ServiceContext& context, grpc::ServerCompletionQueue& queue)
    : RpcCall(context.live), context_(context), queue_(queue) {}

std::shared_ptr<AppendStream> AppendStream::Self() {
  return std::static_pointer_cast<AppendStream>(shared_from_this());
}

void AppendStream::OnAccepted(bool ok) {
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
    StartRead();
  } else {
    Drain();
  }
}

void AppendStream::StartRead() {
  const std::lock_guard lock(mutex_);
  if (!over_) stream_.Read(&incoming_, read_.Arm());
}

void AppendStream::OnRead(bool ok) {
  bool opened = false;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    opened = id_.has_value();
  }
  if (!ok) {
    if (!opened) {
      return Fail(ProtocolError("the stream has no message, expected a header"));
    }
    return stream_.SendInitialMetadata(fence_.Arm());
  }
  auto message = std::make_shared<v1::AppendKvRequest>();
  if (!ParseAndClear(&incoming_, message.get())) {
    return Fail(ProtocolError("the message does not decode, expected an AppendKvRequest"));
  }
  if (!opened) {
    if (!message->has_header()) {
      return Fail(ProtocolError("the first message is not a header"));
    }
    return Begin(message->header());
  }
  if (!message->has_chunk()) {
    return Fail(ProtocolError("a message after the first is not a chunk"));
  }
  Result<AppendChunk> chunk = BindChunk(std::move(message));
  if (!chunk.ok()) return Fail(chunk.status());
  Write(*std::move(chunk));
}

void AppendStream::OnFence(bool ok) {
  if (ok) {
    Commit();
  } else {
    Vanish();
  }
}

void AppendStream::Begin(const v1::AppendKvHeader& header) {
  Result<AppendRequest> request = Bind(header);
  if (!request.ok()) return Fail(request.status());
  // Weak: the engine keeps this for as long as the append is open, and the call must be able to go
  // before that.
  auto on_lost = [weak = std::weak_ptr(Self())](Status why) {
    if (const auto self = weak.lock()) {
      Guarded(*self, [&] { self->Fail(why); });
    }
  };
  context_.engine.BeginAppend(
      *std::move(request), std::move(on_lost),
      [self = Self()](const Result<AppendId>& id) { Guarded(*self, [&] { self->OnBegun(id); }); });
}

void AppendStream::OnBegun(const Result<AppendId>& id) {
  if (!id.ok()) return Fail(id.status());
  bool gone = false;
  {
    const std::lock_guard lock(mutex_);
    id_ = *id;
    gone = over_;
  }
  if (gone) {
    context_.engine.CancelAppend(*id);
  } else {
    StartRead();
  }
}

void AppendStream::Write(AppendChunk chunk) {
  context_.engine.WriteAppend(*id_, std::move(chunk), [self = Self()](Result<AppendId> written) {
    Guarded(*self, [&] {
      if (written.ok()) {
        self->StartRead();
      } else {
        self->Fail(written.status());
      }
    });
  });
}

void AppendStream::Commit() {
  context_.engine.CommitAppend(*id_, [self = Self()](const Result<AppendReply>& reply) {
    Guarded(*self, [&] { self->OnCommitted(reply); });
  });
}

void AppendStream::OnCommitted(const Result<AppendReply>& reply) {
  if (!reply.ok()) return Fail(reply.status());
  v1::AppendKvResponse response;
  Encode(*reply, &response);
  const grpc::ByteBuffer bytes = Serialize(response);
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
  }
  stream_.Finish(bytes, grpc::Status::OK, finished_.Arm());
}

void AppendStream::Fail(const Status& status) {
  std::optional<AppendId> id;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    id = id_;
  }
  // Ahead of the answer, so that whatever the client sends next finds the blocks returned. A no-op
  // where the engine has ended the append already.
  if (id) context_.engine.CancelAppend(*id);
  stream_.FinishWithError(ToGrpc(status), finished_.Arm());
}

void AppendStream::Abandon(const Status& why) { Fail(why); }

void AppendStream::Drain() { Fail(Status(Reason::kDraining, "the server is stopping")); }

void AppendStream::OnDone(bool) {
  if (rpc_.IsCancelled()) Vanish();
}

void AppendStream::Vanish() {
  std::optional<AppendId> id;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    id = id_;
  }
  if (id) context_.engine.CancelAppend(*id);
}

}  // namespace dcp
