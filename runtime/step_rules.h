// How a write is judged against what a layer has already applied. Pure functions; docs/api.md has
// the table.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "runtime/sequence.h"

namespace dcp {

enum class Verdict : std::uint8_t {
  kRead,
  kAppend,  // start = length
  kRewind,  // start < length, asked for
  kReplay,  // already applied: compare, do not write
};

struct WriteClaim {
  std::uint64_t step_id = 0;
  std::int64_t start = 0;
  std::int64_t count = 0;
  bool rewind = false;
};

// Errors: STEP_ID, STALE_STEP, REPLAY_MISMATCH, LENGTH_CONFLICT, APPEND_OPEN, POSITION_GAP,
// CONTEXT_LIMIT. `name` names the sequence and layer in messages.
Result<Verdict> JudgeWrite(const LayerState& layer, const WriteClaim& claim,
                           std::int64_t max_context, const std::string& name);

// A read of positions [start, start + count). Errors: READ_RANGE.
Status JudgeRead(const LayerState& layer, std::int64_t start, std::int64_t count,
                 const std::string& name);

// A truncation is applied to all layers: kReplay when every layer has it already.
// Errors: STEP_ID, STALE_STEP, REPLAY_MISMATCH, APPEND_OPEN.
Result<Verdict> JudgeTruncate(const Sequence& sequence, std::uint64_t step_id,
                              std::int64_t to_length);

}  // namespace dcp
