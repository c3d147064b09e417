// The stable error reasons of dcp: google.rpc.ErrorInfo.reason on the wire. One cause, one reason,
// one code. docs/api.md lists them for users; a test holds the two lists together.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace dcp {

enum class StatusCode : std::uint8_t;

enum class Reason : std::uint8_t {
  kNone,  // OK
  // The request is malformed; no state can make it valid.
  kSequenceId,
  kRequestId,
  kDtype,
  kShape,
  kByteSize,
  kTensorData,
  kLayer,
  kBatchSize,
  kTokenCount,
  kDuplicateSequence,
  kStepId,
  kPosition,
  kLseBase,
  kTimeout,
  kLease,
  kPage,
  kCoverage,
  kProtocol,
  kConfig,
  // The request does not fit the present state.
  kSequenceNotFound,
  kSequenceGeneration,
  kSequenceExists,
  kGeometry,
  kIncompleteToken,
  kBackendContract,
  kLengthConflict,
  kStaleStep,
  kReplayMismatch,
  kEpochChanged,
  kAppendOpen,
  kAppendCancelled,
  kPositionGap,
  kReadRange,
  kContextLimit,
  // Limits and time.
  kKvCapacity,
  kSequenceLimit,
  kOverloaded,
  kStepDeadline,
  kAppendIdle,
  kCancelled,
  // The server's own condition.
  kRankFailed,
  kRanksDown,
  kDraining,
  kUnsupported,
  kInternal,
};

struct ReasonEntry {
  Reason reason;
  std::string_view name;  // "LENGTH_CONFLICT"
  StatusCode code;
};

std::span<const ReasonEntry> Reasons();  // every reason but kNone, in enum order
std::string_view ReasonName(Reason reason);
StatusCode CodeOf(Reason reason);

}  // namespace dcp
