#include "runtime/rank_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/log.h"
#include "base/wait.h"
#include "kernels/worker_pool.h"

namespace dcp {
namespace {

constexpr Nanos kSpin = std::chrono::microseconds(50);
constexpr int kRebuilds = 3;  // attempts after one failure

std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

// Different at each start, increasing with time.
std::uint64_t FirstEpoch() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace

// Where ranks leave their results. Shared with their callbacks: a rank that comes back after the
// group is gone still finds it.
struct RankGroup::Board {
  explicit Board(int ranks) : results(Index(ranks)) { order.reserve(Index(ranks)); }

  void Put(const RankResult& result) {
    const std::lock_guard lock(mutex);
    if (result.status.ok() == false && !first_error) first_error = result;
    results[Index(result.rank)] = result;
    order.push_back(result.rank);
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1 || !result.status.ok()) {
      attention.store(true, std::memory_order_release);
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> pending{0};
  std::atomic<bool> attention{false};              // all are back, or one has failed
  std::vector<std::optional<RankResult>> results;  // guarded by mutex
  std::vector<int> order;                          // ranks as they came back; guarded by mutex
  std::optional<RankResult> first_error;           // guarded by mutex
};

RankGroup::RankGroup(std::shared_ptr<const EngineConfig> config)
    : config_(std::move(config)), board_(std::make_shared<Board>(config_->ranks.count)) {}

RankGroup::~RankGroup() {
  std::vector<std::jthread> closing;  // at the same time: each may have a stuck rank to wait for
  for (auto& port : ports_) closing.emplace_back([&port] { port.reset(); });
}

Result<std::unique_ptr<RankGroup>> RankGroup::Create(
    const std::shared_ptr<const EngineConfig>& config, const BackendEntry& backend, bool poison_kv,
    const RankFaultHook& fault, const MakeRankPortFn& make_port, MakeGroupFn make_group) {
  std::unique_ptr<RankGroup> group(new RankGroup(config));
  group->make_group_ = std::move(make_group);
  const int threads = config->ranks.cpu_threads > 0
                          ? config->ranks.cpu_threads
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  // Rank threads work too: only cores beyond them get an extra thread.
  const auto pool = std::make_shared<WorkerPool>(std::max(0, threads - config->ranks.count));
  for (int r = 0; r < config->ranks.count; ++r) {
    const RankSetup setup{
        .rank = r,
        .config = config,
        .backend = backend,
        .pool = pool,
        .poison_kv = poison_kv,
        .fault = fault,
        .done = [board = group->board_](const RankResult& result) { board->Put(result); }};
    DCP_ASSIGN_OR_RETURN(std::unique_ptr<RankPort> port, make_port(setup));
    group->ports_.push_back(std::move(port));
  }
  group->epoch_ = FirstEpoch();
  DCP_RETURN_IF_ERROR(group->Connect());
  return group;
}

Status RankGroup::Connect() {
  DCP_ASSIGN_OR_RETURN(auto comms, make_group_({.epoch = epoch_, .size = config_->ranks.count}));
  for (std::size_t r = 0; r < ports_.size(); ++r) ports_[r]->SetCommunicator(std::move(comms[r]));
  auto buffers = std::make_shared<StepBuffers>();
  LayOutCommon({.ranks = config_->ranks.count, .mode = static_cast<std::uint8_t>(RankMode::kAgree)},
               buffers->common);
  buffers->slots.resize(ports_.size());
  return RunOnce(buffers).status;
}

std::shared_ptr<StepBuffers> RankGroup::Buffers() {
  if (!spare_ || spare_.use_count() > 1) spare_ = std::make_shared<StepBuffers>();
  spare_->slots.resize(ports_.size());
  return spare_;
}

void RankGroup::Start(const std::shared_ptr<StepBuffers>& buffers) {
  const int ranks = config_->ranks.count;
  auto* header = reinterpret_cast<StepHeader*>(buffers->common.data());
  header->epoch = epoch_;
  header->ticket = ++ticket_;
  header->timeout_ns = Nanos(config_->ranks.timeout).count();
  {
    const std::lock_guard lock(board_->mutex);
    std::ranges::fill(board_->results, std::nullopt);
    board_->order.clear();
    board_->first_error.reset();
    board_->attention.store(false, std::memory_order_relaxed);
    board_->pending.store(ranks, std::memory_order_release);
  }
  const std::int64_t out_stride =
      header->tokens == 0 ? 0 : static_cast<std::int64_t>(buffers->output.size()) / header->tokens;
  const std::int64_t out_row = out_stride / ranks;
  const std::int64_t lse_stride =
      static_cast<std::int64_t>(config_->model.heads) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t lse_rows = buffers->lse.empty() ? 0 : header->tokens;
  for (int r = 0; r < ranks; ++r) {
    RankStep step{
        .common = buffers->common,
        .own = std::as_bytes(std::span(buffers->slots[Index(r)])),
        .query = buffers->query,
        .new_kv = buffers->new_kv,
        .output = {.data = reinterpret_cast<std::byte*>(buffers->output.data()) + r * out_row,
                   .rows = header->tokens,
                   .row_bytes = out_row,
                   .stride = out_stride},
        .lse = {.data = reinterpret_cast<std::byte*>(buffers->lse.data()) +
                        (lse_rows > 0 ? r * lse_stride / ranks : 0),
                .rows = lse_rows,
                .row_bytes = lse_stride / ranks,
                .stride = lse_stride},
        .hold = buffers};
    ports_[Index(r)]->Start(step);
  }
}

StepOutcome RankGroup::RunOnce(const std::shared_ptr<StepBuffers>& buffers) {
  Start(buffers);
  Board& board = *board_;
  const auto ready = [&board] { return board.attention.load(std::memory_order_acquire); };
  if (!SpinFor(kSpin, ready)) {
    std::unique_lock lock(board.mutex);
    WaitUntil(board.changed, lock, Clock::now() + config_->ranks.timeout, ready);
  }
  {
    const std::lock_guard lock(board.mutex);
    if (board.pending.load() == 0 && !board.first_error) return Collect();
  }
  return {.status = Fail()};
}

// Precondition: board_->mutex is held and every rank succeeded.
StepOutcome RankGroup::Collect() const {
  StepOutcome outcome;
  for (const auto& result : board_->results) {
    outcome.faulty_rows += result->faulty_rows;
    if (result->mismatch_token >= 0 &&
        (outcome.mismatch_token < 0 || result->mismatch_token < outcome.mismatch_token)) {
      outcome.mismatch_token = result->mismatch_token;
    }
    outcome.write = std::max(outcome.write, result->write);
    outcome.attend = std::max(outcome.attend, result->attend);
    outcome.exchange = std::max(outcome.exchange, result->exchange);
    outcome.merge = std::max(outcome.merge, result->merge);
  }
  return outcome;
}

// Aborts the group, waits for the ranks to come back (or sets down_), and says who was at fault.
Status RankGroup::Fail() {
  Board& board = *board_;
  const auto bound = std::to_string(config_->ranks.timeout.count());
  std::vector<RankPhase> phase_then;  // where each rank was when the step was given up
  for (const auto& port : ports_) phase_then.push_back(port->phase());
  const Status abort(Reason::kRankFailed, "the step was given up");
  for (const auto& port : ports_) port->Abort(abort);

  std::unique_lock lock(board.mutex);
  const auto all_back = [&board] { return board.pending.load(std::memory_order_acquire) == 0; };
  down_ = !WaitUntil(board.changed, lock, Clock::now() + config_->ranks.timeout, all_back);

  // The peers of a late rank return as soon as the group is aborted: the late one is the last, or
  // not back at all. Of several, the one in the earliest phase; phases are in step order.
  int late = down_ ? -1 : board.order.back();
  for (std::size_t r = 0; down_ && r < ports_.size(); ++r) {
    const bool earlier = late < 0 || phase_then[r] < phase_then[Index(late)];
    if (!board.results[r] && earlier) late = static_cast<int>(r);
  }

  std::string text;
  int rank = late;
  std::optional<RankPhase> phase;
  const auto own =
      std::ranges::find_if(board.results, [](const auto& r) { return r && r->own_fault; });
  if (own != board.results.end()) {
    rank = (*own)->rank;
    phase = (*own)->phase;
    text = (*own)->status.message();
  } else if (board.first_error) {  // a peer's wait ended: its communicator knows for whom
    for (const auto& [key, value] : board.first_error->status.metadata()) {
      if (key == "rank") rank = std::stoi(value);
    }
    text = board.first_error->status.message();
  }
  if (!phase) {
    phase = phase_then[Index(rank)];
    if (!text.empty()) text += "; ";
    text += "rank " + std::to_string(rank) + " did not finish " + std::string(PhaseName(*phase)) +
            " within " + bound + " ms";
  }
  if (down_) {
    for (std::size_t r = 0; r < ports_.size(); ++r) {
      if (board.results[r]) continue;
      log::error("rank {} is stuck in {}: ranks are down", r, PhaseName(ports_[r]->phase()));
    }
  }
  return Status(Reason::kRankFailed, std::move(text))
      .With("rank", std::to_string(rank))
      .With("phase", std::string(PhaseName(*phase)));
}

StepOutcome RankGroup::Run(const std::shared_ptr<StepBuffers>& buffers) {
  StepOutcome outcome = RunOnce(buffers);
  if (!outcome.status.ok()) {
    log::warn("epoch {}: {}", epoch_, outcome.status.message());
    if (!down_) Rebuild();
  }
  return outcome;
}

void RankGroup::Rebuild() {
  // A rank may fail again while the new group agrees. As long as every rank comes back from that, a
  // further group can be made.
  for (int attempt = 1; attempt <= kRebuilds && !down_; ++attempt) {
    ++epoch_;
    const Status status = Connect();
    if (status.ok()) {
      log::info("group rebuilt, epoch {}", epoch_);
      return;
    }
    log::error("cannot rebuild the group, attempt {} of {}: {}", attempt, kRebuilds,
               status.ToString());
  }
  down_ = true;
}

}  // namespace dcp
