// The queue and the thread around EngineCore.
#include "runtime/engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/wait.h"
#include "kernels/contract_probe.h"
#include "runtime/engine_core.h"
#include "runtime/rank_makers.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(20);
constexpr Millis kTick{20};  // resolution of leases and idle appends

Status Draining() { return Status(Reason::kDraining, "the server is stopping"); }
Status RanksDown() {
  return Status(Reason::kRanksDown, "a rank did not come back after a failure");
}

}  // namespace

class Engine::Impl {
 public:
  // One request. `run` executes it, `refuse` answers it without; exactly one is called.
  struct Command {
    std::function<void()> run;
    std::function<void(Status)> refuse;
    AppendId append = 0;  // the open append that it belongs to; 0: none
  };

  Impl(EngineInfo info, std::unique_ptr<EngineCore> core, EngineHooks hooks)
      : info_(std::move(info)), core_(std::move(core)), hooks_(std::move(hooks)) {
    thread_ = std::thread([this] { Loop(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // Requests beyond the queue's capacity are refused. Those of open appends are not counted against
  // it: the number of appends and one chunk of each in flight bound them.
  void Post(Command command) {
    std::unique_lock lock(mutex_);
    if (Status refusal = Refusal(command); !refusal.ok()) {
      lock.unlock();
      command.refuse(std::move(refusal));
      return;
    }
    queue_.push_back(std::move(command));
    queued_.store(static_cast<int>(queue_.size()), std::memory_order_release);
    lock.unlock();
    wake_.notify_one();
  }

  // A request whose answer is what `op` returns on the engine's thread.
  template <class Reply, class Op>
  void Call(Done<Reply> done, Op op, AppendId append = 0) {
    auto shared = std::make_shared<Done<Reply>>(std::move(done));
    Post({.run = [this, shared, op = std::move(op)]() mutable { (*shared)(op(*core_)); },
          .refuse = [shared](Status status) { (*shared)(std::move(status)); },
          .append = append});
  }

  StepHandle Submit(StepRequest request, Done<StepReply> done);

  bool Drain(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    if (state_ == EngineState::kServing) state_ = EngineState::kDraining;
    wake_.notify_all();
    WaitUntil(drained_changed_, lock, deadline,
              [this] { return drained_ || state_ == EngineState::kRanksDown; });
    return drained_ && state_ != EngineState::kRanksDown;
  }

  EngineInfo info() const {
    EngineInfo info = info_;
    info.epoch = core_->counters().epoch;
    return info;
  }
  LoadInfo load() const {
    const EngineCounters& c = core_->counters();
    return {.sequences = c.sequences,
            .queued = queued_.load(std::memory_order_relaxed),
            .open_appends = c.open_appends,
            .total_blocks = info_.config.kv.blocks,
            .free_blocks = c.free_blocks,
            .cow_blocks = c.cow_blocks,
            .steps = c.steps,
            .failed_steps = c.failed_steps,
            .faulty_rows = c.faulty_rows,
            .rank_failures = c.rank_failures,
            .epoch = c.epoch};
  }
  EngineState state() const { return state_.load(std::memory_order_acquire); }

 private:
  void Loop() {
    EngineState published = EngineState::kServing;
    for (;;) {
      SpinFor(kSpin, [this] { return queued_.load(std::memory_order_acquire) > 0; });
      Command command;
      bool idle = false;
      {
        std::unique_lock lock(mutex_);
        const auto ready = [this] {
          return stop_ || !queue_.empty() || (state_ == EngineState::kDraining && !drained_);
        };
        WaitUntil(wake_, lock, Clock::now() + (core_->HasTimers() ? kTick : Millis(1000)), ready);
        if (stop_) break;
        idle = queue_.empty();
        if (!idle) {
          command = std::move(queue_.front());
          queue_.pop_front();
          queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
        }
      }
      if (!idle) command.run();
      command = {};
      core_->Expire(Clock::now(), [this](AppendId append) { return Waits(append); });
      if (core_->ranks_down()) GoDown();
      if (idle && state() == EngineState::kDraining) FinishDrain();
      if (state() != published) {
        published = state();
        if (hooks_.on_state) hooks_.on_state(published);
      }
    }
    RefuseAll(Draining());
    core_->LoseAppends(Draining());
  }

  // Why a request cannot be queued. Precondition: mutex_ is held.
  Status Refusal(const Command& command) const {
    const EngineState state = state_.load(std::memory_order_relaxed);
    if (state == EngineState::kRanksDown) return RanksDown();
    if (state == EngineState::kDraining || stop_) return Draining();
    const auto capacity = static_cast<std::size_t>(info_.config.limits.max_queue);
    if (command.append == 0 && queue_.size() >= capacity) {
      return Status(Reason::kOverloaded,
                    "limits.max_queue = " + std::to_string(capacity) + " requests are waiting");
    }
    return Status::Ok();
  }

  // Whether a request of this append is in the queue.
  bool Waits(AppendId append) {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(queue_, [append](const Command& c) { return c.append == append; });
  }

  void GoDown() {
    if (state() == EngineState::kRanksDown) return;
    {
      const std::lock_guard lock(mutex_);
      state_ = EngineState::kRanksDown;
    }
    drained_changed_.notify_all();
    RefuseAll(RanksDown());
    core_->LoseAppends(RanksDown());
  }

  void FinishDrain() {
    core_->LoseAppends(Draining());
    {
      const std::lock_guard lock(mutex_);
      drained_ = true;
    }
    drained_changed_.notify_all();
  }

  void RefuseAll(const Status& why) {
    std::deque<Command> queue;
    {
      const std::lock_guard lock(mutex_);
      queue.swap(queue_);
      queued_.store(0, std::memory_order_relaxed);
    }
    for (const Command& command : queue) command.refuse(why);
  }

  const EngineInfo info_;
  const std::unique_ptr<EngineCore> core_;  // counters() from any thread, the rest from thread_
  const EngineHooks hooks_;

  std::mutex mutex_;
  std::condition_variable wake_, drained_changed_;
  std::deque<Command> queue_;  // guarded by mutex_
  std::atomic<int> queued_{0};
  std::atomic<EngineState> state_{EngineState::kServing};  // written under mutex_
  bool stop_ = false;                                      // guarded by mutex_
  bool drained_ = false;                                   // guarded by mutex_
  std::thread thread_;
};

StepHandle Engine::Impl::Submit(StepRequest request, Done<StepReply> done) {
  const TimePoint submitted = Clock::now();
  const LimitsConfig& limits = info_.config.limits;
  const Millis timeout = request.timeout.value_or(limits.default_step_timeout);
  if (timeout <= Millis(0) || timeout > limits.max_step_timeout) {
    done(Status(Reason::kTimeout, "timeout is " + std::to_string(timeout.count()) +
                                      " ms, expected above 0 and at most " +
                                      std::to_string(limits.max_step_timeout.count())));
    return {};
  }
  struct Job {
    StepRequest request;
    Done<StepReply> done;
    std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  };
  auto job = std::make_shared<Job>(Job{.request = std::move(request), .done = std::move(done)});
  StepHandle handle(job->cancelled);
  const auto run = [this, job, submitted, deadline = submitted + timeout] {
    const TimePoint start = Clock::now();
    Result<StepReply> reply = [&]() -> Result<StepReply> {
      if (job->cancelled->load(std::memory_order_relaxed)) {
        return Status(Reason::kCancelled, "cancelled before launch");
      }
      if (start > deadline) {
        return Status(Reason::kStepDeadline, "the step's timeout passed before launch");
      }
      return core_->Step(job->request);
    }();
    job->request.keepalive.reset();
    if (reply.ok()) {
      reply->timing.queue = start - submitted;
      reply->timing.total = Clock::now() - submitted;
    }
    core_->CountStep(reply.ok());
    job->done(std::move(reply));
  };
  Post({.run = run, .refuse = [job](Status status) { job->done(std::move(status)); }});
  return handle;
}

Engine::Engine(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& config, EngineHooks hooks) {
  DCP_RETURN_IF_ERROR(Validate(config));
  const auto shared = std::make_shared<const EngineConfig>(config);
  const std::span<const BackendEntry> table = hooks.backends.empty() ? Backends() : hooks.backends;
  DCP_ASSIGN_OR_RETURN(const RankMakers makers, DefaultMakers(config.ranks));
  const bool cuda = config.ranks.device == RankDevice::kCuda;
  DCP_ASSIGN_OR_RETURN(const BackendEntry* backend,
                       SelectBackend(table, config.attention.backend, config.Geometry(),
                                     cuda ? Arch::kCuda : Arch::kHost));
  if (config.limits.max_query_tokens > backend->caps.max_query_tokens) {
    return Status(Reason::kConfig,
                  "limits.max_query_tokens = " + std::to_string(config.limits.max_query_tokens) +
                      ", backend " + std::string(backend->name) + " takes at most " +
                      std::to_string(backend->caps.max_query_tokens));
  }
  DCP_ASSIGN_OR_RETURN(std::unique_ptr<RankGroup> group,
                       RankGroup::Create(shared, *backend, hooks.poison_kv, hooks.rank_fault,
                                         hooks.make_port ? hooks.make_port : makers.port,
                                         hooks.make_group ? hooks.make_group : makers.group));
  EngineInfo info{.config = config,
                  .backend = std::string(backend->name),
                  .lse_base = backend->caps.lse_base,
                  .empty_mark = backend->caps.empty_mark,
                  .block_tokens = config.BlockTokens(),
                  .kv_bytes_per_rank = config.LatentBytes() * config.model.layers *
                                       config.kv.blocks * config.kv.page_tokens};
  auto core = std::make_unique<EngineCore>(shared, std::move(group));
  return std::unique_ptr<Engine>(
      new Engine(std::make_shared<Impl>(std::move(info), std::move(core), std::move(hooks))));
}

EngineInfo Engine::info() const { return impl_->info(); }
LoadInfo Engine::load() const { return impl_->load(); }
EngineState Engine::state() const { return impl_->state(); }
bool Engine::Drain(TimePoint deadline) { return impl_->Drain(deadline); }

void Engine::CreateSequence(CreateRequest request, Done<CreateReply> done) {
  impl_->Call(std::move(done),
              [r = std::move(request)](EngineCore& core) { return core.Create(r); });
}

void Engine::ForkSequence(ForkRequest request, Done<CreateReply> done) {
  impl_->Call(std::move(done), [r = std::move(request)](EngineCore& core) { return core.Fork(r); });
}

void Engine::TruncateSequence(TruncateRequest request, Done<SequenceInfo> done) {
  impl_->Call(std::move(done),
              [r = std::move(request)](EngineCore& core) { return core.Truncate(r); });
}

void Engine::ReleaseSequences(ReleaseRequest request, Done<ReleaseReply> done) {
  impl_->Call(std::move(done),
              [r = std::move(request)](EngineCore& core) { return core.Release(r); });
}

void Engine::GetSequence(GetSequenceRequest request, Done<SequenceInfo> done) {
  impl_->Call(std::move(done), [r = std::move(request)](EngineCore& core) { return core.Get(r); });
}

void Engine::ListSequences(ListRequest request, Done<ListReply> done) {
  impl_->Call(std::move(done), [r = std::move(request)](EngineCore& core) { return core.List(r); });
}

StepHandle Engine::SubmitStep(StepRequest request, Done<StepReply> done) {
  return impl_->Submit(std::move(request), std::move(done));
}

void Engine::BeginAppend(AppendRequest request, std::function<void(Status)> on_lost,
                         Done<AppendId> done) {
  impl_->Call(std::move(done), [r = std::move(request), lost = std::move(on_lost)](
                                   EngineCore& core) { return core.BeginAppend(r, lost); });
}

void Engine::WriteAppend(AppendId append, AppendChunk chunk, Done<AppendId> done) {
  impl_->Call(
      std::move(done),
      [append, c = std::move(chunk)](EngineCore& core) { return core.WriteAppend(append, c); },
      append);
}

void Engine::CommitAppend(AppendId append, Done<AppendReply> done) {
  impl_->Call(
      std::move(done), [append](EngineCore& core) { return core.CommitAppend(append); }, append);
}

void Engine::CancelAppend(AppendId append) {
  impl_->Call<AppendId>([](const Result<AppendId>&) {},
                        [append](EngineCore& core) -> Result<AppendId> {
                          core.CancelAppend(append);
                          return append;
                        },
                        append);
}

}  // namespace dcp
