// dcp.v1.DecodeService on gRPC's asynchronous API: which calls are waited for on a completion
// queue. Calls are started by the queue's thread and never block it.
#pragma once

#include <grpcpp/grpcpp.h>

#include "server/service_context.h"

namespace dcp {

inline constexpr const char* kServiceName = "dcp.v1.DecodeService";

// Waits for calls of every method on `queue`. `context` outlives them all.
void AcceptCalls(ServiceContext& context, grpc::ServerCompletionQueue& queue);

}  // namespace dcp
