#include "client/dcpctl/replay/admission.h"

#include <fmt/core.h>

#include <utility>

namespace dcp {
namespace {

constexpr Millis kRenewEvery(60'000);
constexpr Millis kPoll(100);

std::size_t Index(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Admission::Admission(const ReplayPlan& plan, const AdmissionLimits& limits, ServerCalls& calls,
                     ReplayStats& stats, const std::atomic<bool>& stop)
    : plan_(plan),
      limits_(limits),
      calls_(calls),
      stats_(stats),
      stop_(stop),
      begin_(Clock::now()),
      next_renewal_(begin_ + kRenewEvery),
      prefixes_(plan.prefixes.size()) {
  for (std::size_t i = 0; i < prefixes_.size(); ++i) {
    prefixes_[i].users_left = plan.prefixes[i].users;
  }
  thread_ = std::thread([this] { Run(); });
}

Admission::~Admission() {
  thread_.join();
  End(ready_);
  std::vector<v1::SequenceRef> left;
  for (const Prefix& p : prefixes_) {
    if (p.sequence) left.push_back(*p.sequence);
  }
  calls_.Release(left);
}

std::vector<std::unique_ptr<Session>> Admission::TakeReady(Millis patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !ready_.empty() || done_; });
  return std::exchange(ready_, {});
}

bool Admission::Exhausted() const {
  const std::lock_guard lock(mutex_);
  return done_ && ready_.empty();
}

void Admission::End(const std::vector<std::unique_ptr<Session>>& sessions) {
  std::vector<v1::SequenceRef> release;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& s : sessions) {
      release.push_back(s->sequence);
      EndLocked(*s->plan, release);
    }
  }
  calls_.Release(release);
  changed_.notify_all();
}

void Admission::Run() {
  for (const RequestPlan& request : plan_.requests) {
    const auto offset =
        std::chrono::duration<double, std::milli>(request.start_ms * limits_.time_scale);
    const TimePoint scheduled = begin_ + std::chrono::duration_cast<Clock::duration>(offset);
    if (!WaitForRoom(request, scheduled)) break;
    RpcResult<v1::SequenceRef> sequence = Prepare(request);
    std::vector<v1::SequenceRef> release;
    {
      const std::lock_guard lock(mutex_);
      if (sequence.ok()) {
        auto session = std::make_unique<Session>();
        session->plan = &request;
        session->sequence = *sequence;
        session->scheduled = scheduled;
        ready_.push_back(std::move(session));
      } else {
        EndLocked(request, release);
      }
    }
    changed_.notify_all();
    if (!sequence.ok()) {
      stats_.Error(fmt::format("request {}", request.index), sequence.error());
      calls_.Release(release);
    }
  }
  const std::lock_guard lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

bool Admission::WaitForRoom(const RequestPlan& request, TimePoint scheduled) {
  const std::int64_t blocks = BlocksOf(request.input + request.output, request.fork_length);
  for (;;) {
    if (stop_) return false;
    if (Clock::now() >= next_renewal_) RenewPrefixes();
    std::unique_lock lock(mutex_);
    const TimePoint now = Clock::now();
    // A lone request is let in always: what does not fit even then is the server's to say.
    const bool room =
        live_ == 0 || (live_ < limits_.max_live && blocks_used_ + blocks <= limits_.free_blocks);
    if (now >= scheduled && room) {
      ++live_;
      blocks_used_ += blocks;
      return true;
    }
    const TimePoint poll = now + kPoll;
    changed_.wait_until(lock, now < scheduled ? std::min(scheduled, poll) : poll);
  }
}

void Admission::RenewPrefixes() {
  next_renewal_ = Clock::now() + kRenewEvery;
  std::vector<v1::SequenceRef> live;
  {
    // Prefixes that End() takes meanwhile would answer NOT_FOUND, but End() takes a prefix only
    // when its last user has ended, and requests yet to come need these.
    const std::lock_guard lock(mutex_);
    for (const Prefix& p : prefixes_) {
      if (p.sequence && p.users_left > live_) live.push_back(*p.sequence);
    }
  }
  for (const v1::SequenceRef& s : live) calls_.Touch(s);
}

RpcResult<v1::SequenceRef> Admission::Prepare(const RequestPlan& request) {
  const std::string name = fmt::format("r{}", request.index);
  v1::SequenceRef sequence;
  if (request.fork_length > 0) {
    RpcResult<v1::SequenceRef> prefix = EnsurePrefix(request.prefix);
    if (!prefix.ok()) return prefix;
    RpcResult<v1::SequenceRef> fork = calls_.Fork(*prefix, request.fork_length, name);
    if (!fork.ok()) return fork;
    sequence = *fork;
  } else {
    RpcResult<v1::SequenceRef> created = calls_.Create(name);
    if (!created.ok()) return created;
    sequence = *created;
  }
  RpcError error = calls_.Append(sequence, request.content, request.fork_length,
                                 request.input - 1 - request.fork_length);
  if (!error.ok()) {
    calls_.Release({sequence});
    return error;
  }
  return sequence;
}

RpcResult<v1::SequenceRef> Admission::EnsurePrefix(int index) {
  const PrefixPlan& plan = plan_.prefixes[Index(index)];
  {
    const std::lock_guard lock(mutex_);
    if (prefixes_[Index(index)].sequence) return *prefixes_[Index(index)].sequence;
  }
  const std::string name = fmt::format("p{}", index);
  v1::SequenceRef sequence;
  if (plan.parent >= 0) {
    RpcResult<v1::SequenceRef> parent = EnsurePrefix(plan.parent);
    if (!parent.ok()) return parent;
    RpcResult<v1::SequenceRef> fork = calls_.Fork(*parent, plan.fork_length, name);
    if (!fork.ok()) return fork;
    sequence = *fork;
  } else {
    RpcResult<v1::SequenceRef> created = calls_.Create(name);
    if (!created.ok()) return created;
    sequence = *created;
  }
  RpcError error =
      calls_.Append(sequence, plan.content, plan.fork_length, plan.length - plan.fork_length);
  if (!error.ok()) {
    calls_.Release({sequence});
    return error;
  }
  const std::lock_guard lock(mutex_);
  Prefix& prefix = prefixes_[Index(index)];
  prefix.sequence = sequence;
  prefix.blocks = BlocksOf(plan.length, plan.fork_length);
  blocks_used_ += prefix.blocks;
  return sequence;
}

void Admission::EndLocked(const RequestPlan& request, std::vector<v1::SequenceRef>& release) {
  --live_;
  blocks_used_ -= BlocksOf(request.input + request.output, request.fork_length);
  for (int i = request.prefix; i >= 0; i = plan_.prefixes[Index(i)].parent) {
    Prefix& prefix = prefixes_[Index(i)];
    if (--prefix.users_left > 0 || !prefix.sequence) continue;
    release.push_back(*prefix.sequence);
    prefix.sequence.reset();
    blocks_used_ -= prefix.blocks;
  }
}

// At most: a shared partial block is copied on the first write.
std::int64_t Admission::BlocksOf(std::int64_t length, std::int64_t fork_length) const {
  return (length + limits_.block_tokens - 1) / limits_.block_tokens -
         fork_length / limits_.block_tokens;
}

}  // namespace dcp
