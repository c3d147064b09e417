// Status in gRPC's terms: the code, the message and google.rpc details (ErrorInfo, RetryInfo).
#pragma once

#include <grpcpp/support/status.h>

#include "base/status.h"
#include "google/rpc/status.pb.h"

namespace dcp {

inline constexpr std::string_view kErrorDomain = "dcp";

// How a failed call ends.
grpc::Status ToGrpc(const Status& status);

// How a failed item of a stream is answered. Precondition: !status.ok().
void Encode(const Status& status, google::rpc::Status* out);

}  // namespace dcp
