#include "base/status.h"

#include <array>
#include <cstdio>
#include <cstdlib>

namespace dcp {
namespace {

using enum StatusCode;

constexpr ReasonEntry kReasons[] = {
    {Reason::kSequenceId, "SEQUENCE_ID", kInvalidArgument},
    {Reason::kRequestId, "REQUEST_ID", kInvalidArgument},
    {Reason::kDtype, "DTYPE", kInvalidArgument},
    {Reason::kShape, "SHAPE", kInvalidArgument},
    {Reason::kByteSize, "BYTE_SIZE", kInvalidArgument},
    {Reason::kTensorData, "TENSOR_DATA", kInvalidArgument},
    {Reason::kLayer, "LAYER", kInvalidArgument},
    {Reason::kBatchSize, "BATCH_SIZE", kInvalidArgument},
    {Reason::kTokenCount, "TOKEN_COUNT", kInvalidArgument},
    {Reason::kDuplicateSequence, "DUPLICATE_SEQUENCE", kInvalidArgument},
    {Reason::kStepId, "STEP_ID", kInvalidArgument},
    {Reason::kPosition, "POSITION", kInvalidArgument},
    {Reason::kLseBase, "LSE_BASE", kInvalidArgument},
    {Reason::kTimeout, "TIMEOUT", kInvalidArgument},
    {Reason::kLease, "LEASE", kInvalidArgument},
    {Reason::kPage, "PAGE", kInvalidArgument},
    {Reason::kCoverage, "COVERAGE", kInvalidArgument},
    {Reason::kProtocol, "PROTOCOL", kInvalidArgument},
    {Reason::kConfig, "CONFIG", kInvalidArgument},
    {Reason::kSequenceNotFound, "SEQUENCE_NOT_FOUND", kNotFound},
    {Reason::kSequenceGeneration, "SEQUENCE_GENERATION", kNotFound},
    {Reason::kSequenceExists, "SEQUENCE_EXISTS", kAlreadyExists},
    {Reason::kGeometry, "GEOMETRY", kFailedPrecondition},
    {Reason::kIncompleteToken, "INCOMPLETE_TOKEN", kFailedPrecondition},
    {Reason::kBackendContract, "BACKEND_CONTRACT", kFailedPrecondition},
    {Reason::kLengthConflict, "LENGTH_CONFLICT", kAborted},
    {Reason::kStaleStep, "STALE_STEP", kAborted},
    {Reason::kReplayMismatch, "REPLAY_MISMATCH", kAborted},
    {Reason::kEpochChanged, "EPOCH_CHANGED", kAborted},
    {Reason::kAppendOpen, "APPEND_OPEN", kAborted},
    {Reason::kAppendCancelled, "APPEND_CANCELLED", kAborted},
    {Reason::kPositionGap, "POSITION_GAP", kOutOfRange},
    {Reason::kReadRange, "READ_RANGE", kOutOfRange},
    {Reason::kContextLimit, "CONTEXT_LIMIT", kOutOfRange},
    {Reason::kKvCapacity, "KV_CAPACITY", kResourceExhausted},
    {Reason::kSequenceLimit, "SEQUENCE_LIMIT", kResourceExhausted},
    {Reason::kOverloaded, "OVERLOADED", kResourceExhausted},
    {Reason::kStepDeadline, "STEP_DEADLINE", kDeadlineExceeded},
    {Reason::kAppendIdle, "APPEND_IDLE", kDeadlineExceeded},
    {Reason::kCancelled, "CANCELLED", kCancelled},
    {Reason::kRankFailed, "RANK_FAILED", kAborted},
    {Reason::kRanksDown, "RANKS_DOWN", kUnavailable},
    {Reason::kDraining, "DRAINING", kUnavailable},
    {Reason::kUnsupported, "UNSUPPORTED", kUnimplemented},
    {Reason::kInternal, "INTERNAL", kInternal},
};

constexpr bool InEnumOrder() {
  for (std::size_t i = 0; i < std::size(kReasons); ++i) {
    if (static_cast<std::size_t>(kReasons[i].reason) != i + 1) return false;
  }
  return std::size(kReasons) == static_cast<std::size_t>(Reason::kInternal);
}
static_assert(InEnumOrder(), "kReasons is indexed by Reason");

}  // namespace

std::span<const ReasonEntry> Reasons() { return kReasons; }

std::string_view ReasonName(Reason reason) {
  return reason == Reason::kNone ? "OK" : kReasons[static_cast<std::size_t>(reason) - 1].name;
}

StatusCode CodeOf(Reason reason) {
  return reason == Reason::kNone ? kOk : kReasons[static_cast<std::size_t>(reason) - 1].code;
}

std::string_view CodeName(StatusCode code) {
  switch (code) {
    case kOk: return "OK";
    case kCancelled: return "CANCELLED";
    case kInvalidArgument: return "INVALID_ARGUMENT";
    case kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case kNotFound: return "NOT_FOUND";
    case kAlreadyExists: return "ALREADY_EXISTS";
    case kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case kFailedPrecondition: return "FAILED_PRECONDITION";
    case kAborted: return "ABORTED";
    case kOutOfRange: return "OUT_OF_RANGE";
    case kUnimplemented: return "UNIMPLEMENTED";
    case kInternal: return "INTERNAL";
    case kUnavailable: return "UNAVAILABLE";
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  std::string text(CodeName(code()));
  return text.append("/").append(ReasonName(reason_)).append(": ").append(message_);
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: DCP_CHECK failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace dcp
