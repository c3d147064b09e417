// What a replay does, known before it begins: which requests share prefixes, which prefix
// sequences that makes, who forks from whom and where. Pure; talks to nobody.
#pragma once

#include <cstdint>
#include <vector>

#include "client/workload/synthetic.h"
#include "client/workload/trace.h"

namespace dcp {

// A prefix that at least two requests share and that ends where they part: a sequence of its own,
// forked from its parent prefix, its remaining tokens appended.
struct PrefixPlan {
  int parent = -1;               // index of a PrefixPlan, smaller than its own; -1: none
  std::int64_t length = 0;       // tokens
  std::int64_t fork_length = 0;  // tokens it takes from the parent
  int users = 0;                 // requests whose input begins with it
  int depth = 0;                 // forks above it
  Content content{0};
};

// Prompt tokens [fork_length, input - 1) are appended; the last prompt token is the first decode
// step's, so that `output` steps append one token each and the sequence ends with
// input - 1 + output tokens.
struct RequestPlan {
  int index = 0;  // row of the trace
  double start_ms = 0;
  std::int64_t input = 0;
  std::int64_t output = 0;
  int prefix = -1;               // deepest shared prefix; -1: none
  std::int64_t fork_length = 0;  // 0: not a fork
  Content content{0};
};

struct ReplayPlan {
  std::vector<PrefixPlan> prefixes;
  std::vector<RequestPlan> requests;  // by start_ms
  std::int64_t output_tokens = 0;
  std::int64_t input_tokens = 0;
  std::int64_t shared_input_tokens = 0;  // of those, written once for an earlier request
  int fork_depth = 0;                    // forks from a root sequence to the deepest request
  double SharedShare() const;
};

ReplayPlan PlanReplay(const std::vector<TraceRow>& rows, const LengthScale& scale);

}  // namespace dcp
