// What every call of DecodeService works with. Outlives all calls.
#pragma once

#include "dcp/v1/decode.grpc.pb.h"
#include "runtime/engine.h"
#include "server/bindings.h"
#include "server/live_calls.h"

namespace dcp {

// The service as gRPC's asynchronous API gives it. The two streams carry raw bytes, because gRPC
// answers "undecodable" and "the client has sent everything" with the same signal on a typed one.
template <class Base>
using AsyncSequences = v1::DecodeService::WithAsyncMethod_GetServerInfo<
    v1::DecodeService::WithAsyncMethod_CreateSequence<
        v1::DecodeService::WithAsyncMethod_ForkSequence<
            v1::DecodeService::WithAsyncMethod_TruncateSequence<
                v1::DecodeService::WithAsyncMethod_ReleaseSequences<
                    v1::DecodeService::WithAsyncMethod_GetSequence<
                        v1::DecodeService::WithAsyncMethod_ListSequences<
                            v1::DecodeService::WithAsyncMethod_GetLoad<Base>>>>>>>>;
using AsyncService = AsyncSequences<
    v1::DecodeService::WithAsyncMethod_DecodeStep<v1::DecodeService::WithRawMethod_DecodeStream<
        v1::DecodeService::WithRawMethod_AppendKv<v1::DecodeService::Service>>>>;

struct ServiceContext {
  Engine& engine;
  AsyncService& service;
  LiveCalls& live;
  ServerFacts facts;
  EngineConfig config;
};

}  // namespace dcp
