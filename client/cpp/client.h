// A connection to one dcp-server. Every call has a deadline. Thread-safe.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "base/time.h"
#include "client/cpp/rpc_error.h"
#include "dcp/v1/decode.grpc.pb.h"

namespace dcp {

class Client {
 public:
  // Connects, asks GetServerInfo, and sets the channel's message limits by its answer. `address`
  // is host:port or unix:PATH.
  static RpcResult<std::unique_ptr<Client>> Connect(const std::string& address,
                                                    Millis timeout = Millis(10'000));

  // As it was at Connect.
  const v1::GetServerInfoResponse& info() const { return info_; }
  v1::DecodeService::StubInterface& stub() { return *stub_; }

  RpcResult<v1::GetServerInfoResponse> GetServerInfo();
  RpcResult<v1::CreateSequenceResponse> CreateSequence(const v1::CreateSequenceRequest& request);
  RpcResult<v1::ForkSequenceResponse> ForkSequence(const v1::ForkSequenceRequest& request);
  RpcResult<v1::ReleaseSequencesResponse> ReleaseSequences(
      const v1::ReleaseSequencesRequest& request);
  RpcResult<v1::GetSequenceResponse> GetSequence(const v1::GetSequenceRequest& request);
  RpcResult<v1::ListSequencesResponse> ListSequences(const v1::ListSequencesRequest& request);
  RpcResult<v1::DecodeStepResponse> DecodeStep(const v1::DecodeStepRequest& request);
  RpcResult<v1::GetLoadResponse> GetLoad();

 private:
  Client() = default;
  std::unique_ptr<v1::DecodeService::StubInterface> stub_;
  v1::GetServerInfoResponse info_;
  Millis timeout_{};
};

enum class Health { kUnknown, kServing, kNotServing, kServiceUnknown };
// grpc.health.v1 Check of the whole server.
RpcResult<Health> CheckHealth(const std::string& address, Millis timeout = Millis(10'000));

}  // namespace dcp
