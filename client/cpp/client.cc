#include "client/cpp/client.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace dcp {
namespace {

using Stub = v1::DecodeService::StubInterface;

template <class Request, class Response>
RpcResult<Response> Call(Stub& stub,
                         grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
                         const Request& request, Millis timeout) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  Response response;
  const grpc::Status status = (stub.*method)(&context, request, &response);
  if (!status.ok()) return ToRpcError(status);
  return response;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, std::int64_t max_message) {
  grpc::ChannelArguments arguments;
  const auto limit =
      static_cast<int>(std::min<std::int64_t>(max_message, std::numeric_limits<int>::max()));
  arguments.SetMaxReceiveMessageSize(limit);
  arguments.SetMaxSendMessageSize(limit);
  // Proxies of the environment must not come between a client and a local server.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // One connection per client, even to the same address.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

constexpr std::int64_t kDefaultMessageBytes = 4 << 20;

Millis ToMillis(const google::protobuf::Duration& d) {
  return Millis(d.seconds() * 1000 + d.nanos() / 1'000'000);
}

}  // namespace

namespace {

// Callers size buffers by these.
RpcError CheckGeometry(const v1::ModelGeometry& model) {
  const auto within = [](std::int64_t x, std::int64_t low) { return x >= low && x <= 1 << 16; };
  if (within(model.layers(), 1) && within(model.heads(), 1) && within(model.kv_lora_rank(), 1) &&
      within(model.rope_dim(), 0)) {
    return {};
  }
  return {.code = grpc::StatusCode::INTERNAL,
          .message = "the server says that its model is { " + model.ShortDebugString() +
                     " }, expected 1 to 65536 layers, heads and dims"};
}

}  // namespace

RpcResult<std::unique_ptr<Client>> Client::Connect(const std::string& address, Millis timeout) {
  std::unique_ptr<Client> client(new Client());
  client->timeout_ = timeout;
  client->stub_ = v1::DecodeService::NewStub(MakeChannel(address, kDefaultMessageBytes));
  RpcResult<v1::GetServerInfoResponse> info = client->GetServerInfo();
  if (!info.ok()) return info.error();
  client->info_ = *info;
  if (RpcError error = CheckGeometry(info->model()); !error.ok()) return error;
  const std::int64_t limit = client->info_.limits().max_message_bytes();
  if (limit > 0) client->stub_ = v1::DecodeService::NewStub(MakeChannel(address, limit));
  return client;
}

RpcResult<v1::GetServerInfoResponse> Client::GetServerInfo() {
  return Call(*stub_, &Stub::GetServerInfo, v1::GetServerInfoRequest(), timeout_);
}
RpcResult<v1::CreateSequenceResponse> Client::CreateSequence(
    const v1::CreateSequenceRequest& request) {
  return Call(*stub_, &Stub::CreateSequence, request, timeout_);
}
RpcResult<v1::ForkSequenceResponse> Client::ForkSequence(const v1::ForkSequenceRequest& request) {
  return Call(*stub_, &Stub::ForkSequence, request, timeout_);
}
RpcResult<v1::ReleaseSequencesResponse> Client::ReleaseSequences(
    const v1::ReleaseSequencesRequest& request) {
  return Call(*stub_, &Stub::ReleaseSequences, request, timeout_);
}
RpcResult<v1::GetSequenceResponse> Client::GetSequence(const v1::GetSequenceRequest& request) {
  return Call(*stub_, &Stub::GetSequence, request, timeout_);
}
RpcResult<v1::ListSequencesResponse> Client::ListSequences(
    const v1::ListSequencesRequest& request) {
  return Call(*stub_, &Stub::ListSequences, request, timeout_);
}
RpcResult<v1::DecodeStepResponse> Client::DecodeStep(const v1::DecodeStepRequest& request) {
  // The step's own timeout answers first, with a reason.
  const Millis step = request.has_timeout() ? ToMillis(request.timeout())
                                            : ToMillis(info_.limits().default_step_timeout());
  return Call(*stub_, &Stub::DecodeStep, request, step + timeout_);
}
RpcResult<v1::GetLoadResponse> Client::GetLoad() {
  return Call(*stub_, &Stub::GetLoad, v1::GetLoadRequest(), timeout_);
}

// Debian ships no stub of grpc.health.v1. An empty HealthCheckRequest is no bytes, and of the
// answer only field 1, a varint below 128, matters.
RpcResult<Health> CheckHealth(const std::string& address, Millis timeout) {
  grpc::GenericStub stub(MakeChannel(address, kDefaultMessageBytes));
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  const grpc::Slice nothing;
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                          grpc::ByteBuffer(&nothing, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) return ToRpcError(status);
  std::vector<grpc::Slice> slices;
  if (!answer.Dump(&slices).ok()) return Health::kUnknown;
  std::string bytes;
  for (const grpc::Slice& s : slices) {
    bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
  }
  if (bytes.size() < 2 || bytes[0] != '\x08') return Health::kUnknown;
  switch (bytes[1]) {
    case 1: return Health::kServing;
    case 2: return Health::kNotServing;
    case 3: return Health::kServiceUnknown;
    default: return Health::kUnknown;
  }
}

}  // namespace dcp
