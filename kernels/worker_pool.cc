#include "kernels/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dcp {
namespace {

// How long a thread looks for news before it sleeps: a wave of tasks often follows another within
// microseconds, and a sleeping thread needs tens of them to come back.
constexpr int kSpins = 400;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// One ParallelFor, on its caller's stack. `next` is the only field touched without the mutex.
struct Job {
  const std::function<void(std::int64_t)>* task;
  std::int64_t count;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> helpers{0};   // workers inside; written under the mutex, polled by the caller
  Job* following = nullptr;      // in the list of jobs that still want workers
  std::condition_variable left;  // the last helper has left

  void Work() {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*task)(i);
  }
};

}  // namespace

struct WorkerPool::State {
  std::mutex mutex;
  std::condition_variable news;
  Job* jobs = nullptr;         // oldest first
  std::atomic<int> queued{0};  // length of that list, for spinning without the mutex
  bool stop = false;
  std::vector<std::thread> threads;

  void Append(Job* job) {
    Job** end = &jobs;
    while (*end != nullptr) end = &(*end)->following;
    *end = job;
    queued.fetch_add(1, std::memory_order_relaxed);
  }

  // Nothing happens if another thread, which found the job exhausted, has removed it.
  void Remove(Job* job) {
    for (Job** p = &jobs; *p != nullptr; p = &(*p)->following) {
      if (*p != job) continue;
      *p = job->following;
      queued.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
  }

  void WorkerLoop() {
    std::unique_lock lock(mutex);
    while (true) {
      if (jobs == nullptr && !stop) {
        lock.unlock();
        for (int i = 0; i < kSpins && queued.load(std::memory_order_relaxed) == 0; ++i) Pause();
        lock.lock();
        news.wait(lock, [this] { return jobs != nullptr || stop; });
      }
      if (stop) return;
      Job* const job = jobs;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->Work();
      lock.lock();
      Remove(job);
      // The caller frees the job once it has seen 0 under the mutex, so this is the last access.
      if (job->helpers.fetch_sub(1, std::memory_order_relaxed) == 1) job->left.notify_one();
    }
  }
};

WorkerPool::WorkerPool(int extra_threads) : state_(std::make_unique<State>()) {
  state_->threads.reserve(static_cast<std::size_t>(std::max(extra_threads, 0)));
  for (int i = 0; i < extra_threads; ++i) {
    state_->threads.emplace_back([state = state_.get()] { state->WorkerLoop(); });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->news.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int WorkerPool::width() const { return static_cast<int>(state_->threads.size()) + 1; }

void WorkerPool::ParallelFor(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  if (count <= 1 || state_->threads.empty()) {
    for (std::int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  Job job{.task = &task, .count = count};
  {
    const std::lock_guard lock(state_->mutex);
    state_->Append(&job);
  }
  const std::int64_t wanted = count - 1;  // the caller takes one
  if (wanted >= static_cast<std::int64_t>(state_->threads.size())) {
    state_->news.notify_all();
  } else {
    for (std::int64_t i = 0; i < wanted; ++i) state_->news.notify_one();
  }
  job.Work();
  std::unique_lock lock(state_->mutex);
  state_->Remove(&job);  // from here on nobody new enters
  if (job.helpers.load(std::memory_order_relaxed) == 0) return;
  lock.unlock();
  for (int i = 0; i < kSpins && job.helpers.load(std::memory_order_relaxed) != 0; ++i) Pause();
  lock.lock();
  job.left.wait(lock, [&job] { return job.helpers.load(std::memory_order_relaxed) == 0; });
}

}  // namespace dcp
