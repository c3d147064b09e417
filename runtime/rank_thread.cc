#include "runtime/rank_thread.h"

#include <condition_variable>
#include <string>
#include <thread>
#include <utility>

#include "base/wait.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(20);

class Worker {
 public:
  Worker(std::shared_ptr<RankLink> link, RankRun run)
      : link_(std::move(link)), run_(std::move(run)) {}

  RankLink& link() { return *link_; }

  void Submit(const RankStep& step) {
    {
      const std::lock_guard lock(mutex_);
      step_ = step;
      has_step_.store(true, std::memory_order_release);
    }
    wake_.notify_one();
  }

  void Stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
  }

  // Whether the thread has left Loop() by the deadline.
  bool WaitExit(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    return WaitUntil(exit_, lock, deadline, [this] { return exited_; });
  }

  void Loop() {
    while (Serve()) {
    }
    run_ = nullptr;  // by this thread, and before the communicator that the link holds
    link_->SetCommunicator(nullptr);
    const std::lock_guard lock(mutex_);
    exited_ = true;
    exit_.notify_all();
  }

 private:
  // Waits for a step and runs it; false: there are no more.
  bool Serve() {
    RankStep step;
    SpinFor(kSpin, [this] { return has_step_.load(std::memory_order_acquire); });
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || has_step_.load(std::memory_order_relaxed); });
      if (stop_) return false;
      step = std::move(step_);
      step_ = {};
      has_step_.store(false, std::memory_order_relaxed);
    }
    RankResult result;
    result.rank = link_->rank();
    result.status = run_(step, result);
    result.phase = link_->phase();
    // The communicator's errors are RANK_FAILED and name a peer; all others are this rank's own.
    if (!result.status.ok() && result.status.reason() != Reason::kRankFailed) {
      result.own_fault = true;
      result.status =
          Status(Reason::kRankFailed, "rank " + std::to_string(result.rank) + " failed in " +
                                          std::string(PhaseName(result.phase)) + ": " +
                                          result.status.message());
      if (auto comm = link_->communicator()) comm->Abort(result.status);  // peers must not wait
    }
    link_->SetPhase(RankPhase::kIdle);
    step = {};  // before `done`: the engine may reuse the bytes right after
    link_->setup().done(result);
    return true;
  }

  std::shared_ptr<RankLink> link_;
  RankRun run_;
  std::mutex mutex_;
  std::condition_variable wake_, exit_;
  RankStep step_;                      // guarded by mutex_
  std::atomic<bool> has_step_{false};  // written under mutex_
  bool stop_ = false;                  // guarded by mutex_
  bool exited_ = false;                // guarded by mutex_
};

class RankThread final : public RankPort {
 public:
  RankThread(std::shared_ptr<Worker> worker, Millis exit_bound)
      : worker_(std::move(worker)),
        exit_bound_(exit_bound),
        thread_([worker = worker_] { worker->Loop(); }) {}

  ~RankThread() override {
    worker_->Stop();
    if (worker_->WaitExit(Clock::now() + exit_bound_)) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  void SetCommunicator(std::unique_ptr<Communicator> comm) override {
    worker_->link().SetCommunicator(std::move(comm));
  }
  void Start(const RankStep& step) override { worker_->Submit(step); }
  void Abort(const Status& why) override {
    if (auto comm = worker_->link().communicator()) comm->Abort(why);
  }
  RankPhase phase() const override { return worker_->link().phase(); }

 private:
  std::shared_ptr<Worker> worker_;
  Millis exit_bound_;
  std::thread thread_;
};

}  // namespace

void RankLink::SetCommunicator(std::shared_ptr<Communicator> comm) {
  const std::lock_guard lock(mutex_);
  comm_.swap(comm);  // the old one goes after the lock: its destructor may wait
}

std::shared_ptr<Communicator> RankLink::communicator() const {
  const std::lock_guard lock(mutex_);
  return comm_;
}

Status RankLink::Enter(RankPhase phase) {
  SetPhase(phase);
  if (!setup_.fault) return Status::Ok();
  const Status fault = setup_.fault(setup_.rank, phase);
  return fault.ok() ? fault : Status(Reason::kInternal, fault.message());
}

std::unique_ptr<RankPort> StartRankThread(std::shared_ptr<RankLink> link, RankRun run) {
  const Millis exit_bound = link->config().ranks.timeout;
  auto worker = std::make_shared<Worker>(std::move(link), std::move(run));
  return std::make_unique<RankThread>(std::move(worker), exit_bound);
}

}  // namespace dcp
