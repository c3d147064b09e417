// Ranks that fail or stall, in every phase of every kind of write: what is answered, what is left,
// and that the engine serves again, or says at once that it cannot.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "runtime/engine.h"
#include "tests/support/cluster.h"

namespace dcp::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kTimeoutMs = 600;
#else
constexpr int kTimeoutMs = 200;
#endif
constexpr RankPhase kPhases[] = {RankPhase::kWrite, RankPhase::kAttend, RankPhase::kExchange,
                                 RankPhase::kMerge};

enum class Kind { kFail, kStall };

// Faults to come. Ranks share it, so that one that wakes up late still finds it.
class Faults {
 public:
  // The next entry of `rank` into `phase` fails, or blocks until Release().
  void Arm(int rank, RankPhase phase, Kind kind) {
    const std::lock_guard lock(mutex_);
    armed_.push_back({rank, phase, kind});
  }
  // Stalled ranks go on this long after the engine has given the step up.
  void ReleaseAfterAbort(Millis delay) {
    const std::lock_guard lock(mutex_);
    after_abort_ = delay;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  bool WaitForStalled(int ranks) {
    std::unique_lock lock(mutex_);
    return WaitUntil(changed_, lock, Clock::now() + std::chrono::seconds(20),
                     [&] { return stalled_ >= ranks; });
  }
  bool AllFired() {
    const std::lock_guard lock(mutex_);
    return armed_.empty();
  }

  Status Enter(int rank, RankPhase phase) {
    std::unique_lock lock(mutex_);
    const auto it = std::ranges::find_if(
        armed_, [&](const Fault& f) { return f.rank == rank && f.phase == phase; });
    if (it == armed_.end()) return Status::Ok();
    const Kind kind = it->kind;
    armed_.erase(it);
    if (kind == Kind::kFail) return Status(Reason::kInternal, "injected");
    ++stalled_;
    const int aborts = aborts_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return released_ || (after_abort_ && aborts_ > aborts); });
    --stalled_;
    if (!released_) {
      const Millis delay = *after_abort_;
      lock.unlock();
      std::this_thread::sleep_for(delay);
    }
    return Status::Ok();
  }
  void SeeAbort() {
    const std::lock_guard lock(mutex_);
    ++aborts_;
    changed_.notify_all();
  }

 private:
  struct Fault {
    int rank;
    RankPhase phase;
    Kind kind;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Fault> armed_;
  std::optional<Millis> after_abort_;
  bool released_ = false;
  int stalled_ = 0;
  int aborts_ = 0;
};

// Tells Faults when the engine gives a step up.
class SpyPort final : public RankPort {
 public:
  SpyPort(std::unique_ptr<RankPort> rank, std::shared_ptr<Faults> faults)
      : rank_(std::move(rank)), faults_(std::move(faults)) {}
  void SetCommunicator(std::unique_ptr<Communicator> comm) override {
    rank_->SetCommunicator(std::move(comm));
  }
  void Start(const RankStep& step) override { rank_->Start(step); }
  void Abort(const Status& why) override {
    rank_->Abort(why);
    faults_->SeeAbort();
  }
  RankPhase phase() const override { return rank_->phase(); }

 private:
  std::unique_ptr<RankPort> rank_;
  std::shared_ptr<Faults> faults_;
};

// Where nothing is to be late, a busy machine is given time.
constexpr int kNeverLateMs = 30000;

ClusterOptions With(const std::shared_ptr<Faults>& faults, int ranks, ExchangeKind exchange,
                    int timeout_ms = kTimeoutMs) {
  ClusterOptions options{.ranks = ranks,
                         .layers = 2,
                         .heads = 4,
                         .page_tokens = 4,
                         .blocks = 64,
                         .exchange = exchange,
                         .timeout_ms = timeout_ms};
  options.hooks.rank_fault = [faults](int rank, RankPhase phase) {
    return faults->Enter(rank, phase);
  };
  options.hooks.make_port = [faults](const RankSetup& setup) -> Result<std::unique_ptr<RankPort>> {
    DCP_ASSIGN_OR_RETURN(std::unique_ptr<RankPort> rank, MakeLocalRankPort(setup));
    return std::unique_ptr<RankPort>(std::make_unique<SpyPort>(std::move(rank), faults));
  };
  return options;
}

std::string Value(const Status& status, std::string_view key) {
  for (const auto& [k, v] : status.metadata()) {
    if (k == key) return v;
  }
  return "";
}

void CheckNames(const Status& status, int rank, RankPhase phase) {
  INFO(status.ToString());
  CHECK(status.code() == StatusCode::kAborted);
  CHECK(status.reason() == Reason::kRankFailed);
  CHECK(Value(status, "rank") == std::to_string(rank));
  CHECK(Value(status, "phase") == PhaseName(phase));
  CHECK(status.message().find("rank " + std::to_string(rank)) != std::string::npos);
  CHECK(status.message().find(PhaseName(phase)) != std::string::npos);
}

// What is stored below `length` in every layer is what was written.
void CheckReadsBack(Cluster& cluster, const TestSequence& s, std::int64_t length) {
  for (int layer = 0; layer < cluster.config().model.layers; ++layer) {
    cluster.StepChecked({.layer = layer, .items = {{&s, length - 2, 2}}, .write = false});
  }
}

// Three sequences and the writes that are to fail: an append, a rewind, a write into a shared
// block.
struct Scene {
  static constexpr std::int64_t kLength = 22;
  static constexpr std::int64_t kRewindTo = 13;
  static constexpr std::int64_t kForkAt = 19;

  Cluster& cluster;
  TestSequence appended, rewound, parent, child, rewound_new;

  explicit Scene(Cluster& c)
      : cluster(c),
        appended(c.Create("appended", 1)),
        rewound(c.Create("rewound", 2)),
        parent(c.Create("parent", 3)),
        child("", 0),
        rewound_new("", 0) {
    for (const TestSequence* s : {&appended, &rewound, &parent}) c.Append(*s, 1, 0, kLength);
    child = c.Fork(parent, "child", kForkAt, 4);
    rewound_new = rewound;
    rewound_new.Diverge(kRewindTo, 5);
  }
  ~Scene() {
    for (const TestSequence* s : {&appended, &rewound, &parent, &child}) cluster.Release(*s);
    CHECK(cluster.FreeBlocks() == cluster.config().kv.blocks);
  }

  StepItem Append() const { return {&appended, kLength, 2}; }
  StepItem Rewind() const { return {&rewound_new, kRewindTo, 3, true}; }
  StepItem CopyOnWrite() const { return {&child, kForkAt, 2}; }
  static bool Has(const StepSpec& step, const TestSequence& s) {
    return std::ranges::any_of(step.items, [&](const StepItem& i) { return i.sequence == &s; });
  }

  // After the step has failed on layer 0.
  void CheckAfterState(const StepSpec& step, std::int64_t free_before, std::int64_t cow_before) {
    const bool back = Has(step, rewound_new);
    CHECK(cluster.Info(appended).layer_lengths == std::vector<std::int64_t>{kLength, kLength});
    CHECK(cluster.Info(rewound).layer_lengths ==
          std::vector<std::int64_t>{back ? kRewindTo : kLength, kLength});
    CHECK(cluster.Info(child).layer_lengths == std::vector<std::int64_t>{kForkAt, kForkAt});
    const std::int64_t block = cluster.engine().info().block_tokens;
    CHECK(cluster.Info(child).shared_blocks == (kForkAt + block - 1) / block);
    CHECK(cluster.FreeBlocks() == free_before);
    CHECK(cluster.engine().load().cow_blocks == cow_before);
    CheckReadsBack(cluster, appended, kLength);
    CheckReadsBack(cluster, rewound, kRewindTo);
    CheckReadsBack(cluster, parent, kLength);
    CheckReadsBack(cluster, child, kForkAt);
    // Beyond the committed length is nothing, whatever the ranks wrote there.
    const StepItem past{back ? &rewound_new : &appended, back ? kRewindTo : kLength, 1};
    CHECK(cluster.Step({.items = {past}, .write = false}).status().reason() == Reason::kReadRange);
  }
};

StepSpec StepOf(const Scene& scene, const std::string& kind) {
  StepSpec step{.step_id = 7};
  if (kind != "rewind" && kind != "copy-on-write") step.items.push_back(scene.Append());
  if (kind != "append" && kind != "copy-on-write") step.items.push_back(scene.Rewind());
  if (kind != "append" && kind != "rewind") step.items.push_back(scene.CopyOnWrite());
  return step;
}

// One failure from launch to recovery.
void FailAndRecover(Cluster& cluster, Faults& faults, const std::string& write, int rank,
                    RankPhase phase, Kind kind) {
  INFO("ranks " << cluster.config().ranks.count << " " << ExchangeName(cluster.config().exchange)
                << " " << write << (kind == Kind::kFail ? " fails" : " stalls") << " on rank "
                << rank << " in " << PhaseName(phase));
  Scene scene(cluster);
  const StepSpec step = StepOf(scene, write);
  const std::uint64_t epoch = cluster.engine().info().epoch;
  const LoadInfo before = cluster.engine().load();

  faults.Arm(rank, phase, kind);
  const Result<StepReply> failed = cluster.Step(step);
  REQUIRE_FALSE(failed.ok());
  CheckNames(failed.status(), rank, phase);
  REQUIRE(faults.AllFired());

  // A new epoch, and the old one is refused.
  CHECK(cluster.engine().info().epoch > epoch);
  CHECK(cluster.engine().state() == EngineState::kServing);
  CHECK(cluster.engine().load().rank_failures == before.rank_failures + 1);
  CHECK(cluster.engine().load().failed_steps == before.failed_steps + 1);
  StepRequest old = cluster.MakeStep(step);
  old.expected_epoch = epoch;
  const Status refused = cluster.Submit(std::move(old)).status();
  CHECK(refused.reason() == Reason::kEpochChanged);
  CHECK(Value(refused, "epoch") == std::to_string(cluster.engine().info().epoch));

  scene.CheckAfterState(step, before.free_blocks, before.cow_blocks);

  // The same step again is the step that failed.
  StepSpec retry = step;
  cluster.StepChecked(retry);
  const Result<StepReply> first = cluster.Step(retry);
  REQUIRE(first.ok());
  CHECK(first->epoch == cluster.engine().info().epoch);
  const bool all = write == "mixed";
  if (all || write == "append") {
    CHECK(cluster.Info(scene.appended).layer_lengths[0] == Scene::kLength + 2);
  }
  if (all || write == "rewind") {
    CHECK(cluster.Info(scene.rewound).layer_lengths[0] == Scene::kRewindTo + 3);
  }
  if (all || write == "copy-on-write") {
    CHECK(cluster.Info(scene.child).layer_lengths[0] == Scene::kForkAt + 2);
  }
  CheckReadsBack(cluster, scene.parent, Scene::kLength);
}

const char* const kWrites[] = {"append", "rewind", "copy-on-write", "mixed"};

void WalkPhases(int ranks, ExchangeKind exchange, Kind kind) {
  const auto faults = std::make_shared<Faults>();
  faults->ReleaseAfterAbort(Millis(kTimeoutMs / 5));
  Cluster cluster(With(faults, ranks, exchange, kind == Kind::kFail ? kNeverLateMs : kTimeoutMs));
  int turn = 0;
  for (const char* write : kWrites) {
    for (const RankPhase phase : kPhases) {
      // A stall costs a timeout: there the ranks take turns.
      for (int rank = 0; rank < ranks; ++rank) {
        if (kind == Kind::kStall && rank != turn % ranks) continue;
        FailAndRecover(cluster, *faults, write, rank, phase, kind);
      }
      ++turn;
    }
    ++turn;  // so that another rank has each phase next time
  }
}

}  // namespace

TEST_CASE("a rank fails in any phase of any write") {
  const int ranks = GENERATE(1, 2, 4);
  const ExchangeKind exchange = GENERATE(ExchangeKind::kA2a, ExchangeKind::kAgRs);
  WalkPhases(ranks, exchange, Kind::kFail);
}

TEST_CASE("a rank stalls in any phase of any write and comes back in time: 1 and 2 ranks") {
  const int ranks = GENERATE(1, 2);
  const ExchangeKind exchange = GENERATE(ExchangeKind::kA2a, ExchangeKind::kAgRs);
  WalkPhases(ranks, exchange, Kind::kStall);
}

TEST_CASE("a rank stalls in any phase of any write and comes back in time: 4 ranks") {
  const ExchangeKind exchange = GENERATE(ExchangeKind::kA2a, ExchangeKind::kAgRs);
  WalkPhases(4, exchange, Kind::kStall);
}

TEST_CASE("a rank that is slow but within the bound is no failure") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a, kNeverLateMs));
  const std::uint64_t epoch = cluster.engine().info().epoch;
  const TestSequence s = cluster.Create("s", 1);
  faults->Arm(1, RankPhase::kExchange, Kind::kStall);
  auto step = std::async(std::launch::async, [&] {
    return cluster.Step({.step_id = 1, .items = {{&s, 0, 1}}});
  });
  REQUIRE(faults->WaitForStalled(1));
  std::this_thread::sleep_for(Millis(kTimeoutMs / 10));
  faults->Release();
  const Result<StepReply> reply = step.get();
  INFO(reply.status().ToString());
  CHECK(reply.ok());
  CHECK(cluster.engine().info().epoch == epoch);
}

TEST_CASE("two ranks fail in one step: one of them is named") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 4, ExchangeKind::kAgRs, kNeverLateMs));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 9);
  faults->Arm(1, RankPhase::kAttend, Kind::kFail);
  faults->Arm(3, RankPhase::kAttend, Kind::kFail);
  const Status status = cluster.Step({.step_id = 2, .items = {{&s, 9, 1}}}).status();
  CHECK(status.reason() == Reason::kRankFailed);
  CHECK((Value(status, "rank") == "1" || Value(status, "rank") == "3"));
  CHECK(Value(status, "phase") == "attend");
  CHECK(faults->AllFired());
  cluster.StepChecked({.step_id = 2, .items = {{&s, 9, 1}}});
}

TEST_CASE("a rank fails in a chunk of an AppendKv: the append is over, nothing was appended") {
  const auto faults = std::make_shared<Faults>();
  faults->ReleaseAfterAbort(Millis(kTimeoutMs / 5));
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 11);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  for (const Kind kind : {Kind::kFail, Kind::kStall}) {
    const AppendRequest request{.sequence = s.ref(),
                                .step_id = 2,
                                .start = 11,
                                .count = 30,
                                .layer_begin = 0,
                                .layer_count = 2};
    const Result<AppendId> id = cluster.BeginAppend(request);
    REQUIRE(id.ok());
    REQUIRE(cluster.WriteAppend(*id, cluster.MakeChunk(s, 0, 11, 0, 30)).ok());
    faults->Arm(1, RankPhase::kWrite, kind);
    CheckNames(cluster.WriteAppend(*id, cluster.MakeChunk(s, 1, 11, 0, 30)).status(), 1,
               RankPhase::kWrite);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CHECK(cluster.CommitAppend(*id).status().reason() == Reason::kAppendCancelled);
    CHECK(cluster.Info(s).layer_lengths == std::vector<std::int64_t>{11, 11});
    CHECK(cluster.Info(s).open_appends == 0);
    CheckReadsBack(cluster, s, 11);
  }
  cluster.Append(s, 2, 11, 30);
  CheckReadsBack(cluster, s, 41);
}

TEST_CASE("a rank fails while an AppendKv copies a shared block: nothing was taken") {
  const auto faults = std::make_shared<Faults>();
  faults->ReleaseAfterAbort(Millis(kTimeoutMs / 5));
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a));
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 11);
  const TestSequence child = cluster.Fork(parent, "child", 11, 2);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  for (const Kind kind : {Kind::kFail, Kind::kStall}) {
    faults->Arm(0, RankPhase::kWrite, kind);
    CheckNames(cluster
                   .BeginAppend({.sequence = child.ref(),
                                 .step_id = 2,
                                 .start = 11,
                                 .count = 20,
                                 .layer_begin = 0,
                                 .layer_count = 2})
                   .status(),
               0, RankPhase::kWrite);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CHECK(cluster.Info(child).open_appends == 0);
    CHECK(cluster.engine().load().cow_blocks == 0);
    CheckReadsBack(cluster, child, 11);
  }
  cluster.Append(child, 2, 11, 20);
  CheckReadsBack(cluster, child, 31);
  CheckReadsBack(cluster, parent, 11);
}

TEST_CASE("a rank fails while a replay is compared: no trace, not even of a rewind beside it") {
  const auto faults = std::make_shared<Faults>();
  faults->ReleaseAfterAbort(Millis(kTimeoutMs / 5));
  Cluster cluster(With(faults, 2, ExchangeKind::kAgRs));
  const TestSequence a = cluster.Create("a", 1), b = cluster.Create("b", 2);
  cluster.Append(a, 1, 0, 10);
  cluster.Append(b, 1, 0, 10);
  const StepSpec step{.step_id = 5, .items = {{&a, 10, 2}}};
  const Result<StepReply> first = cluster.Step(step);
  REQUIRE(first.ok());
  TestSequence back = b;
  back.Diverge(4, 3);
  const StepSpec both{.step_id = 5, .items = {{&back, 4, 2, true}, {&a, 10, 2}}};
  for (const Kind kind : {Kind::kFail, Kind::kStall}) {
    // The comparison is a rank's first entry into write.
    for (const StepSpec* spec : {&step, &both}) {
      faults->Arm(1, RankPhase::kWrite, kind);
      CheckNames(cluster.Step(*spec).status(), 1, RankPhase::kWrite);
      CHECK(cluster.Info(a).layer_lengths[0] == 12);
      CHECK(cluster.Info(b).layer_lengths[0] == 10);
      CheckReadsBack(cluster, b, 10);
    }
    // After the comparison, the replay runs as any step does.
    faults->Arm(0, RankPhase::kAttend, kind);
    CheckNames(cluster.Step(step).status(), 0, RankPhase::kAttend);
    CHECK(cluster.Info(a).layer_lengths[0] == 12);
  }
  const Result<StepReply> again = cluster.Step(step);
  REQUIRE(again.ok());
  CHECK(again->output == first->output);
  cluster.StepChecked(both);
}

TEST_CASE("a rank fails while a replayed AppendKv is compared") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a, kNeverLateMs));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 19);
  const AppendRequest request{
      .sequence = s.ref(), .step_id = 1, .count = 19, .layer_begin = 0, .layer_count = 2};
  const std::int64_t free_blocks = cluster.FreeBlocks();
  const Result<AppendId> id = cluster.BeginAppend(request);
  REQUIRE(id.ok());
  faults->Arm(0, RankPhase::kWrite, Kind::kFail);
  CheckNames(cluster.WriteAppend(*id, cluster.MakeChunk(s, 0, 0, 0, 19)).status(), 0,
             RankPhase::kWrite);
  CHECK(cluster.Info(s).layer_lengths == std::vector<std::int64_t>{19, 19});
  CHECK(cluster.FreeBlocks() == free_blocks);
  cluster.Append(s, 1, 0, 19);  // a replay again
  CheckReadsBack(cluster, s, 19);
}

TEST_CASE("an open AppendKv outlives the failure of another step") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a, kNeverLateMs));
  const TestSequence s = cluster.Create("s", 1), other = cluster.Create("other", 2);
  const Result<AppendId> id = cluster.BeginAppend(
      {.sequence = s.ref(), .step_id = 1, .count = 19, .layer_begin = 0, .layer_count = 2});
  REQUIRE(id.ok());
  REQUIRE(cluster.WriteAppend(*id, cluster.MakeChunk(s, 0, 0, 0, 19)).ok());
  faults->Arm(1, RankPhase::kMerge, Kind::kFail);
  CHECK(cluster.Step({.step_id = 1, .items = {{&other, 0, 1}}}).status().reason() ==
        Reason::kRankFailed);
  REQUIRE(cluster.WriteAppend(*id, cluster.MakeChunk(s, 1, 0, 0, 19)).ok());
  REQUIRE(cluster.CommitAppend(*id).ok());
  CheckReadsBack(cluster, s, 19);
}

namespace {

template <class T, class F>
Status TimedCall(F&& start) {
  // A busy machine may take the core away: the best of a few calls counts.
  Nanos best = Nanos::max();
  Status status;
  for (int i = 0; i < 5 && best >= Millis(100); ++i) {
    const TimePoint begin = Clock::now();
    status = Await<T>(start).status();
    best = std::min<Nanos>(best, Clock::now() - begin);
  }
  CHECK(best < Millis(100));
  return status;
}

void CheckDown(const Status& status) {
  INFO(status.ToString());
  CHECK(status.code() == StatusCode::kUnavailable);
  CHECK(status.reason() == Reason::kRanksDown);
}

void CheckEveryCallIsDown(Cluster& cluster, const TestSequence& s, AppendId append) {
  Engine& engine = cluster.engine();
  CheckDown(TimedCall<CreateReply>([&](auto done) {
    engine.CreateSequence({.id = "new", .request_id = "r"}, std::move(done));
  }));
  CheckDown(TimedCall<CreateReply>([&](auto done) {
    engine.ForkSequence({.parent = s.ref(), .id = "new", .request_id = "r"}, std::move(done));
  }));
  CheckDown(TimedCall<SequenceInfo>([&](auto done) {
    engine.TruncateSequence({.sequence = s.ref(), .step_id = 99}, std::move(done));
  }));
  CheckDown(TimedCall<ReleaseReply>(
      [&](auto done) { engine.ReleaseSequences({.sequences = {s.ref()}}, std::move(done)); }));
  CheckDown(TimedCall<SequenceInfo>(
      [&](auto done) { engine.GetSequence({.id = s.id()}, std::move(done)); }));
  CheckDown(TimedCall<ListReply>([&](auto done) { engine.ListSequences({}, std::move(done)); }));
  CheckDown(TimedCall<StepReply>([&](auto done) {
    engine.SubmitStep(cluster.MakeStep({.items = {{&s, 0, 1}}, .write = false}), std::move(done));
  }));
  CheckDown(TimedCall<AppendId>([&](auto done) {
    engine.BeginAppend(
        {.sequence = s.ref(), .step_id = 9, .count = 1, .layer_begin = 0, .layer_count = 1},
        [](const Status&) {}, std::move(done));
  }));
  CheckDown(TimedCall<AppendId>([&](auto done) {
    engine.WriteAppend(append, cluster.MakeChunk(s, 0, 0, 0, 1), std::move(done));
  }));
  CheckDown(
      TimedCall<AppendReply>([&](auto done) { engine.CommitAppend(append, std::move(done)); }));
  engine.CancelAppend(append);
}

// Polls, because a thread leaves some time after it is told to.
template <class Ready>
bool Eventually(Ready ready) {
  const TimePoint end = Clock::now() + std::chrono::seconds(20);
  while (!ready() && Clock::now() < end) std::this_thread::sleep_for(Millis(2));
  return ready();
}

// A step whose tensors die with the request, as those of a real caller do.
StepRequest Tracked(const Cluster& cluster, const StepSpec& spec,
                    std::weak_ptr<const void>& bytes) {
  StepRequest request = cluster.MakeStep(spec);
  bytes = request.keepalive;
  return request;
}

}  // namespace

TEST_CASE("a rank is stuck for ever: the ranks are down, and everybody is told at once") {
  const int ranks = GENERATE(1, 2, 4);
  const RankPhase phase = GENERATE(from_range(std::begin(kPhases), std::end(kPhases)));
  const ExchangeKind exchange = ranks == 2 ? ExchangeKind::kAgRs : ExchangeKind::kA2a;
  const int rank = ranks - 1;
  INFO("ranks " << ranks << " phase " << PhaseName(phase));

  const auto faults = std::make_shared<Faults>();
  std::mutex mutex;
  std::vector<EngineState> states;  // guarded by mutex
  std::vector<Reason> lost;         // guarded by mutex
  std::weak_ptr<const void> bytes;
  {
    ClusterOptions options = With(faults, ranks, exchange);
    options.hooks.on_state = [&](EngineState state) {
      const std::lock_guard lock(mutex);
      states.push_back(state);
    };
    auto cluster = std::make_unique<Cluster>(options);
    const TestSequence s = cluster->Create("s", 1), appended = cluster->Create("appended", 2);
    cluster->Append(s, 1, 0, 21);
    const Result<AppendId> append = Await<AppendId>([&](auto done) {
      cluster->engine().BeginAppend(
          {.sequence = appended.ref(),
           .step_id = 1,
           .count = 5,
           .layer_begin = 0,
           .layer_count = 1},
          [&](const Status& why) {
            const std::lock_guard lock(mutex);
            lost.push_back(why.reason());
          },
          std::move(done));
    });
    REQUIRE(append.ok());

    faults->Arm(rank, phase, Kind::kStall);
    const TimePoint begin = Clock::now();
    std::promise<Status> answer;
    cluster->engine().SubmitStep(
        Tracked(*cluster, {.step_id = 2, .items = {{&s, 21, 2}}}, bytes),
        [&](const Result<StepReply>& reply) { answer.set_value(reply.status()); });
    REQUIRE(faults->WaitForStalled(1));
    std::vector<std::promise<Status>> queued(3);
    for (auto& q : queued) {
      cluster->engine().GetSequence(
          {.id = "s"}, [&](const Result<SequenceInfo>& reply) { q.set_value(reply.status()); });
    }
    CheckNames(answer.get_future().get(), rank, phase);
    for (auto& q : queued) CheckDown(q.get_future().get());
    CHECK(Clock::now() - begin < Millis(4 * kTimeoutMs));
    CHECK(Eventually([&] { return cluster->engine().state() == EngineState::kRanksDown; }));
    CHECK(cluster->engine().load().rank_failures == 1);

    CheckEveryCallIsDown(*cluster, s, *append);
    CHECK(Eventually([&] {
      const std::lock_guard lock(mutex);
      return states == std::vector{EngineState::kRanksDown} &&
             lost == std::vector{Reason::kRanksDown};
    }));
    const TimePoint drain = Clock::now();
    CHECK_FALSE(cluster->engine().Drain(Clock::now() + std::chrono::seconds(10)));
    CHECK(Clock::now() - drain < std::chrono::seconds(2));

    // The stuck rank may still read the step's tensors.
    CHECK_FALSE(bytes.expired());
    const TimePoint end = Clock::now();
    cluster.reset();
    CHECK(Clock::now() - end < Millis(3 * kTimeoutMs));
    CHECK_FALSE(bytes.expired());
  }
  // The rank wakes up in an engine that is gone, ends its step and leaves.
  faults->Release();
  CHECK(Eventually([&] { return faults.use_count() == 1; }));
  CHECK(bytes.expired());
}

TEST_CASE("a rank is stuck for ever in a chunk or in a comparison: its bytes stay") {
  const std::string where = GENERATE("chunk", "comparison", "copy");
  const auto faults = std::make_shared<Faults>();
  std::weak_ptr<const void> bytes;
  {
    Cluster cluster(With(faults, 2, ExchangeKind::kA2a));
    const TestSequence s = cluster.Create("s", 1);
    cluster.Append(s, 1, 0, 8);
    const StepSpec step{.step_id = 2, .items = {{&s, 8, 1}}};
    Status status;
    if (where == "comparison") {
      cluster.StepChecked(step);
      faults->Arm(1, RankPhase::kWrite, Kind::kStall);
      status = cluster.Submit(Tracked(cluster, step, bytes)).status();
    } else if (where == "chunk") {
      const Result<AppendId> id = cluster.BeginAppend(
          {.sequence = s.ref(), .step_id = 2, .start = 8, .count = 9, .layer_count = 1});
      REQUIRE(id.ok());
      AppendChunk chunk = cluster.MakeChunk(s, 0, 8, 0, 9);
      bytes = chunk.keepalive;
      faults->Arm(1, RankPhase::kWrite, Kind::kStall);
      status = cluster.WriteAppend(*id, std::move(chunk)).status();
    } else {
      const TestSequence child = cluster.Fork(s, "child", 7, 2);
      faults->Arm(1, RankPhase::kWrite, Kind::kStall);
      status =
          cluster
              .BeginAppend(
                  {.sequence = child.ref(), .step_id = 2, .start = 7, .count = 9, .layer_count = 2})
              .status();
    }
    CheckNames(status, 1, RankPhase::kWrite);
    CHECK(Eventually([&] { return cluster.engine().state() == EngineState::kRanksDown; }));
    if (where != "copy") CHECK_FALSE(bytes.expired());
  }
  faults->Release();
  CHECK(Eventually([&] { return faults.use_count() == 1; }));
  CHECK(bytes.expired());
}

TEST_CASE("an engine ends in bounded time while ranks are stuck and steps wait") {
  const int stuck = GENERATE(1, 4);
  const auto faults = std::make_shared<Faults>();
  std::vector<Reason> answers;
  std::mutex mutex;
  {
    auto cluster = std::make_unique<Cluster>(With(faults, 4, ExchangeKind::kA2a));
    const TestSequence s = cluster->Create("s", 1);
    for (int r = 0; r < stuck; ++r) faults->Arm(r, RankPhase::kAttend, Kind::kStall);
    for (int i = 0; i < 3; ++i) {
      cluster->engine().SubmitStep(cluster->MakeStep({.step_id = 1, .items = {{&s, 0, 1}}}),
                                   [&](const Result<StepReply>& reply) {
                                     const std::lock_guard lock(mutex);
                                     answers.push_back(reply.status().reason());
                                   });
    }
    REQUIRE(faults->WaitForStalled(stuck));
    // The step is given up, the ranks are waited for, and waited for once more to leave.
    const TimePoint end = Clock::now();
    cluster.reset();
    CHECK(Clock::now() - end < Millis(4 * kTimeoutMs));
  }
  REQUIRE(answers.size() == 3);
  CHECK(answers[0] == Reason::kRankFailed);
  CHECK((answers[1] == Reason::kDraining || answers[1] == Reason::kRanksDown));
  CHECK((answers[2] == Reason::kDraining || answers[2] == Reason::kRanksDown));
  faults->Release();
  CHECK(Eventually([&] { return faults.use_count() == 1; }));
}

TEST_CASE("a drain waits for the step that runs and gives up at its deadline") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a, kNeverLateMs));
  const TestSequence s = cluster.Create("s", 1);
  faults->Arm(0, RankPhase::kMerge, Kind::kStall);
  std::promise<Status> answer;
  cluster.engine().SubmitStep(
      cluster.MakeStep({.step_id = 1, .items = {{&s, 0, 1}}}),
      [&](const Result<StepReply>& reply) { answer.set_value(reply.status()); });
  REQUIRE(faults->WaitForStalled(1));
  CHECK_FALSE(cluster.engine().Drain(Clock::now() + Millis(50)));
  CHECK(cluster.engine().state() == EngineState::kDraining);
  CHECK(cluster.Step({.items = {{&s, 0, 1}}, .write = false}).status().reason() ==
        Reason::kDraining);
  faults->Release();
  CHECK(cluster.engine().Drain(Clock::now() + std::chrono::seconds(20)));
  CHECK(answer.get_future().get().ok());
}

// Ranks enter the exchange when a new group agrees; one that has failed before enters it only then.
TEST_CASE("a rank fails again while the group is rebuilt, and comes back: the group is rebuilt") {
  const int ranks = GENERATE(1, 2, 4);
  const Kind kind = GENERATE(Kind::kFail, Kind::kStall);
  INFO("ranks " << ranks << (kind == Kind::kFail ? " fails" : " stalls"));
  const auto faults = std::make_shared<Faults>();
  faults->ReleaseAfterAbort(Millis(kTimeoutMs / 5));
  Cluster cluster(
      With(faults, ranks, ExchangeKind::kA2a, kind == Kind::kFail ? kNeverLateMs : kTimeoutMs));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 9);
  const std::uint64_t epoch = cluster.engine().info().epoch;
  faults->Arm(ranks - 1, RankPhase::kAttend, Kind::kFail);
  for (int i = 0; i < 2; ++i) faults->Arm(ranks - 1, RankPhase::kExchange, kind);
  const StepSpec step{.step_id = 2, .items = {{&s, 9, 2}}};
  CheckNames(cluster.Step(step).status(), ranks - 1, RankPhase::kAttend);
  CHECK(faults->AllFired());
  CHECK(cluster.engine().state() == EngineState::kServing);
  CHECK(cluster.engine().info().epoch > epoch + 1);
  CHECK(cluster.engine().load().rank_failures == 1);
  CheckReadsBack(cluster, s, 9);
  cluster.StepChecked(step);
}

TEST_CASE("a rank is stuck while the group is rebuilt: down, without a further attempt") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 2, ExchangeKind::kA2a));
  const TestSequence s = cluster.Create("s", 1);
  faults->Arm(0, RankPhase::kAttend, Kind::kFail);
  faults->Arm(0, RankPhase::kExchange, Kind::kStall);
  faults->Arm(0, RankPhase::kExchange, Kind::kFail);  // of a further attempt
  CheckNames(cluster.Step({.step_id = 1, .items = {{&s, 0, 1}}}).status(), 0, RankPhase::kAttend);
  CHECK(Eventually([&] { return cluster.engine().state() == EngineState::kRanksDown; }));
  CHECK_FALSE(faults->AllFired());
  faults->Release();
}

TEST_CASE("the group fails each time it is rebuilt: down, and no hang") {
  const auto faults = std::make_shared<Faults>();
  Cluster cluster(With(faults, 1, ExchangeKind::kA2a, kNeverLateMs));
  const TestSequence s = cluster.Create("s", 1);
  faults->Arm(0, RankPhase::kAttend, Kind::kFail);
  for (int i = 0; i < 3; ++i) faults->Arm(0, RankPhase::kExchange, Kind::kFail);
  CheckNames(cluster.Step({.step_id = 1, .items = {{&s, 0, 1}}}).status(), 0, RankPhase::kAttend);
  CHECK(faults->AllFired());
  CHECK(Eventually([&] { return cluster.engine().state() == EngineState::kRanksDown; }));
  CheckDown(cluster.Step({.step_id = 1, .items = {{&s, 0, 1}}}).status());
}

}  // namespace dcp::testing
