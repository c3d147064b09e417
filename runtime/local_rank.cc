// A CPU rank: a thread of this process that writes owned latents, attends, exchanges and merges.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/wait.h"
#include "kernels/contract_probe.h"
#include "kernels/worker_pool.h"
#include "runtime/exchange.h"
#include "runtime/kv_store.h"
#include "runtime/rank_port.h"
#include "runtime/sabotage.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(20);

// What ranks must agree on before any of them serves: everything that changes numbers.
struct ContractRecord {
  char backend[32] = {};
  std::int32_t lse_base = 0, empty_mark = 0, kv_format = 0, partial_dtype = 0, exchange = 0;
  std::int32_t ranks = 0, interleave = 0, page_tokens = 0;
  std::int32_t layers = 0, heads = 0, d_qk = 0, d_v = 0;
  double softmax_scale = 0;
};
static_assert(std::has_unique_object_representations_v<decltype(ContractRecord::backend)>);
static_assert(sizeof(ContractRecord) == 88, "no padding: records are compared as bytes");

ContractRecord RecordOf(const EngineConfig& c, const BackendEntry& backend) {
  ContractRecord r;
  backend.name.copy(r.backend, sizeof(r.backend) - 1);
  r.lse_base = static_cast<std::int32_t>(backend.caps.lse_base);
  r.empty_mark = static_cast<std::int32_t>(backend.caps.empty_mark);
  r.kv_format = static_cast<std::int32_t>(backend.caps.kv_format);
  r.partial_dtype = static_cast<std::int32_t>(c.attention.partial_dtype);
  r.exchange = static_cast<std::int32_t>(c.exchange);
  r.ranks = c.ranks.count;
  r.interleave = c.kv.interleave;
  r.page_tokens = c.kv.page_tokens;
  r.layers = c.model.layers;
  r.heads = c.model.heads;
  r.d_qk = c.model.d_qk();
  r.d_v = c.model.kv_lora_rank;
  r.softmax_scale = c.model.softmax_scale;
  return r;
}

// Everything the rank's thread touches. The thread and the port share it, so that a rank that is
// stuck when its port goes away still has all it may use when it wakes.
class Worker {
 public:
  Worker(RankSetup setup, KvStore kv, std::unique_ptr<AttentionBackend> backend)
      : setup_(std::move(setup)),
        config_(*setup_.config),
        kv_(std::move(kv)),
        backend_(std::move(backend)),
        exchange_(config_.exchange,
                  {.ranks = config_.ranks.count,
                   .heads = config_.model.heads,
                   .d_v = config_.model.kv_lora_rank,
                   .partial_dtype = config_.attention.partial_dtype},
                  config_.limits.max_step_tokens) {}

  void SetCommunicator(std::shared_ptr<Communicator> comm) {
    const std::lock_guard lock(comm_mutex_);
    comm_ = std::move(comm);
  }
  std::shared_ptr<Communicator> communicator() {
    const std::lock_guard lock(comm_mutex_);
    return comm_;
  }
  RankPhase phase() const { return phase_.load(std::memory_order_relaxed); }

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
    for (;;) {
      RankStep step;
      SpinFor(kSpin, [this] { return has_step_.load(std::memory_order_acquire); });
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || has_step_.load(std::memory_order_relaxed); });
        if (stop_) {
          exited_ = true;
          exit_.notify_all();
          return;
        }
        step = std::move(step_);
        step_ = {};
        has_step_.store(false, std::memory_order_relaxed);
      }
      RankResult result;
      result.rank = setup_.rank;
      result.status = Run(step, result);
      result.phase = phase();
      // The communicator's errors are RANK_FAILED and name a peer; all others are this rank's own.
      if (!result.status.ok() && result.status.reason() != Reason::kRankFailed) {
        result.own_fault = true;
        result.status =
            Status(Reason::kRankFailed, "rank " + std::to_string(setup_.rank) + " failed in " +
                                            std::string(PhaseName(result.phase)) + ": " +
                                            result.status.message());
        if (auto comm = communicator()) comm->Abort(result.status);  // peers must not wait
      }
      phase_.store(RankPhase::kIdle, std::memory_order_relaxed);
      step = {};  // before `done`: the engine may reuse the bytes right after
      setup_.done(result);
    }
  }

 private:
  Status Enter(RankPhase phase) {
    phase_.store(phase, std::memory_order_relaxed);
    if (!setup_.fault) return Status::Ok();
    const Status fault = setup_.fault(setup_.rank, phase);
    return fault.ok() ? fault : Status(Reason::kInternal, fault.message());
  }

  Status Run(const RankStep& step, RankResult& result) {
    DCP_ASSIGN_OR_RETURN(const StepView view, ParseStep(step.common, step.own));
    const StepHeader& h = *view.header;
    result.ticket = h.ticket;
    if (!kv_.Contains(view) || h.ranks != config_.ranks.count) {
      return Status(Reason::kInternal, "rank message: an index is outside the KV pool");
    }
    const TimePoint deadline = Clock::now() + Nanos(h.timeout_ns);
    switch (static_cast<RankMode>(h.mode)) {
      case RankMode::kAgree: return Agree(deadline);
      case RankMode::kWrite: return Write(view, step, result);
      case RankMode::kCompare:
        DCP_RETURN_IF_ERROR(Enter(RankPhase::kWrite));
        result.mismatch_token = kv_.Compare(h.layer, view.slots, step.new_kv);
        return Status::Ok();
      case RankMode::kAttend: return Attend(view, step, deadline, result);
    }
    return Status(Reason::kInternal, "rank message: unknown mode " + std::to_string(h.mode));
  }

  Status Agree(TimePoint deadline) {
    DCP_RETURN_IF_ERROR(Enter(RankPhase::kExchange));
    const auto comm = communicator();
    const ContractRecord mine = RecordOf(config_, setup_.backend);
    std::vector<ContractRecord> all(static_cast<std::size_t>(comm->size()));
    DCP_RETURN_IF_ERROR(comm->AllGather(std::as_bytes(std::span(&mine, 1)),
                                        std::as_writable_bytes(std::span(all)), deadline,
                                        StreamRef::Host()));
    for (std::size_t r = 0; r < all.size(); ++r) {
      // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): every bit counts, the scale's too
      if (std::memcmp(&all[r], &mine, sizeof(mine)) != 0) {
        return Status(Reason::kBackendContract,
                      "rank " + std::to_string(r) + " (" + std::string(all[r].backend) +
                          ") and rank " + std::to_string(setup_.rank) + " (" +
                          std::string(mine.backend) +
                          ") differ in backend, LSE base, geometry, scale, format or exchange");
      }
    }
    return Status::Ok();
  }

  Status Write(const StepView& view, const RankStep& step, RankResult& result) {
    const TimePoint begin = Clock::now();
    DCP_RETURN_IF_ERROR(Enter(RankPhase::kWrite));
    kv_.CopyPages(view.copies);
    if (view.header->has_new_kv != 0) kv_.Write(view.header->layer, view.slots, step.new_kv);
    result.write = Clock::now() - begin;
    return Status::Ok();
  }

  Status Attend(const StepView& view, const RankStep& step, TimePoint deadline,
                RankResult& result) {
    const StepHeader& h = *view.header;
    DCP_RETURN_IF_ERROR(Write(view, step, result));

    const TimePoint begin = Clock::now();
    DCP_RETURN_IF_ERROR(Enter(RankPhase::kAttend));
    const AttentionArgs args{
        .query = reinterpret_cast<const Bf16*>(step.query.data()),
        .kv = kv_.layer(h.layer),
        .page_stride = kv_.page_stride(),
        .entry_begin = view.entry_begin.data(),
        .block_table = view.block_table.data(),
        .block_table_stride = h.table_stride,
        .bound = view.bounds.data() + static_cast<std::ptrdiff_t>(setup_.rank) * h.tokens,
        .entries = h.entries,
        .tokens = h.tokens,
        .partial = exchange_.Layout(h.tokens)};
    DCP_RETURN_IF_ERROR(backend_->Run(args));
    result.attend = Clock::now() - begin;

    const ExchangeArgs exchange{.tokens = h.tokens,
                                .bounds = view.bounds,
                                .partial_base = PartialBase(),
                                .output_dtype = static_cast<DType>(h.output_dtype),
                                .output = step.output,
                                .lse = step.lse,
                                .lse_base = static_cast<LogBase>(h.lse_base),
                                .deadline = deadline};
    const auto comm = communicator();
    DCP_ASSIGN_OR_RETURN(
        const ExchangeResult done,
        RunExchange(exchange_, *comm, exchange, [this](RankPhase phase) { return Enter(phase); }));
    result.faulty_rows = done.faulty_rows;
    result.exchange = done.exchange;
    result.merge = done.merge;
    return Status::Ok();
  }

  LogBase PartialBase() const {
    const LogBase declared = setup_.backend.caps.lse_base;
    if (Sabotaged(Fault::kBaseSwapped) && setup_.rank == 1) {
      return declared == LogBase::kE ? LogBase::kTwo : LogBase::kE;
    }
    return declared;
  }

  const RankSetup setup_;
  const EngineConfig& config_;
  KvStore kv_;
  std::unique_ptr<AttentionBackend> backend_;
  ExchangeBuffers exchange_;

  std::mutex comm_mutex_;
  std::shared_ptr<Communicator> comm_;  // guarded by comm_mutex_; Abort comes from other threads
  std::atomic<RankPhase> phase_{RankPhase::kIdle};

  std::mutex mutex_;
  std::condition_variable wake_, exit_;
  RankStep step_;                      // guarded by mutex_
  std::atomic<bool> has_step_{false};  // written under mutex_
  bool stop_ = false;                  // guarded by mutex_
  bool exited_ = false;                // guarded by mutex_
};

class LocalRank final : public RankPort {
 public:
  LocalRank(std::shared_ptr<Worker> worker, Millis exit_bound)
      : worker_(std::move(worker)),
        exit_bound_(exit_bound),
        thread_([worker = worker_] { worker->Loop(); }) {}

  ~LocalRank() override {
    worker_->Stop();
    if (worker_->WaitExit(Clock::now() + exit_bound_)) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  void SetCommunicator(std::unique_ptr<Communicator> comm) override {
    worker_->SetCommunicator(std::move(comm));
  }
  void Start(const RankStep& step) override { worker_->Submit(step); }
  void Abort(const Status& why) override {
    if (auto comm = worker_->communicator()) comm->Abort(why);
  }
  RankPhase phase() const override { return worker_->phase(); }

 private:
  std::shared_ptr<Worker> worker_;
  Millis exit_bound_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<RankPort>> MakeLocalRankPort(const RankSetup& setup) {
  const EngineConfig& config = *setup.config;
  DCP_ASSIGN_OR_RETURN(KvStore kv, KvStore::Create(config, setup.poison_kv));
  const BackendSetup backend_setup{.geometry = config.Geometry(),
                                   .max_tokens = config.limits.max_step_tokens,
                                   .pool = setup.pool.get()};
  DCP_ASSIGN_OR_RETURN(std::unique_ptr<AttentionBackend> backend,
                       setup.backend.make(backend_setup));
  DCP_RETURN_IF_ERROR(ProbeContract(setup.backend, backend_setup, *backend));
  auto worker = std::make_shared<Worker>(setup, std::move(kv), std::move(backend));
  return std::unique_ptr<RankPort>(
      std::make_unique<LocalRank>(std::move(worker), config.ranks.timeout));
}

}  // namespace dcp
