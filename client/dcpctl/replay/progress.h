// How far a replay is, on stderr: a bar on a terminal, a line every few seconds elsewhere.
#pragma once

#include <cstdint>

#include "base/time.h"

namespace dcp {

class Progress {
 public:
  explicit Progress(std::int64_t total_tokens);
  ~Progress();  // ends the bar's line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void Show(std::int64_t tokens, std::int64_t requests, std::int64_t steps);

 private:
  const std::int64_t total_;
  const bool terminal_;
  const TimePoint begin_;
  TimePoint next_;
  bool shown_ = false;
};

}  // namespace dcp
