// Status and Result<T>: how every layer reports errors. Codes are numerically gRPC's; every error
// carries one stable reason, and a message that says what was given and what was expected.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/reason.h"

namespace dcp {

// Numerically equal to grpc::StatusCode (server/status_grpc.cc asserts it).
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

std::string_view CodeName(StatusCode code);  // "INVALID_ARGUMENT"

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  // The code follows from the reason: one cause has one code.
  Status(Reason reason, std::string message) : reason_(reason), message_(std::move(message)) {}

  static Status Ok() { return {}; }
  bool ok() const { return reason_ == Reason::kNone; }
  StatusCode code() const { return CodeOf(reason_); }
  Reason reason() const { return reason_; }
  const std::string& message() const { return message_; }
  // Values of the message that a program may want, e.g. {"actual_length", "17"}; they travel in
  // google.rpc.ErrorInfo.metadata.
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  const Metadata& metadata() const { return metadata_; }
  Status With(std::string key, std::string value) && {
    metadata_.emplace_back(std::move(key), std::move(value));
    return std::move(*this);
  }
  std::string ToString() const;  // "INVALID_ARGUMENT/SHAPE: query has 2 dims, expected 3"

 private:
  Reason reason_ = Reason::kNone;
  std::string message_;
  Metadata metadata_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : v_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Status error) : v_(std::move(error)) {  // NOLINT(google-explicit-constructor)
    DCP_CHECK(!std::get<1>(v_).ok());
  }

  bool ok() const { return v_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(v_); }

  // Precondition: ok().
  T& operator*() & { return value(); }
  const T& operator*() const& { return const_cast<Result*>(this)->value(); }
  T&& operator*() && { return std::move(value()); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &const_cast<Result*>(this)->value(); }

 private:
  T& value() {
    DCP_CHECK(ok());
    return std::get<0>(v_);
  }
  std::variant<T, Status> v_;
};

}  // namespace dcp

#define DCP_CONCAT_(a, b) a##b
#define DCP_CONCAT(a, b) DCP_CONCAT_(a, b)
#define DCP_RETURN_IF_ERROR(expr)                       \
  do {                                                  \
    if (::dcp::Status s_ = (expr); !s_.ok()) return s_; \
  } while (false)
#define DCP_ASSIGN_OR_RETURN(lhs, expr) \
  DCP_ASSIGN_OR_RETURN_(DCP_CONCAT(r_, __COUNTER__), lhs, expr)
#define DCP_ASSIGN_OR_RETURN_(r, lhs, expr) \
  auto r = (expr);                          \
  if (!r.ok()) return r.status();           \
  lhs = *std::move(r)
