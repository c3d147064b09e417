// A CPU rank: writes owned latents, attends, exchanges and merges.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract_probe.h"
#include "kernels/worker_pool.h"
#include "runtime/exchange.h"
#include "runtime/kv_store.h"
#include "runtime/rank_contract.h"
#include "runtime/rank_thread.h"
#include "runtime/sabotage.h"

namespace dcp {
namespace {

class CpuRank {
 public:
  CpuRank(std::shared_ptr<RankLink> link, KvStore kv, std::unique_ptr<AttentionBackend> backend)
      : link_(std::move(link)),
        config_(link_->config()),
        kv_(std::move(kv)),
        backend_(std::move(backend)),
        exchange_(config_.exchange,
                  {.ranks = config_.ranks.count,
                   .heads = config_.model.heads,
                   .d_v = config_.model.kv_lora_rank,
                   .partial_dtype = config_.attention.partial_dtype},
                  config_.limits.max_step_tokens) {}

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
        DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kWrite));
        result.mismatch_token = kv_.Compare(h.layer, view.slots, step.new_kv);
        return Status::Ok();
      case RankMode::kAttend: return Attend(view, step, deadline, result);
    }
    return Status(Reason::kInternal, "rank message: unknown mode " + std::to_string(h.mode));
  }

 private:
  Status Agree(TimePoint deadline) {
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kExchange));
    const auto comm = link_->communicator();
    const RankContract mine = ContractOf(config_, backend_entry());
    std::vector<RankContract> all(static_cast<std::size_t>(comm->size()));
    DCP_RETURN_IF_ERROR(comm->AllGather(std::as_bytes(std::span(&mine, 1)),
                                        std::as_writable_bytes(std::span(all)), deadline,
                                        StreamRef::Host()));
    return CheckContracts(all, link_->rank());
  }

  Status Write(const StepView& view, const RankStep& step, RankResult& result) {
    const TimePoint begin = Clock::now();
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kWrite));
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
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kAttend));
    const AttentionArgs args{
        .query = reinterpret_cast<const Bf16*>(step.query.data()),
        .kv = kv_.layer(h.layer),
        .page_stride = kv_.page_stride(),
        .entry_begin = view.entry_begin.data(),
        .block_table = view.block_table.data(),
        .block_table_stride = h.table_stride,
        .bound = view.bounds.data() + static_cast<std::ptrdiff_t>(link_->rank()) * h.tokens,
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
    const auto comm = link_->communicator();
    DCP_ASSIGN_OR_RETURN(const ExchangeResult done,
                         RunExchange(exchange_, *comm, exchange,
                                     [this](RankPhase phase) { return link_->Enter(phase); }));
    result.faulty_rows = done.faulty_rows;
    result.exchange = done.exchange;
    result.merge = done.merge;
    return Status::Ok();
  }

  LogBase PartialBase() const {
    const LogBase declared = backend_entry().caps.lse_base;
    if (Sabotaged(Fault::kBaseSwapped) && link_->rank() == 1) {
      return declared == LogBase::kE ? LogBase::kTwo : LogBase::kE;
    }
    return declared;
  }

  const BackendEntry& backend_entry() const { return link_->setup().backend; }

  std::shared_ptr<RankLink> link_;
  const EngineConfig& config_;
  KvStore kv_;
  std::unique_ptr<AttentionBackend> backend_;
  ExchangeBuffers exchange_;
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
  const auto link = std::make_shared<RankLink>(setup);
  const auto rank = std::make_shared<CpuRank>(link, std::move(kv), std::move(backend));
  return StartRankThread(
      link, [rank](const RankStep& step, RankResult& result) { return rank->Run(step, result); });
}

}  // namespace dcp
