#include "comm/in_process.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "base/bf16.h"
#include "base/wait.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(30);

enum class Op : std::uint8_t { kAllGather, kAllToAll, kReduceScatter, kBarrier };

std::string_view OpName(Op op) {
  switch (op) {
    case Op::kAllGather: return "all-gather";
    case Op::kAllToAll: return "all-to-all";
    case Op::kReduceScatter: return "reduce-scatter";
    case Op::kBarrier: return "barrier";
  }
  return "?";
}

// What a rank publishes for its peers; written before it arrives, read after all have arrived.
struct alignas(64) Seat {
  Op op{};
  ConstBytes in;
  std::atomic<std::uint64_t> arrivals{0};
};

class Group {
 public:
  explicit Group(int size) : seats_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(seats_.size()); }
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  void Poison(Status why) {
    {
      const std::lock_guard lock(mutex_);
      if (poisoned_.load(std::memory_order_relaxed)) return;
      error_ = std::move(why);
      poisoned_.store(true);  // seq_cst: pairs with readers_ in Read
    }
    arrived_.notify_all();
  }

  // The first error. Returns only when no rank reads a peer's buffer any more, so that the caller
  // may reuse its own. A copy under way is finite, so this is not a wait for a stalled rank.
  Status Error() {
    while (readers_.load() != 0) std::this_thread::yield();
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // Counts this rank in and waits for all others to have arrived as often.
  Status Meet(int rank, Op op, TimePoint deadline) {
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
        Poison(Status(Reason::kRankFailed, "rank " + std::to_string(late) + " did not arrive at " +
                                               std::string(OpName(op)) + " in time")
                   .With("rank", std::to_string(late)));
      }
    }
    return poisoned_.load() ? Error() : Status::Ok();
  }

  // Runs `copy`, which reads peers' buffers, unless the group is poisoned.
  template <class Copy>
  Status Read(Copy copy) {
    readers_.fetch_add(1);
    if (!poisoned_.load()) copy();
    readers_.fetch_sub(1);
    return poisoned_.load() ? Error() : Status::Ok();
  }

 private:
  // A rank that has not arrived `round` times, or -1.
  int Absent(std::uint64_t round) const {
    for (int r = 0; r < static_cast<int>(seats_.size()); ++r) {
      if (seats_[static_cast<std::size_t>(r)].arrivals.load(std::memory_order_acquire) < round) {
        return r;
      }
    }
    return -1;
  }

  std::vector<Seat> seats_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::atomic<bool> poisoned_{false};
  std::atomic<int> readers_{0};
  Status error_;  // guarded by mutex_
};

template <class T>
float Load(const std::byte* p, std::size_t i) {
  T x;
  std::memcpy(&x, p + i * sizeof(T), sizeof(T));
  if constexpr (std::is_same_v<T, Bf16>) {
    return ToFloat(x);
  } else {
    return x;
  }
}

template <class T>
void Store(std::byte* p, std::size_t i, float v) {
  T x;
  if constexpr (std::is_same_v<T, Bf16>) {
    x = ToBf16(v);
  } else {
    x = v;
  }
  std::memcpy(p + i * sizeof(T), &x, sizeof(T));
}

class InProcess final : public Communicator {
 public:
  InProcess(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  Rank rank() const override { return Rank(rank_); }
  int size() const override { return group_->size(); }
  void Abort(Status why) override { group_->Poison(std::move(why)); }

 private:
  Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    return Exchange(Op::kAllGather, in, deadline, [&] {
      for (int r = 0; r < size(); ++r) {
        std::ranges::copy(group_->seat(r).in, out.begin() + Offset(r, in.size()));
      }
    });
  }

  Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    const std::size_t chunk = in.size() / static_cast<std::size_t>(size());
    return Exchange(Op::kAllToAll, in, deadline, [&] {
      for (int r = 0; r < size(); ++r) {
        const ConstBytes from =
            group_->seat(r).in.subspan(chunk * static_cast<std::size_t>(rank_), chunk);
        std::ranges::copy(from, out.begin() + Offset(r, chunk));
      }
    });
  }

  Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                         StreamRef) override {
    return Exchange(Op::kReduceScatter, in, deadline,
                    [&] { dtype == DType::kBf16 ? Reduce<Bf16>(out) : Reduce<float>(out); });
  }

  Status DoBarrier(TimePoint deadline, StreamRef) override {
    return Exchange(Op::kBarrier, {}, deadline, [] {});
  }

  template <class T>
  void Reduce(MutBytes out) {
    for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
      float sum = 0;
      for (int r = 0; r < size(); ++r) {
        const std::byte* chunk =
            group_->seat(r).in.data() + out.size() * static_cast<std::size_t>(rank_);
        sum += Load<T>(chunk, i);
      }
      Store<T>(out.data(), i, sum);
    }
  }

  template <class Copy>
  Status Exchange(Op op, ConstBytes in, TimePoint deadline, Copy copy) {
    Seat& mine = group_->seat(rank_);
    mine.op = op;
    mine.in = in;
    DCP_RETURN_IF_ERROR(group_->Meet(rank_, op, deadline));  // every input is published
    for (int r = 0; r < size(); ++r) {
      const Seat& seat = group_->seat(r);
      if (seat.op != op || seat.in.size() != in.size()) {
        group_->Poison(Status(
            Reason::kRankFailed,
            "rank " + std::to_string(r) + " called " + std::string(OpName(seat.op)) + " with " +
                std::to_string(seat.in.size()) + " bytes, rank " + std::to_string(rank_) + " " +
                std::string(OpName(op)) + " with " + std::to_string(in.size())));
        return group_->Error();
      }
    }
    DCP_RETURN_IF_ERROR(group_->Read(copy));
    return group_->Meet(rank_, op, deadline);  // every input has been read
  }

  static std::ptrdiff_t Offset(int r, std::size_t chunk) {
    return static_cast<std::ptrdiff_t>(chunk * static_cast<std::size_t>(r));
  }

  std::shared_ptr<Group> group_;
  int rank_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> MakeInProcessGroup(const GroupSpec& spec) {
  if (spec.size < 1) {
    return Status(Reason::kConfig,
                  "group size is " + std::to_string(spec.size) + ", expected at least 1");
  }
  auto group = std::make_shared<Group>(spec.size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(static_cast<std::size_t>(spec.size));
  for (int r = 0; r < spec.size; ++r) ranks.push_back(std::make_unique<InProcess>(group, r));
  return ranks;
}

}  // namespace dcp
