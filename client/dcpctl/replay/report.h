// What a replay found, as a table and as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/dcpctl/output.h"

namespace dcp {

struct ReplayReport {
  std::int64_t trace_requests = 0;
  std::int64_t requests = 0;
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  std::int64_t forks = 0;
  std::int64_t forked_tokens = 0;
  std::int64_t appended_tokens = 0;
  std::int64_t cow_blocks = 0;
  std::int64_t rows_verified = 0;
  std::int64_t rows_mismatched = 0;
  double max_rel_error = 0;
  double max_lse_error = 0;
  double error_limit = 0;
  std::vector<std::int64_t> step_us;
  std::vector<std::int64_t> first_token_us;
  std::vector<std::int64_t> request_us;
  double wall_s = 0;
  std::int64_t retries = 0;
  std::int64_t errors = 0;
  double shared_share = 0;
  int fork_depth = 0;

  bool Passed() const { return rows_mismatched == 0 && errors == 0 && rows_verified > 0; }
};

// Nearest rank; 0 when there are no values. p in (0, 100].
std::int64_t Percentile(std::vector<std::int64_t> values, double p);

Json ToJson(const ReplayReport& report);
void PrintTable(const ReplayReport& report);

}  // namespace dcp
