#include "client/cpp/rpc_error.h"

#include <fmt/format.h>

#include <array>

#include "google/rpc/error_details.pb.h"

namespace dcp {
namespace {

constexpr std::array<std::string_view, 17> kCodeNames = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

}  // namespace

std::string_view GrpcCodeName(grpc::StatusCode code) {
  const auto i = static_cast<std::size_t>(code);
  return i < kCodeNames.size() ? kCodeNames[i] : "UNKNOWN";
}

std::string RpcError::ToString() const {
  return fmt::format("{}{}{}: {}", GrpcCodeName(code), reason.empty() ? "" : "/", reason, message);
}

RpcError ToRpcError(const google::rpc::Status& status) {
  RpcError error;
  error.code = static_cast<grpc::StatusCode>(status.code());
  error.message = status.message();
  for (const google::protobuf::Any& detail : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) {
      error.reason = info.reason();
      error.metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (detail.Is<google::rpc::RetryInfo>() && detail.UnpackTo(&retry)) {
      error.retry_delay = Millis(retry.retry_delay().seconds() * 1000 +
                                 (retry.retry_delay().nanos() + 999'999) / 1'000'000);
    }
  }
  return error;
}

RpcError ToRpcError(const grpc::Status& status) {
  google::rpc::Status details;
  RpcError error;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    error = ToRpcError(details);
  }
  error.code = status.error_code();
  error.message = status.error_message();
  return error;
}

}  // namespace dcp
