// Errors as a server answers them: gRPC code, the stable reason of google.rpc.ErrorInfo, message.
#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"
#include "base/time.h"
#include "google/rpc/status.pb.h"

namespace dcp {

struct RpcError {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string reason;  // empty where gRPC itself answered
  std::string message;
  std::map<std::string, std::string> metadata;
  std::optional<Millis> retry_delay;  // of google.rpc.RetryInfo

  bool ok() const { return code == grpc::StatusCode::OK; }
  // The server asks to try again later: its queue or its KV is full.
  bool overloaded() const {
    return code == grpc::StatusCode::RESOURCE_EXHAUSTED && retry_delay.has_value();
  }
  std::string ToString() const;  // "ABORTED/LENGTH_CONFLICT: ..."
};

std::string_view GrpcCodeName(grpc::StatusCode code);

// Reads grpc-status-details-bin.
RpcError ToRpcError(const grpc::Status& status);
// The status of an item in a DecodeStream.
RpcError ToRpcError(const google::rpc::Status& status);

template <class T>
class [[nodiscard]] RpcResult {
 public:
  RpcResult(T value) : v_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  RpcResult(RpcError error) : v_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return v_.index() == 0; }
  RpcError error() const { return ok() ? RpcError{} : std::get<1>(v_); }
  // Precondition: ok().
  T& operator*() {
    DCP_CHECK(ok());
    return std::get<0>(v_);
  }
  T* operator->() { return &**this; }

 private:
  std::variant<T, RpcError> v_;
};

}  // namespace dcp
