#include "client/dcpctl/replay/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace dcp {

std::int64_t Percentile(std::vector<std::int64_t> values, double p) {
  if (values.empty()) return 0;
  const auto rank =
      static_cast<std::size_t>(std::ceil(p / 100 * static_cast<double>(values.size())));
  const std::size_t i = std::clamp<std::size_t>(rank, 1, values.size()) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(i), values.end());
  return values[i];
}

Json ToJson(const ReplayReport& r) {
  const double rate = r.wall_s > 0 ? static_cast<double>(r.tokens) / r.wall_s : 0;
  return {
      {"requests", r.requests},
      {"steps", r.steps},
      {"tokens", r.tokens},
      {"forks", r.forks},
      {"forked_tokens", r.forked_tokens},
      {"cow_blocks", r.cow_blocks},
      {"rows_verified", r.rows_verified},
      {"rows_mismatched", r.rows_mismatched},
      {"max_rel_error", r.max_rel_error},
      {"step_p50_us", Percentile(r.step_us, 50)},
      {"step_p90_us", Percentile(r.step_us, 90)},
      {"step_p99_us", Percentile(r.step_us, 99)},
      {"tokens_per_s", rate},
      {"wall_s", r.wall_s},
      {"retries", r.retries},
      {"errors", r.errors},
      {"trace_requests", r.trace_requests},
      {"appended_tokens", r.appended_tokens},
      {"shared_share", r.shared_share},
      {"fork_depth", r.fork_depth},
      {"max_lse_error", r.max_lse_error},
      {"error_limit", r.error_limit},
      {"first_token_p50_us", Percentile(r.first_token_us, 50)},
      {"first_token_p99_us", Percentile(r.first_token_us, 99)},
      {"request_p50_us", Percentile(r.request_us, 50)},
      {"request_p99_us", Percentile(r.request_us, 99)},
  };
}

void PrintTable(const ReplayReport& r) {
  const auto line = [](const char* name, const std::string& value) {
    fmt::print("  {:<22} {}\n", name, value);
  };
  const auto times = [](const std::vector<std::int64_t>& us) {
    return fmt::format("{:>9.2f} {:>9.2f} {:>9.2f} ms",
                       static_cast<double>(Percentile(us, 50)) / 1000,
                       static_cast<double>(Percentile(us, 90)) / 1000,
                       static_cast<double>(Percentile(us, 99)) / 1000);
  };
  fmt::print("{}\n", Painted(Paint::kBold, "replay"));
  line("requests", fmt::format("{} of {}", r.requests, r.trace_requests));
  line("steps", fmt::format("{}", r.steps));
  line("tokens", fmt::format("{} decoded, {} appended", r.tokens, r.appended_tokens));
  line("forks", fmt::format("{} ({} tokens, {:.0f} % of input, depth {})", r.forks, r.forked_tokens,
                            r.shared_share * 100, r.fork_depth));
  line("blocks copied", fmt::format("{}", r.cow_blocks));
  line("", "      p50       p90       p99");
  line("step latency", times(r.step_us));
  line("first token", times(r.first_token_us));
  line("request", times(r.request_us));
  line("tokens/s",
       fmt::format("{:.1f}", r.wall_s > 0 ? static_cast<double>(r.tokens) / r.wall_s : 0.0));
  line("wall time", fmt::format("{:.1f} s", r.wall_s));
  line("retries", fmt::format("{}", r.retries));
  line("errors", Painted(r.errors == 0 ? Paint::kGood : Paint::kBad, fmt::format("{}", r.errors)));
  line("rows verified", fmt::format("{}", r.rows_verified));
  line("rows wrong", Painted(r.rows_mismatched == 0 ? Paint::kGood : Paint::kBad,
                             fmt::format("{}", r.rows_mismatched)));
  line("largest error", fmt::format("{:.2e} (limit {:.0e}), LSE {:.2e}", r.max_rel_error,
                                    r.error_limit, r.max_lse_error));
  fmt::print("{}\n", r.Passed() ? Painted(Paint::kGood, "PASS") : Painted(Paint::kBad, "FAIL"));
}

}  // namespace dcp
