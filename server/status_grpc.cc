#include "server/status_grpc.h"

#include <optional>
#include <string_view>

#include "base/time.h"
#include "google/rpc/error_details.pb.h"

namespace dcp {
namespace {

// A cast is the whole conversion of a code, because these hold.
constexpr bool Same(StatusCode ours, grpc::StatusCode theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(Same(StatusCode::kOk, grpc::OK));
static_assert(Same(StatusCode::kCancelled, grpc::CANCELLED));
static_assert(Same(StatusCode::kInvalidArgument, grpc::INVALID_ARGUMENT));
static_assert(Same(StatusCode::kDeadlineExceeded, grpc::DEADLINE_EXCEEDED));
static_assert(Same(StatusCode::kNotFound, grpc::NOT_FOUND));
static_assert(Same(StatusCode::kAlreadyExists, grpc::ALREADY_EXISTS));
static_assert(Same(StatusCode::kResourceExhausted, grpc::RESOURCE_EXHAUSTED));
static_assert(Same(StatusCode::kFailedPrecondition, grpc::FAILED_PRECONDITION));
static_assert(Same(StatusCode::kAborted, grpc::ABORTED));
static_assert(Same(StatusCode::kOutOfRange, grpc::OUT_OF_RANGE));
static_assert(Same(StatusCode::kUnimplemented, grpc::UNIMPLEMENTED));
static_assert(Same(StatusCode::kInternal, grpc::INTERNAL));
static_assert(Same(StatusCode::kUnavailable, grpc::UNAVAILABLE));

// Statuses travel in HTTP/2 trailers, twice, and gRPC's default limit for all of them is 8 KiB; a
// message may quote what a client sent.
constexpr std::size_t kMaxText = 1024;

std::string Cut(std::string_view text) {
  if (text.size() <= kMaxText) return std::string(text);
  std::size_t end = kMaxText;
  // Not inside a UTF-8 character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)).append("...");
}

// When the same request may succeed later without anything else changing, how long to wait.
std::optional<Millis> RetryDelay(Reason reason) {
  switch (reason) {
    case Reason::kOverloaded: return Millis{5};
    case Reason::kKvCapacity: return Millis{50};
    case Reason::kSequenceLimit: return Millis{100};
    default: return std::nullopt;
  }
}

}  // namespace

void Encode(const Status& status, google::rpc::Status* out) {
  out->set_code(static_cast<int>(status.code()));
  out->set_message(Cut(status.message()));
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ReasonName(status.reason())));
  info.set_domain(std::string(kErrorDomain));
  for (const auto& [key, value] : status.metadata()) {
    (*info.mutable_metadata())[key] = Cut(value);
  }
  out->add_details()->PackFrom(info);
  if (const auto delay = RetryDelay(status.reason())) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int>(Nanos(*delay).count()));
    out->add_details()->PackFrom(retry);
  }
}

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details;
  Encode(status, &details);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), details.message(),
                      details.SerializeAsString());
}

}  // namespace dcp
