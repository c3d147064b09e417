// Generates traces: multi-turn conversations over a few shared system prompts. A turn's input is
// the turn before (its whole 512-token blocks keep their hash ids), the answer and a new message.
#pragma once

#include <cstdint>
#include <vector>

#include "client/workload/trace.h"

namespace dcp {

struct TraceOptions {
  std::int64_t requests = 64;
  std::uint64_t seed = 1;
  // About this share of a request's input is shared with earlier requests; in [0, 0.95].
  double shared_share = 0.5;
  // Every third conversation has at least this many turns, so that forks of forks go this deep.
  std::int64_t fork_depth = 3;
  std::int64_t system_prompts = 3;
  std::int64_t max_input = 4096;  // longest input, at least two blocks
  std::int64_t mean_output = 30;  // outputs are 1/2 to 3/2 of it
  double duration_s = 30;         // conversations begin within it
  std::int64_t burst = 4;         // conversations that begin at the same moment
  double regenerate_share = 0.1;  // requests that repeat the input before them
};

// Seeded and deterministic; sorted by time. Options must lie within their ranges (DCP_CHECK).
std::vector<TraceRow> GenerateTrace(const TraceOptions& options);

}  // namespace dcp
