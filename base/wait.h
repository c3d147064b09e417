// Bounded waiting on a condition variable.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/time.h"

namespace dcp {

// Waits until `ready()` or the deadline; returns ready(). Sleeps in slices on the system clock and
// judges by the monotonic one: thread sanitizers do not know the monotonic wait, and a jump of the
// system clock then costs one slice at most.
template <class Ready>
bool WaitUntil(std::condition_variable& cv, std::unique_lock<std::mutex>& lock, TimePoint deadline,
               Ready ready) {
  constexpr Nanos kSlice = Millis(100);
  while (!ready()) {
    const TimePoint now = Clock::now();
    if (now >= deadline) return false;
    const auto slice = std::min<Nanos>(kSlice, deadline - now);
    cv.wait_until(lock, std::chrono::system_clock::now() + slice);
  }
  return true;
}

// Polls `ready()` for a short while before a caller sleeps: a hand-over between threads that are
// both running then costs less than a wake-up. Gives the core away between polls.
template <class Ready>
bool SpinFor(Nanos budget, Ready ready) {
  const TimePoint end = Clock::now() + budget;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::this_thread::yield();
  } while (Clock::now() < end);
  return ready();
}

}  // namespace dcp
