// One DecodeStream. Not thread-safe: one thread writes and reads. Up to the server's max_inflight
// items may be written ahead of reading.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <deque>
#include <memory>

#include "base/time.h"
#include "client/cpp/client.h"
#include "client/cpp/rpc_error.h"
#include "dcp/v1/decode.grpc.pb.h"

namespace dcp {

class DecodeStream {
 public:
  static RpcResult<std::unique_ptr<DecodeStream>> Open(Client& client, TimePoint deadline);
  ~DecodeStream();  // cancels what is unanswered
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  // After an error (the stream ended, or the deadline passed) the stream is dead and every further
  // call answers the same error.
  RpcError Write(const v1::DecodeStepRequest& request, TimePoint deadline);
  RpcResult<v1::DecodeStepResponse> Read(TimePoint deadline);
  // Half-closes and waits for the server's status.
  RpcError Finish(TimePoint deadline);

 private:
  enum Operation : std::intptr_t { kStart = 1, kWrite, kRead, kWritesDone, kFinish };
  DecodeStream() = default;
  void StartRead();
  // Runs completions until `operation` has completed. False: dead.
  bool Await(Operation operation, TimePoint deadline);
  bool PumpOne(TimePoint deadline);
  void Die(RpcError error);
  void CollectStatus();
  bool pending(Operation operation) const { return (pending_ & (1u << operation)) != 0; }
  void set_pending(Operation operation) { pending_ |= 1u << operation; }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<
      grpc::ClientAsyncReaderWriterInterface<v1::DecodeStepRequest, v1::DecodeStepResponse>>
      stream_;
  v1::DecodeStepResponse reading_;
  std::deque<v1::DecodeStepResponse> answers_;
  grpc::Status status_;
  unsigned pending_ = 0;
  bool last_ok_ = false;  // of the completion of the latest operation that is not a read
  bool read_ended_ = false;
  RpcError error_;  // not OK: dead
};

}  // namespace dcp
