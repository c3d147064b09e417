// Conformance of every communicator: one suite walks the table of the program it is linked into
// (communicators.h). Inputs are arithmetic, so that expected values are closed forms.
#include "comm/communicator.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <thread>
#include <vector>

#include "base/bf16.h"
#include "tests/comm/communicators.h"

namespace dcp {

using testing::CommunicatorEntry;
using testing::Communicators;

namespace {

TimePoint In(int ms) { return Clock::now() + Millis(ms); }

// Runs f(communicator) on a thread per rank and returns each rank's status.
template <class F>
std::vector<Status> Spawn(const CommunicatorEntry& entry, int size, F f) {
  auto group = entry.make({.epoch = 1, .size = size});
  REQUIRE(group.ok());
  std::vector<Status> statuses(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      statuses[static_cast<std::size_t>(r)] = f(*(*group)[static_cast<std::size_t>(r)]);
    });
  }
  for (std::thread& t : threads) t.join();
  return statuses;
}

void RequireOk(const std::vector<Status>& statuses) {
  for (const Status& s : statuses) {
    INFO(s.ToString());
    REQUIRE(s.ok());
  }
}

Status Expect(bool condition, const char* what) {
  return condition ? Status::Ok() : Status(Reason::kInternal, what);
}

template <class T>
ConstBytes In(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}
template <class T>
MutBytes Out(std::vector<T>& v) {
  return std::as_writable_bytes(std::span(v));
}

const StreamRef kHost = StreamRef::Host();

}  // namespace

TEST_CASE("collectives move what they say") {
  for (const CommunicatorEntry& entry : Communicators()) {
    for (const int size : {1, 2, 3, 4, 5, 8}) {
      if (size > entry.max_size) break;
      for (const std::size_t n : {std::size_t{1}, std::size_t{3}, std::size_t{1000}}) {
        INFO(entry.name << " size " << size << " n " << n);
        RequireOk(Spawn(entry, size, [&](Communicator& comm) {
          const int rank = comm.rank().value();
          const auto ranks = static_cast<std::size_t>(size);
          for (int round = 0; round < 20; ++round) {  // back to back, buffers reused at once
            std::vector<int> in(n), all(n * ranks, -1);
            for (std::size_t i = 0; i < n; ++i) {
              in[i] = rank * 100000 + static_cast<int>(i) + round;
            }
            DCP_RETURN_IF_ERROR(comm.AllGather(In(in), Out(all), In(20000), kHost));
            for (std::size_t i = 0; i < all.size(); ++i) {
              const int want = static_cast<int>(i / n) * 100000 + static_cast<int>(i % n) + round;
              DCP_RETURN_IF_ERROR(Expect(all[i] == want, "all-gather"));
            }

            std::vector<int> send(n * ranks), recv(n * ranks, -1);
            for (std::size_t i = 0; i < send.size(); ++i) {
              send[i] = rank * 1000000 + static_cast<int>(i) + round;
            }
            DCP_RETURN_IF_ERROR(comm.AllToAll(In(send), Out(recv), In(20000), kHost));
            for (std::size_t i = 0; i < recv.size(); ++i) {
              const int from = static_cast<int>(i / n);
              const int at = rank * static_cast<int>(n) + static_cast<int>(i % n);
              DCP_RETURN_IF_ERROR(Expect(recv[i] == from * 1000000 + at + round, "all-to-all"));
            }

            // Small whole numbers: sums are exact in f32 and in bf16.
            std::vector<float> part(n * ranks), sum(n, -1);
            std::vector<Bf16> part16(n * ranks), sum16(n);
            for (std::size_t i = 0; i < part.size(); ++i) {
              part[i] = static_cast<float>(rank + static_cast<int>(i % 5));
              part16[i] = ToBf16(part[i]);
            }
            DCP_RETURN_IF_ERROR(
                comm.ReduceScatter(In(part), Out(sum), DType::kF32, In(20000), kHost));
            DCP_RETURN_IF_ERROR(
                comm.ReduceScatter(In(part16), Out(sum16), DType::kBf16, In(20000), kHost));
            for (std::size_t i = 0; i < n; ++i) {
              const int at = rank * static_cast<int>(n) + static_cast<int>(i);
              const auto want = static_cast<float>(size * (size - 1) / 2 + size * (at % 5));
              DCP_RETURN_IF_ERROR(Expect(sum[i] == want, "reduce-scatter f32"));
              DCP_RETURN_IF_ERROR(Expect(ToFloat(sum16[i]) == want, "reduce-scatter bf16"));
            }
            DCP_RETURN_IF_ERROR(comm.Barrier(In(20000), kHost));
          }
          return Status::Ok();
        }));
      }
    }
  }
}

TEST_CASE("reduce-scatter accumulates bf16 in f32, in rank order, and rounds once") {
  // 256 + 1 is not a bf16, 256 + 4 * 1 = 260 is: rounding at each step would lose every 1. Groups
  // smaller than that tell by the rounding of a sum of two: 256 + 3 is 260, and not 258.
  for (const CommunicatorEntry& entry : Communicators()) {
    const int size = std::min(5, entry.max_size);
    const float rest = size == 1 ? 0.0f : size == 2 ? 3.0f : 4.0f / static_cast<float>(size - 1);
    RequireOk(Spawn(entry, size, [&](Communicator& comm) {
      std::vector<Bf16> in(static_cast<std::size_t>(size),
                           ToBf16(comm.rank().value() == 0 ? 256.0f : rest));
      std::vector<Bf16> out(1);
      DCP_RETURN_IF_ERROR(comm.ReduceScatter(In(in), Out(out), DType::kBf16, In(20000), kHost));
      return Expect(ToFloat(out[0]) == (size == 1 ? 256.0f : 260.0f), "rounded more than once");
    }));
  }
}

TEST_CASE("a barrier holds everyone back") {
  for (const CommunicatorEntry& entry : Communicators()) {
    std::atomic<int> arrived{0};
    const int size = std::min(4, entry.max_size);
    RequireOk(Spawn(entry, size, [&](Communicator& comm) {
      for (int round = 1; round <= 50; ++round) {
        arrived.fetch_add(1);
        DCP_RETURN_IF_ERROR(comm.Barrier(In(20000), kHost));
        DCP_RETURN_IF_ERROR(Expect(arrived.load() >= size * round, "passed too early"));
        DCP_RETURN_IF_ERROR(comm.Barrier(In(20000), kHost));
      }
      return Status::Ok();
    }));
  }
}

TEST_CASE("wrong sizes are refused before anyone waits") {
  for (const CommunicatorEntry& entry : Communicators()) {
    RequireOk(Spawn(entry, std::min(2, entry.max_size), [&](Communicator& comm) {
      std::vector<int> four(4), three(3), five(5);
      DCP_RETURN_IF_ERROR(Expect(!comm.AllGather(In(four), Out(five), In(1), kHost).ok(), "ag"));
      DCP_RETURN_IF_ERROR(Expect(!comm.AllToAll(In(four), Out(three), In(1), kHost).ok(), "a2a"));
      DCP_RETURN_IF_ERROR(
          Expect(!comm.ReduceScatter(In(four), Out(five), DType::kF32, In(1), kHost).ok(), "rs"));
      return comm.Barrier(In(20000), kHost);  // the group is still good
    }));
  }
}

TEST_CASE("a late rank poisons the group with an error that names it") {
  for (const CommunicatorEntry& entry : Communicators()) {
    const int size = std::min(3, entry.max_size);
    if (size == 1) continue;  // nobody to wait for
    for (const int late : {0, size - 1}) {
      const std::vector<Status> statuses = Spawn(entry, size, [&](Communicator& comm) {
        std::vector<int> in(static_cast<std::size_t>(size)), out(static_cast<std::size_t>(size));
        if (comm.rank().value() == late) std::this_thread::sleep_for(Millis(300));
        const Status first = comm.AllToAll(In(in), Out(out), In(50), kHost);
        const TimePoint before = Clock::now();
        const Status again = comm.Barrier(In(20000), kHost);  // poisoned: at once
        DCP_RETURN_IF_ERROR(Expect(Clock::now() - before < Millis(1000), "waited"));
        DCP_RETURN_IF_ERROR(Expect(again.message() == first.message(), "the first error stays"));
        return first;
      });
      for (const Status& s : statuses) {
        CHECK(s.reason() == Reason::kRankFailed);
        CHECK(s.message() ==
              "rank " + std::to_string(late) + " did not arrive at all-to-all in time");
      }
    }
  }
}

TEST_CASE("abort from another thread ends every wait") {
  for (const CommunicatorEntry& entry : Communicators()) {
    const int size = std::min(3, entry.max_size);
    if (size == 1) continue;
    auto group = entry.make({.epoch = 1, .size = size});
    REQUIRE(group.ok());
    const auto others = static_cast<std::size_t>(size - 1);
    std::vector<std::thread> waiting;
    std::vector<Status> statuses(others);
    for (std::size_t r = 0; r < others; ++r) {
      waiting.emplace_back([&, r] { statuses[r] = (*group)[r]->Barrier(In(60000), kHost); });
    }
    std::this_thread::sleep_for(Millis(200));
    const TimePoint before = Clock::now();
    (*group)[others]->Abort(Status(Reason::kRankFailed, "rank 2 failed in attend: test"));
    for (std::thread& t : waiting) t.join();
    CHECK(Clock::now() - before < Millis(2000));
    for (const Status& s : statuses) CHECK(s.message() == "rank 2 failed in attend: test");
  }
}

TEST_CASE("ranks that call different operations fail within the deadline") {
  for (const CommunicatorEntry& entry : Communicators()) {
    if (entry.max_size == 1) continue;
    // Some are told at once what differs, some only that the operation did not end.
    const std::vector<Status> statuses = Spawn(entry, 2, [&](Communicator& comm) {
      std::vector<int> in(1000), out(2000);
      return comm.rank().value() == 0 ? comm.AllGather(In(in), Out(out), In(1000), kHost)
                                      : comm.AllToAll(In(out), Out(out), In(1000), kHost);
    });
    for (const Status& s : statuses) CHECK(s.reason() == Reason::kRankFailed);
  }
}

}  // namespace dcp
