// grpc.health.v1 and reflection without their generated code, which Debian does not ship: the few
// bytes are written by hand.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>

namespace dcp {

enum class ServingStatus : std::uint8_t {
  kUnknown = 0,
  kServing = 1,
  kNotServing = 2,
  kError = 255
};

// Of `service` ("" for the whole server); kError when the call fails.
ServingStatus CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                          const std::string& service);

// The bytes of the answer to reflection's list_services, in which names stand as they are.
std::string ListServices(const std::shared_ptr<grpc::Channel>& channel, const std::string& version);

}  // namespace dcp
