#include "kernels/worker_pool.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace dcp {

TEST_CASE("Every task runs exactly once") {
  for (const int extra : {0, 1, 3, 8}) {
    WorkerPool pool(extra);
    CHECK(pool.width() == extra + 1);
    for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      pool.ParallelFor(count, [&](std::int64_t i) { runs[i].fetch_add(1); });
      for (const std::atomic<int>& n : runs) CHECK(n.load() == 1);
    }
  }
}

TEST_CASE("What tasks wrote is visible on return, in many short rounds") {
  WorkerPool pool(3);
  std::vector<int> plain(16);  // no atomics: a missing barrier shows under thread sanitizer
  for (int round = 0; round < 2000; ++round) {
    pool.ParallelFor(16, [&](std::int64_t i) { plain[i] += round; });
  }
  for (const int x : plain) CHECK(x == 2000 * 1999 / 2);
}

TEST_CASE("Several threads may call at once") {
  WorkerPool pool(2);
  std::vector<std::thread> callers;
  std::vector<std::int64_t> sums(4);
  for (std::size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&pool, &sum = sums[c]] {
      for (int round = 0; round < 300; ++round) {
        std::vector<std::int64_t> squares(50);
        pool.ParallelFor(50, [&](std::int64_t i) { squares[i] = i * i; });
        for (const std::int64_t x : squares) sum += x;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::int64_t sum : sums) CHECK(sum == 300 * (49 * 50 * 99 / 6));
}

TEST_CASE("Workers help, and two callers do not wait for each other") {
  WorkerPool pool(1);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  // Each task waits for the other: with one thread alone this would never end.
  std::atomic<int> inside{0};
  pool.ParallelFor(2, [&](std::int64_t) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  CHECK(threads.size() == 2);

  // The only worker is held by one call; another one is done by its caller alone.
  std::atomic<bool> release{false};
  std::atomic<int> held{0};
  std::thread holder([&] {
    pool.ParallelFor(2, [&](std::int64_t) {
      held.fetch_add(1);
      while (!release.load()) std::this_thread::yield();
    });
  });
  while (held.load() < 2) std::this_thread::yield();
  std::atomic<int> done{0};
  pool.ParallelFor(100, [&](std::int64_t) { done.fetch_add(1); });
  CHECK(done.load() == 100);
  release.store(true);
  holder.join();
}

TEST_CASE("A pool that slept wakes up, and one that never worked ends") {
  { const WorkerPool unused(4); }
  WorkerPool pool(2);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> done{0};
    pool.ParallelFor(9, [&](std::int64_t) { done.fetch_add(1); });
    CHECK(done.load() == 9);
  }
}

}  // namespace dcp
