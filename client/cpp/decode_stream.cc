#include "client/cpp/decode_stream.h"

namespace dcp {
namespace {

// How gRPC's completion queue names an operation.
void* Tag(std::intptr_t operation) {
  return reinterpret_cast<void*>(operation);  // NOLINT(performance-no-int-to-ptr)
}

// gRPC's completion queue takes wall-clock deadlines.
std::chrono::system_clock::time_point ToWall(TimePoint deadline) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(deadline - Clock::now());
}

}  // namespace

RpcResult<std::unique_ptr<DecodeStream>> DecodeStream::Open(Client& client, TimePoint deadline) {
  std::unique_ptr<DecodeStream> stream(new DecodeStream());
  stream->stream_ = client.stub().PrepareAsyncDecodeStream(&stream->context_, &stream->queue_);
  stream->set_pending(kStart);
  stream->stream_->StartCall(Tag(kStart));
  if (!stream->Await(kStart, deadline)) return stream->error_;
  if (!stream->last_ok_) {
    stream->CollectStatus();
    return stream->error_;
  }
  stream->StartRead();
  return stream;
}

DecodeStream::~DecodeStream() {
  context_.TryCancel();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

void DecodeStream::StartRead() {
  set_pending(kRead);
  stream_->Read(&reading_, Tag(kRead));
}

RpcError DecodeStream::Write(const v1::DecodeStepRequest& request, TimePoint deadline) {
  if (!error_.ok()) return error_;
  set_pending(kWrite);
  stream_->Write(request, Tag(kWrite));
  if (Await(kWrite, deadline) && !last_ok_) CollectStatus();
  return error_;
}

RpcResult<v1::DecodeStepResponse> DecodeStream::Read(TimePoint deadline) {
  while (answers_.empty()) {
    if (!error_.ok()) return error_;
    if (read_ended_) {
      CollectStatus();
      return error_;
    }
    if (!PumpOne(deadline)) return error_;
  }
  v1::DecodeStepResponse answer = std::move(answers_.front());
  answers_.pop_front();
  return answer;
}

RpcError DecodeStream::Finish(TimePoint deadline) {
  if (!error_.ok()) return error_;
  set_pending(kWritesDone);
  stream_->WritesDone(Tag(kWritesDone));
  if (!Await(kWritesDone, deadline)) return error_;
  while (!read_ended_) {
    if (!PumpOne(deadline)) return error_;
  }
  set_pending(kFinish);
  stream_->Finish(&status_, Tag(kFinish));
  if (!Await(kFinish, deadline)) return error_;
  return ToRpcError(status_);
}

bool DecodeStream::Await(Operation operation, TimePoint deadline) {
  while (pending(operation)) {
    if (!PumpOne(deadline)) return false;
  }
  return true;
}

bool DecodeStream::PumpOne(TimePoint deadline) {
  void* tag = nullptr;
  bool ok = false;
  switch (queue_.AsyncNext(&tag, &ok, ToWall(deadline))) {
    case grpc::CompletionQueue::GOT_EVENT: break;
    case grpc::CompletionQueue::TIMEOUT:
      context_.TryCancel();
      Die({grpc::StatusCode::DEADLINE_EXCEEDED, "", "DecodeStream: no answer in time", {}, {}});
      return false;
    case grpc::CompletionQueue::SHUTDOWN:
      Die({grpc::StatusCode::INTERNAL, "", "DecodeStream: completion queue shut down", {}, {}});
      return false;
  }
  const auto operation = static_cast<Operation>(reinterpret_cast<std::intptr_t>(tag));
  pending_ &= ~(1u << operation);
  if (operation != kRead) {
    last_ok_ = ok;
  } else if (ok) {
    answers_.push_back(std::move(reading_));
    reading_.Clear();
    StartRead();
  } else {
    read_ended_ = true;
  }
  return true;
}

void DecodeStream::Die(RpcError error) {
  if (error_.ok()) error_ = std::move(error);
}

void DecodeStream::CollectStatus() {
  // The call has ended, so Finish completes at once; the bound is for a broken transport.
  set_pending(kFinish);
  stream_->Finish(&status_, Tag(kFinish));
  if (!Await(kFinish, Clock::now() + Millis(5'000))) return;
  Die(status_.ok() ? RpcError{grpc::StatusCode::UNAVAILABLE,
                              "",
                              "DecodeStream: the server ended the stream",
                              {},
                              {}}
                   : ToRpcError(status_));
}

}  // namespace dcp
