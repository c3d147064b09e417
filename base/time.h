// The one clock of dcp: monotonic. Deadlines are time points of it.
#pragma once

#include <chrono>

namespace dcp {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Nanos = std::chrono::nanoseconds;
using Millis = std::chrono::milliseconds;

}  // namespace dcp
