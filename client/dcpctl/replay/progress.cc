#include "client/dcpctl/replay/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace dcp {
namespace {

constexpr Millis kBarEvery(100);
constexpr Millis kLineEvery(5'000);
constexpr int kBarWidth = 32;

}  // namespace

Progress::Progress(std::int64_t total_tokens)
    : total_(std::max<std::int64_t>(1, total_tokens)),
      terminal_(isatty(STDERR_FILENO) == 1),
      begin_(Clock::now()),
      next_(begin_ + (terminal_ ? Millis(0) : kLineEvery)) {}

Progress::~Progress() {
  if (terminal_ && shown_) fmt::print(stderr, "\n");
}

void Progress::Show(std::int64_t tokens, std::int64_t requests, std::int64_t steps) {
  const TimePoint now = Clock::now();
  if (now < next_ && !(terminal_ && tokens >= total_)) return;
  next_ = now + (terminal_ ? kBarEvery : kLineEvery);
  shown_ = true;
  const double share = static_cast<double>(tokens) / static_cast<double>(total_);
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  if (!terminal_) {
    fmt::print(stderr, "replay: {:3.0f} %, {} tokens, {} requests ended, {} steps, {:.0f} s\n",
               share * 100, tokens, requests, steps, seconds);
    return;
  }
  const int filled = std::min(kBarWidth, static_cast<int>(share * kBarWidth));
  fmt::print(stderr, "\r[{}{}] {:3.0f} %  {} tokens  {} requests  {:.0f} s ",
             std::string(static_cast<std::size_t>(filled), '#'),
             std::string(static_cast<std::size_t>(kBarWidth - filled), '.'), share * 100, tokens,
             requests, seconds);
}

}  // namespace dcp
