// The flags of `dcpctl replay`.
#pragma once

#include <cstdint>
#include <string>

namespace dcp {

struct ReplayOptions {
  std::string trace;
  std::string format = "auto";
  std::int64_t max_requests = 0;  // 0: all
  std::string length_scale = "1";
  double time_scale = 1;  // 0: as fast as possible
  double verify_rate = 0.2;
  int concurrency = 64;
  std::uint64_t seed = 1;
  std::string output_dtype = "bf16";
  std::string json;  // file, "-" for stdout, empty for none
};

}  // namespace dcp
