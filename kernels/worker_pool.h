// Host threads that the CPU backends of all ranks share. A rank thread that calls ParallelFor works
// too, so with as many ranks as cores a pool of no extra threads is the right one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace dcp {

class WorkerPool {
 public:
  // `extra_threads` beside the callers; 0 makes ParallelFor a plain loop.
  explicit WorkerPool(int extra_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // The threads that one ParallelFor may use at most, the caller included.
  int width() const;

  // Runs task(0) .. task(count - 1), each exactly once, on the caller and idle workers; returns
  // when all have finished. Several threads may call at once. `task` must not throw, and must not
  // call ParallelFor. Allocates nothing.
  void ParallelFor(std::int64_t count, const std::function<void(std::int64_t)>& task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dcp
