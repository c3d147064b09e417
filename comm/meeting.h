// Where ranks that are threads of one process meet: who has arrived, who reads whose buffers, and
// the first error. The common part of the communicators of one process.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "comm/communicator.h"

namespace dcp {

enum class CommOp : std::uint8_t { kAllGather, kAllToAll, kReduceScatter, kBarrier };
std::string_view OpName(CommOp op);

// "rank 2 did not arrive at all-to-all in time", with the rank as metadata.
Status LateRank(int rank, CommOp op);

class Meeting {
 public:
  // What a rank publishes for its peers; written before it arrives, read after all have arrived.
  struct alignas(64) Seat {
    CommOp op{};
    ConstBytes in;
    std::atomic<std::uint64_t> arrivals{0};
  };

  explicit Meeting(int size) : seats_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(seats_.size()); }
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  // The first error stays.
  void Poison(Status why);
  bool poisoned() const { return poisoned_.load(); }

  // The first error. Returns only when no rank reads a peer's buffer any more, so that the caller
  // may reuse its own. A copy under way is finite, so this is not a wait for a stalled rank.
  Status Error();

  // Publishes op and input, waits for all others to have done so, and checks that they agree.
  Status Publish(int rank, CommOp op, ConstBytes in, TimePoint deadline);

  // Counts this rank in and waits for all others to have arrived as often.
  Status Meet(int rank, CommOp op, TimePoint deadline);

  // Runs `copy`, which reads peers' buffers, unless the group is poisoned.
  template <class Copy>
  Status Read(Copy copy) {
    readers_.fetch_add(1);
    if (!poisoned_.load()) copy();
    readers_.fetch_sub(1);
    return poisoned_.load() ? Error() : Status::Ok();
  }

 private:
  int Absent(std::uint64_t round) const;

  std::vector<Seat> seats_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::atomic<bool> poisoned_{false};
  std::atomic<int> readers_{0};
  Status error_;  // guarded by mutex_
};

}  // namespace dcp
