#include "comm/meeting.h"

#include <string>
#include <thread>
#include <utility>

#include "base/wait.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(30);

}  // namespace

std::string_view OpName(CommOp op) {
  switch (op) {
    case CommOp::kAllGather: return "all-gather";
    case CommOp::kAllToAll: return "all-to-all";
    case CommOp::kReduceScatter: return "reduce-scatter";
    case CommOp::kBarrier: return "barrier";
  }
  return "?";
}

Status LateRank(int rank, CommOp op) {
  return Status(Reason::kRankFailed, "rank " + std::to_string(rank) + " did not arrive at " +
                                         std::string(OpName(op)) + " in time")
      .With("rank", std::to_string(rank));
}

void Meeting::Poison(Status why) {
  {
    const std::lock_guard lock(mutex_);
    if (poisoned_.load(std::memory_order_relaxed)) return;
    error_ = std::move(why);
    poisoned_.store(true);  // seq_cst: pairs with readers_ in Read
  }
  arrived_.notify_all();
}

Status Meeting::Error() {
  while (readers_.load() != 0) std::this_thread::yield();
  const std::lock_guard lock(mutex_);
  return error_;
}

Status Meeting::Publish(int rank, CommOp op, ConstBytes in, TimePoint deadline) {
  Seat& mine = seat(rank);
  mine.op = op;
  mine.in = in;
  DCP_RETURN_IF_ERROR(Meet(rank, op, deadline));
  for (int r = 0; r < size(); ++r) {
    const Seat& theirs = seat(r);
    if (theirs.op == op && theirs.in.size() == in.size()) continue;
    Poison(Status(Reason::kRankFailed, "rank " + std::to_string(r) + " called " +
                                           std::string(OpName(theirs.op)) + " with " +
                                           std::to_string(theirs.in.size()) + " bytes, rank " +
                                           std::to_string(rank) + " " + std::string(OpName(op)) +
                                           " with " + std::to_string(in.size())));
    return Error();
  }
  return Status::Ok();
}

Status Meeting::Meet(int rank, CommOp op, TimePoint deadline) {
  const std::uint64_t round = seat(rank).arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  const auto ready = [&] { return poisoned_.load() || Absent(round) < 0; };
  if (Absent(round) < 0) {  // the last to arrive wakes the others
    { const std::lock_guard lock(mutex_); }
    arrived_.notify_all();
  } else if (!SpinFor(kSpin, ready)) {
    std::unique_lock lock(mutex_);
    if (!WaitUntil(arrived_, lock, deadline, ready)) {
      const int late = Absent(round);
      lock.unlock();
      Poison(LateRank(late, op));
    }
  }
  return poisoned_.load() ? Error() : Status::Ok();
}

// A rank that has not arrived `round` times, or -1.
int Meeting::Absent(std::uint64_t round) const {
  for (int r = 0; r < size(); ++r) {
    if (seats_[static_cast<std::size_t>(r)].arrivals.load(std::memory_order_acquire) < round) {
      return r;
    }
  }
  return -1;
}

}  // namespace dcp
