// A GPU rank: what local_rank.cc does, enqueued on one stream of one device.
//
// A step's small data go up in one copy, its kernels read everything that varies from there, so the
// kernels and collectives of a step can be captured once for a capacity in tokens and replayed for
// every step that fits. Graphs are captured when the group agrees on its contract, by all ranks in
// the same order, and destroyed before the communicator whose operations they hold.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/cuda.h"
#include "base/log.h"
#include "kernels/contract_probe.h"
#include "kernels/kv_cuda.h"
#include "runtime/cuda_exchange.h"
#include "runtime/rank_contract.h"
#include "runtime/rank_thread.h"
#include "runtime/step_upload.h"

namespace dcp {
namespace {

enum Mark { kBegin, kWritten, kAttended, kExchanged, kMerged, kMarks };

// Bytes on the device and on the host, for tensors that steps bring or take.
struct Staging {
  cuda::PinnedBuffer host;
  cuda::DeviceBuffer device;
  static Result<Staging> Create(int device, std::size_t bytes, std::string_view what) {
    Staging s;
    DCP_ASSIGN_OR_RETURN(s.host, cuda::PinnedBuffer::Create(bytes, what));
    DCP_ASSIGN_OR_RETURN(s.device, cuda::DeviceBuffer::Create(device, bytes, what));
    return s;
  }
  Status Up(ConstBytes bytes, StreamRef stream) const {
    std::memcpy(host.data(), bytes.data(), bytes.size());
    return cuda::CopyAsync(device.data(), host.data(), bytes.size(), stream);
  }
};

// Steps of at most `capacity` tokens.
struct StepGraph {
  int capacity;
  cuda::Graph graph;
};

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

class CudaRank {
 public:
  static Result<std::shared_ptr<CudaRank>> Create(const std::shared_ptr<RankLink>& link,
                                                  int device);

  Status Run(const RankStep& step, RankResult& result) {
    DCP_RETURN_IF_ERROR(cuda::UseDevice(device_));
    const Status status = Dispatch(step, result);
    if (!status.ok()) Recover(status);
    return status;
  }

 private:
  explicit CudaRank(std::shared_ptr<RankLink> link, int device)
      : link_(std::move(link)), config_(link_->config()), device_(device) {}

  // The step failed: its peers must not wait for it, and nothing of it may still run when its
  // buffers are used again. A stream that does not drain keeps the rank here, and the engine
  // reports it as stuck.
  void Recover(const Status& why) {
    if (const auto comm = link_->communicator()) {
      comm->Abort(Status(Reason::kRankFailed,
                         "rank " + std::to_string(link_->rank()) + " failed in " +
                             std::string(PhaseName(link_->phase())) + ": " + why.message()));
    }
    while (cudaStreamQuery(stream_->raw()) == cudaErrorNotReady) {
      cudaGetLastError();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    cudaGetLastError();
    static_cast<void>(TakeGraphFault());  // of this step, not of the next
    graphs_.clear();
  }

  Status Dispatch(const RankStep& step, RankResult& result) {
    DCP_ASSIGN_OR_RETURN(const StepView view, ParseStep(step.common, step.own));
    const StepHeader& h = *view.header;
    result.ticket = h.ticket;
    if (!Contains(view) || h.ranks != config_.ranks.count) {
      return Status(Reason::kInternal, "rank message: an index is outside the KV pool");
    }
    const TimePoint deadline = Clock::now() + Nanos(h.timeout_ns);
    switch (static_cast<RankMode>(h.mode)) {
      case RankMode::kAgree: return Agree(deadline);
      case RankMode::kWrite: return Write(view, step, deadline, result);
      case RankMode::kCompare: return Compare(view, step, deadline, result);
      case RankMode::kAttend: return Attend(view, step, deadline, result);
    }
    return Status(Reason::kInternal, "rank message: unknown mode " + std::to_string(h.mode));
  }

  bool Contains(const StepView& view) const {
    const auto page_ok = [this](std::int32_t page) { return page >= 0 && page < kv_pool_.blocks; };
    return view.header->layer >= 0 && view.header->layer < config_.model.layers &&
           std::ranges::all_of(view.block_table, page_ok) &&
           std::ranges::all_of(
               view.copies, [&](const PageCopy& c) { return page_ok(c.from) && page_ok(c.to); }) &&
           std::ranges::all_of(view.slots, [this](std::int64_t s) {
             return s < kv_pool_.blocks * kv_pool_.page_tokens;
           });
  }

  Status Agree(TimePoint deadline) {
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kExchange));
    const auto comm = link_->communicator();
    graphs_.clear();
    const RankContract mine = ContractOf(config_, link_->setup().backend);
    const auto ranks = static_cast<std::size_t>(comm->size());
    std::vector<RankContract> all(ranks);
    std::byte* const in = agree_.device.data();
    std::byte* const out = in + sizeof(mine);
    DCP_RETURN_IF_ERROR(agree_.Up(std::as_bytes(std::span(&mine, 1)), stream_->ref()));
    DCP_RETURN_IF_ERROR(
        comm->AllGather({in, sizeof(mine)}, {out, ranks * sizeof(mine)}, deadline, stream_->ref()));
    DCP_RETURN_IF_ERROR(
        cuda::CopyAsync(agree_.host.data(), out, ranks * sizeof(mine), stream_->ref()));
    DCP_RETURN_IF_ERROR(comm->Wait(deadline, stream_->ref()));
    std::memcpy(all.data(), agree_.host.data(), ranks * sizeof(mine));
    DCP_RETURN_IF_ERROR(CheckContracts(all, link_->rank()));
    return Rehearse(*comm, deadline);
  }

  // Tests the exchange, which also connects what collectives connect on first use, and captures the
  // graphs.
  Status Rehearse(Communicator& comm, TimePoint deadline) {
    DCP_RETURN_IF_ERROR(TestExchange(comm, deadline));
    return graphs_wanted_ ? CaptureGraphs(comm, deadline) : Status::Ok();
  }

  // One for each power of two of tokens, up to the largest step.
  Status CaptureGraphs(Communicator& comm, TimePoint deadline) {
    DCP_RETURN_IF_ERROR(comm.CanCapture());
    DCP_ASSIGN_OR_RETURN(const std::size_t free_before, cuda::FreeBytes());
    for (int capacity = 1;; capacity = std::min(2 * capacity, config_.limits.max_step_tokens)) {
      const auto enqueue = [&] {
        return Enqueue(
            comm, capacity, deadline, [this](RankPhase phase) { return EnterInGraph(phase); },
            Marking::kInGraph);
      };
      DCP_ASSIGN_OR_RETURN(cuda::Graph graph, cuda::Graph::Capture(*stream_, enqueue));
      graphs_.push_back({capacity, std::move(graph)});
      if (capacity == config_.limits.max_step_tokens) break;
    }
    DCP_RETURN_IF_ERROR(comm.Wait(deadline, stream_->ref()));
    DCP_ASSIGN_OR_RETURN(const std::size_t free_after, cuda::FreeBytes());
    log::info("rank {}: {} graphs, for steps of up to {} tokens, take {:.1f} MiB of the device",
              link_->rank(), graphs_.size(), config_.limits.max_step_tokens,
              static_cast<double>(free_before - std::min(free_after, free_before)) / (1 << 20));
    return Status::Ok();
  }

  // One token whose partials are known: rank r says output 10 r with LSE ln(r + 1) or its like in
  // the declared base, which makes sum(10 r (r + 1)) / sum(r + 1) = 20 (N - 1) / 3 in every place.
  Status TestExchange(Communicator& comm, TimePoint deadline) {
    const StreamRef stream = stream_->ref();
    const int ranks = config_.ranks.count;
    const LogBase base = link_->setup().backend.caps.lse_base;
    const double natural = std::log(link_->rank() + 1.0);
    const auto lse = static_cast<float>(base == LogBase::kE ? natural : natural * kLog2E);
    DCP_RETURN_IF_ERROR(exchange_->Fill(1, 10.0f * static_cast<float>(link_->rank()), lse, stream));

    upload_->Begin();
    DeviceStep step{.tokens = 1, .output_dtype = DType::kF32};
    const std::vector<std::int32_t> bounds(Size(ranks), 1);
    DCP_ASSIGN_OR_RETURN(step.bounds, upload_->Add(std::span<const std::int32_t>(bounds)));
    upload_->step() = step;
    DCP_RETURN_IF_ERROR(upload_->Send(stream));
    DCP_RETURN_IF_ERROR(exchange_->Enqueue(comm,
                                           {.capacity = 1,
                                            .step = upload_->device_step(),
                                            .faults = upload_->faulty_rows(),
                                            .partial_base = base,
                                            .deadline = deadline,
                                            .stream = stream},
                                           [](RankPhase) { return Status::Ok(); }));
    const std::size_t items = Size(config_.model.heads / ranks) * Size(config_.model.kv_lora_rank);
    DCP_ASSIGN_OR_RETURN(const std::byte* output,
                         exchange_->Output(1, DType::kF32, upload_->faulty_rows(), stream));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(output_.data(), output, items * sizeof(float), stream));
    DCP_RETURN_IF_ERROR(comm.Wait(deadline, stream));
    const double want = 20.0 * (ranks - 1) / 3;
    const float* const got = output_.as<float>();
    const auto wrong = std::find_if(got, got + items, [want](float x) {
      return !(std::abs(x - want) <= 8e-3 * want);  // ag_rs may reduce bf16
    });
    if (wrong == got + items) return Status::Ok();
    return Status(Reason::kBackendContract,
                  "exchange self-test on rank " + std::to_string(link_->rank()) + ": element " +
                      std::to_string(wrong - got) + " is " + std::to_string(*wrong) +
                      ", expected " + std::to_string(want));
  }

  Status Write(const StepView& view, const RankStep& step, TimePoint deadline, RankResult& result) {
    const TimePoint begin = Clock::now();
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kWrite));
    // Appends may be longer than steps: their tokens and page copies pass in pieces.
    std::span<const PageCopy> copies = view.copies;
    std::size_t first = 0;
    const std::size_t tokens = view.header->has_new_kv != 0 ? view.slots.size() : 0;
    do {
      const std::size_t some_copies = std::min(copies.size(), max_copies_);
      const bool last_copies = some_copies == copies.size();
      const std::size_t n = last_copies ? std::min(tokens - first, max_tokens_) : 0;
      DCP_RETURN_IF_ERROR(SendPiece(view, step, first, n, copies.first(some_copies)));
      DCP_RETURN_IF_ERROR(CopyPages(kv_pool_, upload_->device_step(), stream_->ref()));
      DCP_RETURN_IF_ERROR(
          WriteKv(kv_pool_, new_kv_.device.as<Bf16>(), upload_->device_step(), stream_->ref()));
      DCP_RETURN_IF_ERROR(link_->communicator()->Wait(deadline, stream_->ref()));
      copies = copies.subspan(some_copies);
      first += n;
    } while (!copies.empty() || first < tokens);
    result.write = Clock::now() - begin;
    return Status::Ok();
  }

  Status Compare(const StepView& view, const RankStep& step, TimePoint deadline,
                 RankResult& result) {
    DCP_RETURN_IF_ERROR(link_->Enter(RankPhase::kWrite));
    for (std::size_t first = 0; first < view.slots.size(); first += max_tokens_) {
      const std::size_t n = std::min(view.slots.size() - first, max_tokens_);
      DCP_RETURN_IF_ERROR(SendPiece(view, step, first, n, {}));
      DCP_RETURN_IF_ERROR(CompareKv(kv_pool_, new_kv_.device.as<Bf16>(), upload_->device_step(),
                                    mismatch_.device.as<std::int32_t>(), stream_->ref()));
      DCP_RETURN_IF_ERROR(cuda::CopyAsync(mismatch_.host.data(), mismatch_.device.data(),
                                          sizeof(std::int32_t), stream_->ref()));
      DCP_RETURN_IF_ERROR(link_->communicator()->Wait(deadline, stream_->ref()));
      if (const std::int32_t at = *mismatch_.host.as<std::int32_t>(); at >= 0) {
        result.mismatch_token = static_cast<std::int32_t>(first) + at;
        return Status::Ok();
      }
    }
    return Status::Ok();
  }

  // `n` tokens from `first` of a step without queries.
  Status SendPiece(const StepView& view, const RankStep& step, std::size_t first, std::size_t n,
                   std::span<const PageCopy> copies) {
    upload_->Begin();
    DeviceStep to{.tokens = static_cast<std::int32_t>(n),
                  .kv_offset = view.header->layer * layer_stride_,
                  .has_new_kv = n > 0};
    DCP_RETURN_IF_ERROR(AddCopies(copies, to));
    DCP_ASSIGN_OR_RETURN(to.slots, upload_->Add(view.slots.subspan(n > 0 ? first : 0, n)));
    upload_->step() = to;
    DCP_RETURN_IF_ERROR(upload_->Send(stream_->ref()));
    const std::size_t latent = Size(kv_pool_.d_qk) * sizeof(Bf16);
    return n == 0 ? Status::Ok()
                  : new_kv_.Up(step.new_kv.subspan(first * latent, n * latent), stream_->ref());
  }

  Status AddCopies(std::span<const PageCopy> copies, DeviceStep& to) {
    static_assert(sizeof(PageCopy) == sizeof(DevicePageCopy));
    DCP_ASSIGN_OR_RETURN(const PageCopy* at, upload_->Add(copies));
    to.page_copies = reinterpret_cast<const DevicePageCopy*>(at);
    to.copies = static_cast<std::int32_t>(copies.size());
    return Status::Ok();
  }

  Status AddPlan(const AttentionStep& step) {
    DCP_ASSIGN_OR_RETURN(const StepUpload::Room room, upload_->Reserve(backend_->MaxPlanBytes()));
    DCP_ASSIGN_OR_RETURN(const std::size_t used, backend_->Plan(step, room.host));
    upload_->Shrink(room.host.size() - used);
    upload_->step().plan = room.device;
    return Status::Ok();
  }

  Status Attend(const StepView& view, const RankStep& step, TimePoint deadline,
                RankResult& result) {
    const StepHeader& h = *view.header;
    if (view.copies.size() > max_copies_) {
      return Status(Reason::kInternal, "a step of " + std::to_string(view.copies.size()) +
                                           " page copies, at most " + std::to_string(max_copies_));
    }
    const auto comm = link_->communicator();
    DCP_RETURN_IF_ERROR(SendStep(view, step));
    const StepGraph* const graph = GraphFor(h.tokens);
    if (graph != nullptr) {
      DCP_RETURN_IF_ERROR(graph->graph.Launch(stream_->ref()));
    } else {
      DCP_RETURN_IF_ERROR(Enqueue(
          *comm, h.tokens, deadline, [this](RankPhase phase) { return link_->Enter(phase); },
          Marking::kEager));
    }
    const std::size_t out_bytes = Size(h.tokens) * Size(step.output.row_bytes);
    const std::size_t lse_bytes = Size(step.lse.rows) * Size(step.lse.row_bytes);
    DCP_ASSIGN_OR_RETURN(const std::byte* output,
                         exchange_->Output(h.tokens, static_cast<DType>(h.output_dtype),
                                           upload_->faulty_rows(), stream_->ref()));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(output_.data(), output, out_bytes, stream_->ref()));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(lse_.data(), exchange_->lse(), lse_bytes, stream_->ref()));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(faults_.data(), upload_->faulty_rows(),
                                        sizeof(std::int64_t), stream_->ref()));
    DCP_RETURN_IF_ERROR(comm->Wait(deadline, stream_->ref()));
    DCP_RETURN_IF_ERROR(TakeGraphFault());
    Scatter(output_.data(), step.output);
    Scatter(lse_.data(), step.lse);
    result.faulty_rows = *faults_.as<std::int64_t>();
    return TakeTimes(result);
  }

  Status SendStep(const StepView& view, const RankStep& step) {
    const StepHeader& h = *view.header;
    upload_->Begin();
    DeviceStep to{.tokens = h.tokens,
                  .entries = h.entries,
                  .table_stride = h.table_stride,
                  .kv_offset = h.layer * layer_stride_,
                  .output_dtype = static_cast<DType>(h.output_dtype),
                  .lse_base = static_cast<LogBase>(h.lse_base),
                  .has_new_kv = h.has_new_kv != 0};
    DCP_ASSIGN_OR_RETURN(to.bounds, upload_->Add(view.bounds));
    DCP_ASSIGN_OR_RETURN(to.block_table, upload_->Add(view.block_table));
    DCP_ASSIGN_OR_RETURN(to.slots, upload_->Add(view.slots));
    DCP_RETURN_IF_ERROR(AddCopies(view.copies, to));
    upload_->step() = to;
    DCP_RETURN_IF_ERROR(AddPlan(
        {.entry_begin = view.entry_begin.data(),
         .bound = view.bounds.data() + static_cast<std::ptrdiff_t>(link_->rank()) * h.tokens,
         .entries = h.entries,
         .tokens = h.tokens}));
    DCP_RETURN_IF_ERROR(upload_->Send(stream_->ref()));
    if (h.has_new_kv != 0) DCP_RETURN_IF_ERROR(new_kv_.Up(step.new_kv, stream_->ref()));
    return query_.Up(step.query, stream_->ref());
  }

  enum class Marking { kEager, kInGraph };

  // Everything a step does on the device, for at most `capacity` tokens.
  Status Enqueue(Communicator& comm, int capacity, TimePoint deadline, const PhaseFn& entering,
                 Marking marking) {
    const StreamRef stream = stream_->ref();
    const DeviceStep* const step = upload_->device_step();
    DCP_RETURN_IF_ERROR(Record(kBegin, marking));
    DCP_RETURN_IF_ERROR(entering(RankPhase::kWrite));
    DCP_RETURN_IF_ERROR(CopyPages(kv_pool_, step, stream));
    DCP_RETURN_IF_ERROR(WriteKv(kv_pool_, new_kv_.device.as<Bf16>(), step, stream));
    DCP_RETURN_IF_ERROR(Record(kWritten, marking));
    DCP_RETURN_IF_ERROR(entering(RankPhase::kAttend));
    DCP_RETURN_IF_ERROR(backend_->Run({.query = query_.device.as<Bf16>(),
                                       .kv = kv_pool_.base,
                                       .page_stride = page_stride_,
                                       .partial = exchange_->Layout(capacity),
                                       .stream = stream,
                                       .step = step}));
    DCP_RETURN_IF_ERROR(Record(kAttended, marking));
    const auto phase = [&](RankPhase next) {
      if (next == RankPhase::kMerge) DCP_RETURN_IF_ERROR(Record(kExchanged, marking));
      return entering(next);
    };
    DCP_RETURN_IF_ERROR(exchange_->Enqueue(comm,
                                           {.capacity = capacity,
                                            .step = step,
                                            .faults = upload_->faulty_rows(),
                                            .partial_base = link_->setup().backend.caps.lse_base,
                                            .deadline = deadline,
                                            .stream = stream},
                                           phase));
    return Record(kMerged, marking);
  }

  Status Record(Mark mark, Marking marking) {
    return marking == Marking::kEager ? marks_[mark].Record(stream_->ref())
                                      : marks_[mark].RecordInGraph(stream_->ref());
  }

  Status TakeTimes(RankResult& result) const {
    const auto between = [this](Mark begin, Mark end, Nanos& to) {
      DCP_ASSIGN_OR_RETURN(const float ms, cuda::Event::Milliseconds(marks_[begin], marks_[end]));
      to = std::chrono::duration_cast<Nanos>(std::chrono::duration<float, std::milli>(ms));
      return Status::Ok();
    };
    DCP_RETURN_IF_ERROR(between(kBegin, kWritten, result.write));
    DCP_RETURN_IF_ERROR(between(kWritten, kAttended, result.attend));
    DCP_RETURN_IF_ERROR(between(kAttended, kExchanged, result.exchange));
    return between(kExchanged, kMerged, result.merge);
  }

  const StepGraph* GraphFor(int tokens) const {
    const auto fits = std::ranges::find_if(
        graphs_, [tokens](const StepGraph& graph) { return tokens <= graph.capacity; });
    return fits == graphs_.end() ? nullptr : &*fits;
  }

  // The test hook inside a replayed graph: a host node on the stream, which may fail the step or
  // hold the stream up. Without a hook there is no node.
  Status EnterInGraph(RankPhase phase) {
    if (!link_->setup().fault) return Status::Ok();
    static constexpr void (*kEnter[])(void*) = {
        [](void* self) { static_cast<CudaRank*>(self)->OnHostNode(RankPhase::kIdle); },
        [](void* self) { static_cast<CudaRank*>(self)->OnHostNode(RankPhase::kWrite); },
        [](void* self) { static_cast<CudaRank*>(self)->OnHostNode(RankPhase::kAttend); },
        [](void* self) { static_cast<CudaRank*>(self)->OnHostNode(RankPhase::kExchange); },
        [](void* self) { static_cast<CudaRank*>(self)->OnHostNode(RankPhase::kMerge); }};
    return cuda::Check(
        cudaLaunchHostFunc(stream_->raw(), kEnter[static_cast<std::size_t>(phase)], this),
        "cudaLaunchHostFunc");
  }

  void OnHostNode(RankPhase phase) {
    const Status status = link_->Enter(phase);
    const std::lock_guard lock(graph_fault_mutex_);
    if (!status.ok() && graph_fault_.ok()) graph_fault_ = status;
  }

  Status TakeGraphFault() {
    const std::lock_guard lock(graph_fault_mutex_);
    return std::exchange(graph_fault_, Status::Ok());
  }

  static void Scatter(const std::byte* rows, const StridedBytes& to) {
    for (std::int64_t i = 0; i < to.rows; ++i) {
      std::memcpy(to.data + i * to.stride, rows + i * to.row_bytes, Size(to.row_bytes));
    }
  }

  std::shared_ptr<RankLink> link_;
  const EngineConfig& config_;
  const int device_;
  std::size_t max_tokens_ = 0;
  std::size_t max_copies_ = 0;
  bool graphs_wanted_ = false;
  std::optional<cuda::Stream> stream_;
  cuda::DeviceBuffer kv_;
  KvPool kv_pool_;
  std::int64_t page_stride_ = 0;   // elements
  std::int64_t layer_stride_ = 0;  // elements
  std::unique_ptr<AttentionBackend> backend_;
  std::optional<CudaExchange> exchange_;
  std::optional<StepUpload> upload_;
  Staging query_, new_kv_, agree_, mismatch_;
  cuda::PinnedBuffer output_, lse_, faults_;
  std::vector<cuda::Event> marks_;  // [kMarks]
  std::vector<StepGraph> graphs_;   // by capacity; hold operations of the link's communicator
  std::mutex graph_fault_mutex_;
  Status graph_fault_;  // guarded by graph_fault_mutex_
};

Result<std::shared_ptr<CudaRank>> CudaRank::Create(const std::shared_ptr<RankLink>& link,
                                                   int device) {
  DCP_RETURN_IF_ERROR(cuda::UseDevice(device));
  const EngineConfig& c = link->config();
  const RankSetup& setup = link->setup();
  std::shared_ptr<CudaRank> rank(new CudaRank(link, device));
  CudaRank& r = *rank;
  r.max_tokens_ = Size(c.limits.max_step_tokens);
  r.max_copies_ = Size(c.limits.max_step_tokens);
  r.graphs_wanted_ = c.ranks.UseGraphs();
  DCP_ASSIGN_OR_RETURN(r.stream_, cuda::Stream::Create(device));

  const std::int64_t page_stride = std::int64_t{c.kv.page_tokens} * c.model.d_qk();
  const std::int64_t layer_stride = c.kv.blocks * page_stride;
  const std::size_t kv_bytes = Size(layer_stride) * Size(c.model.layers) * sizeof(Bf16);
  DCP_ASSIGN_OR_RETURN(
      r.kv_, cuda::DeviceBuffer::Create(device, kv_bytes,
                                        "the KV pool of rank " + std::to_string(setup.rank) +
                                            " (kv.blocks = " + std::to_string(c.kv.blocks) + ")"));
  if (setup.poison_kv) {
    DCP_RETURN_IF_ERROR(cuda::FillAsync(r.kv_.data(), 0xff, kv_bytes, r.stream_->ref()));
  }
  r.kv_pool_ = {.base = r.kv_.as<Bf16>(),
                .layers = c.model.layers,
                .blocks = c.kv.blocks,
                .page_tokens = c.kv.page_tokens,
                .d_qk = c.model.d_qk()};
  r.page_stride_ = page_stride;
  r.layer_stride_ = layer_stride;

  const std::int64_t max_pages = (c.limits.max_context + c.BlockTokens() - 1) / c.BlockTokens() + 1;
  const BackendSetup backend_setup{.geometry = c.Geometry(),
                                   .max_tokens = c.limits.max_step_tokens,
                                   .device = device,
                                   .max_keys = max_pages * c.kv.page_tokens};
  DCP_ASSIGN_OR_RETURN(r.backend_, setup.backend.make(backend_setup));
  DCP_RETURN_IF_ERROR(ProbeContract(setup.backend, backend_setup, *r.backend_));
  DCP_ASSIGN_OR_RETURN(r.exchange_,
                       CudaExchange::Create(device, c.exchange,
                                            {.ranks = c.ranks.count,
                                             .heads = c.model.heads,
                                             .d_v = c.model.kv_lora_rank,
                                             .partial_dtype = c.attention.partial_dtype},
                                            c.limits.max_step_tokens));

  const std::size_t tokens = r.max_tokens_;
  const std::size_t entries = Size(c.limits.max_batch);
  const std::size_t parts[] = {tokens * Size(c.ranks.count) * sizeof(std::int32_t),  // bounds
                               entries * Size(max_pages) * sizeof(std::int32_t),     // block table
                               tokens * sizeof(std::int64_t),                        // slots
                               r.max_copies_ * sizeof(DevicePageCopy), r.backend_->MaxPlanBytes()};
  std::size_t upload = 0;
  for (const std::size_t part : parts) upload += StepUpload::Padded(part);
  DCP_ASSIGN_OR_RETURN(r.upload_, StepUpload::Create(device, upload));

  const std::size_t latent = Size(c.LatentBytes());
  const std::size_t heads = Size(c.model.heads / c.ranks.count);
  const auto staging = [device](std::size_t bytes, std::string_view what) {
    return Staging::Create(device, bytes, what);
  };
  DCP_ASSIGN_OR_RETURN(r.query_, staging(tokens * Size(c.model.heads) * latent, "queries"));
  DCP_ASSIGN_OR_RETURN(r.new_kv_, staging(tokens * latent, "new latents"));
  DCP_ASSIGN_OR_RETURN(r.agree_,
                       staging((Size(c.ranks.count) + 1) * sizeof(RankContract), "the contract"));
  DCP_ASSIGN_OR_RETURN(r.mismatch_, staging(sizeof(std::int32_t), "a comparison"));
  const std::size_t rows = tokens * heads;
  DCP_ASSIGN_OR_RETURN(
      r.output_,
      cuda::PinnedBuffer::Create(rows * Size(c.model.kv_lora_rank) * sizeof(float), "outputs"));
  DCP_ASSIGN_OR_RETURN(r.lse_, cuda::PinnedBuffer::Create(rows * sizeof(float), "outputs"));
  DCP_ASSIGN_OR_RETURN(r.faults_, cuda::PinnedBuffer::Create(sizeof(std::int64_t), "outputs"));
  for (int i = 0; i < kMarks; ++i) {
    DCP_ASSIGN_OR_RETURN(cuda::Event mark, cuda::Event::Create(device, cuda::Event::Timing::kOn));
    r.marks_.push_back(std::move(mark));
  }
  DCP_RETURN_IF_ERROR(r.stream_->Synchronize());
  return rank;
}

}  // namespace

Result<std::unique_ptr<RankPort>> MakeCudaRankPort(const RankSetup& setup) {
  const auto link = std::make_shared<RankLink>(setup);
  const int device = setup.config->ranks.Device(setup.rank);
  DCP_ASSIGN_OR_RETURN(std::shared_ptr<CudaRank> rank, CudaRank::Create(link, device));
  return StartRankThread(link, [rank = std::move(rank)](const RankStep& step, RankResult& result) {
    return rank->Run(step, result);
  });
}

}  // namespace dcp
