#include "tests/integration/health_client.h"

#include <chrono>
#include <vector>

namespace dcp {
namespace {

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& s : slices) {
    bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
  }
  return bytes;
}

// A length-delimited field of a message.
std::string Field(int number, const std::string& value) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(value.size())} + value;
}

// One message to a method, one back; "error" when it fails.
std::string Exchange(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  grpc::CompletionQueue queue;
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  bool ok = next();
  if (ok) {
    const grpc::Slice slice(request);
    call->WriteLast(grpc::ByteBuffer(&slice, 1), {}, nullptr);
    ok = next();
  }
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  ok = next() && ok;
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  return ok ? BytesOf(response) : "error";
}

}  // namespace

ServingStatus CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                          const std::string& service) {
  const std::string request = service.empty() ? "" : Field(1, service);
  const std::string response = Exchange(channel, "/grpc.health.v1.Health/Check", request);
  if (response.empty()) return ServingStatus::kUnknown;
  if (response.size() != 2 || response[0] != 0x08) return ServingStatus::kError;
  return static_cast<ServingStatus>(response[1]);
}

std::string ListServices(const std::shared_ptr<grpc::Channel>& channel,
                         const std::string& version) {
  return Exchange(channel, "/grpc.reflection." + version + ".ServerReflection/ServerReflectionInfo",
                  Field(7, "*"));
}

}  // namespace dcp
