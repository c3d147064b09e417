// Many threads on one engine and on the same sequences: no deadlock, no lost or torn answer, no
// data race, and every block free in the end. Meant to run under the thread sanitizer.
//
// The content of a shared sequence is fixed when it is made, position by position, so that every
// thread knows the truth of every prefix, whoever wrote it. Forks go on with content of their own:
// a write that reached a block of another sequence would show.
//
//   DCP_HAMMER_SECONDS  how long each case runs (3)
#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "runtime/engine.h"
#include "tests/support/cluster.h"

namespace dcp::testing {
namespace {

constexpr int kThreads = 16;
constexpr int kSharedNames = 7;
constexpr std::int64_t kBlocks = 160;
constexpr std::int64_t kLongest = 120;  // where threads turn back

int Seconds() {
  const char* text = std::getenv("DCP_HAMMER_SECONDS");
  return text == nullptr || *text == '\0' ? 3 : std::atoi(text);
}

enum What : std::uint8_t {
  kCreated,
  kForked,
  kAppended,
  kStepped,
  kRewound,
  kRead,
  kReplayed,
  kTruncated,
  kReleased,
  kListed,
  kCancelled,
  kWhatCount
};
const char* const kWhatNames[] = {"created",  "forked", "appended", "stepped",
                                  "rewound",  "read",   "replayed", "truncated",
                                  "released", "listed", "cancelled"};

// What another thread may have done in between explains these.
const std::set<Reason> kExpected{
    Reason::kSequenceNotFound, Reason::kSequenceGeneration, Reason::kSequenceExists,
    Reason::kIncompleteToken,  Reason::kLengthConflict,     Reason::kStaleStep,
    Reason::kAppendOpen,       Reason::kAppendCancelled,    Reason::kPositionGap,
    Reason::kReadRange,        Reason::kKvCapacity,         Reason::kOverloaded,
    Reason::kCancelled};

using SharedSequence = std::shared_ptr<const TestSequence>;

// What all threads know: which sequences were made, and what went wrong. Catch's assertions are not
// for threads.
class World {
 public:
  explicit World(Cluster& cluster) : cluster(cluster) {}
  Cluster& cluster;
  std::array<std::atomic<std::int64_t>, kWhatCount> done{};
  std::atomic<std::uint64_t> clock{1};  // step ids
  std::atomic<bool> stop{false};

  std::uint64_t NewContent() { return ++contents_; }
  SharedSequence Any(std::minstd_rand& random) {
    const std::lock_guard lock(mutex_);
    if (known_.empty()) return nullptr;
    auto it = known_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random() % known_.size()));
    return it->second;
  }
  void Know(SharedSequence s) {
    const std::lock_guard lock(mutex_);
    SharedSequence& known = known_[s->id()];
    // The answers of two creations may overtake each other on their way here.
    if (!known || known->generation < s->generation) known = std::move(s);
  }
  void Wrong(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (wrong_.size() < 10) wrong_.push_back(what);
    stop = true;
  }
  std::vector<std::string> wrong() {
    const std::lock_guard lock(mutex_);
    return wrong_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, SharedSequence> known_;  // by id; may be released already
  std::vector<std::string> wrong_;
  std::atomic<std::uint64_t> contents_{1000};
};

class Hammer {
 public:
  Hammer(World& world, int thread)
      : world_(world),
        cluster_(world.cluster),
        engine_(world.cluster.engine()),
        random_(static_cast<unsigned>(thread + 1)),
        own_name_("own" + std::to_string(thread)) {}

  void Run() {
    while (!world_.stop) {
      const int p = Roll(100);
      if (p < 8) {
        Create("shared" + std::to_string(Roll(kSharedNames)));
      } else if (p < 16) {
        Fork();
      } else if (p < 26) {
        Append();
      } else if (p < 50) {
        Step();
      } else if (p < 66) {
        Read();
      } else if (p < 80) {
        Own();
      } else if (p < 86) {
        Truncate();
      } else if (p < 92) {
        Release();
      } else if (p < 95) {
        List();
      } else {
        CancelStep();
      }
    }
  }

 private:
  int Roll(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void Did(What what) { ++world_.done[what]; }

  // Whether the answer is OK; a reason that nothing explains is an error.
  bool Ok(const Status& status, const char* what) {
    if (status.ok()) return true;
    if (!kExpected.contains(status.reason())) {
      world_.Wrong(std::string(what) + ": " + status.ToString());
    }
    return false;
  }

  std::vector<std::int64_t> Lengths(const TestSequence& s) {
    const Result<SequenceInfo> info = Await<SequenceInfo>([&](auto done) {
      engine_.GetSequence({.id = s.id(), .generation = s.generation}, std::move(done));
    });
    if (!Ok(info.status(), "get")) return {};
    return info->layer_lengths;
  }

  void Verify(const StepSpec& spec, const StepReply& reply, const char* what) {
    const RowErrors errors = cluster_.Check(spec, reply);
    if (!(errors.output <= cluster_.OutputLimit(spec.output_dtype)) || !(errors.lse <= 1e-5) ||
        reply.faulty_rows != 0) {
      std::ostringstream text;
      text << what << ": error " << errors.output << " LSE error " << errors.lse << " faulty rows "
           << reply.faulty_rows << " layer " << spec.layer;
      for (const StepItem& i : spec.items) {
        text << " {" << i.sequence->id() << " start " << i.start << " count " << i.count << "}";
      }
      world_.Wrong(text.str());
    }
  }

  bool RunStep(const StepSpec& spec, const char* what) {
    const Result<StepReply> reply = cluster_.Step(spec);
    if (!Ok(reply.status(), what)) return false;
    Verify(spec, *reply, what);
    return true;
  }

  // The step twice at the same time: the same bytes, or refused because somebody came between.
  void RunTwice(const StepSpec& spec, const char* what) {
    std::promise<Result<StepReply>> second;
    engine_.SubmitStep(cluster_.MakeStep(spec),
                       [&](Result<StepReply> reply) { second.set_value(std::move(reply)); });
    const Result<StepReply> a = cluster_.Step(spec);
    const Result<StepReply> b = second.get_future().get();
    Ok(a.status(), what);
    Ok(b.status(), what);
    if (a.ok()) Verify(spec, *a, what);
    if (a.ok() && b.ok()) {
      Did(kReplayed);
      if (a->output != b->output || a->lse != b->lse) {
        world_.Wrong(std::string(what) + ": the same step twice gave different bytes");
      }
    }
  }

  bool Make(TestSequence& s) {
    const Result<CreateReply> reply = Await<CreateReply>([&](auto done) {
      engine_.CreateSequence({.id = s.id(),
                              .request_id = "r" + std::to_string(world_.NewContent()),
                              .softmax_scale = cluster_.config().model.softmax_scale},
                             std::move(done));
    });
    if (!Ok(reply.status(), "create")) return false;
    s.generation = reply->generation;
    Did(kCreated);
    return true;
  }

  void Create(const std::string& id) {
    TestSequence s(id, world_.NewContent());
    if (Make(s)) world_.Know(std::make_shared<const TestSequence>(s));
  }

  void Fork() {
    const SharedSequence parent = world_.Any(random_);
    if (!parent) return;
    const std::vector<std::int64_t> lengths = Lengths(*parent);
    if (lengths.empty()) return;
    const std::int64_t shortest = std::ranges::min(lengths);
    const std::int64_t at = Roll(3) > 0 ? shortest : Roll(static_cast<int>(shortest) + 1);
    TestSequence child =
        parent->Forked("shared" + std::to_string(Roll(kSharedNames)), at, world_.NewContent());
    const Result<CreateReply> reply = Await<CreateReply>([&](auto done) {
      engine_.ForkSequence({.parent = parent->ref(),
                            .id = child.id(),
                            .request_id = "f" + std::to_string(world_.NewContent()),
                            .at_length = at},
                           std::move(done));
    });
    if (!Ok(reply.status(), "fork")) return;
    child.generation = reply->generation;
    Did(kForked);
    world_.Know(std::make_shared<const TestSequence>(child));
  }

  void Append() {
    const SharedSequence s = world_.Any(random_);
    if (s) AppendTo(*s);
  }

  void AppendTo(const TestSequence& s) {
    const std::vector<std::int64_t> lengths = Lengths(s);
    if (lengths.empty() || lengths[0] > kLongest) return;
    const int layer_begin = Roll(2);
    AppendRequest request{.sequence = s.ref(),
                          .step_id = ++world_.clock,
                          .start = lengths[static_cast<std::size_t>(layer_begin)],
                          .count = 1 + Roll(30),
                          .layer_begin = layer_begin,
                          .layer_count = 1 + Roll(2 - layer_begin)};
    std::atomic<int> lost{0};
    const Result<AppendId> id = Await<AppendId>([&](auto done) {
      engine_.BeginAppend(
          request, [&](const Status&) { ++lost; }, std::move(done));
    });
    if (!Ok(id.status(), "begin append")) return;
    Status status;
    for (int i = 0; i < request.layer_count && status.ok(); ++i) {
      std::int64_t half = request.count / 2;
      for (const auto& [offset, n] :
           {std::pair(half, request.count - half), std::pair(std::int64_t{0}, half)}) {
        if (n == 0 || !status.ok()) continue;
        status = cluster_
                     .WriteAppend(*id, cluster_.MakeChunk(s, request.layer_begin + i, request.start,
                                                          offset, n))
                     .status();
      }
    }
    bool committed = false;
    if (status.ok() && Roll(4) == 0) {
      engine_.CancelAppend(*id);
      status = cluster_.CommitAppend(*id).status();
      if (status.reason() != Reason::kAppendCancelled) {
        world_.Wrong("a cancelled append answers " + status.ToString());
      }
      if (lost == 0) Did(kCancelled);
    } else if (status.ok()) {
      const Result<AppendReply> reply = cluster_.CommitAppend(*id);
      status = reply.status();
      committed = status.ok();
      if (committed && reply->length != request.start + request.count) {
        world_.Wrong("an append committed another length");
      }
    }
    Ok(status, "append");
    if (committed) Did(kAppended);
    // The callback refers to this frame. It ran before the answer that said the append is gone.
    if (lost > 1 || (committed && lost != 0)) world_.Wrong("on_lost ran when it must not");
  }

  void Step() {
    StepSpec spec{.step_id = ++world_.clock, .layer = Roll(2)};
    const std::vector<SharedSequence> chosen = Some();
    for (const SharedSequence& s : chosen) {
      const std::vector<std::int64_t> lengths = Lengths(*s);
      if (lengths.empty()) return;
      const std::int64_t length = lengths[static_cast<std::size_t>(spec.layer)];
      StepItem item{s.get(), length, 1 + Roll(4)};
      if (length > 0 && (length > kLongest || Roll(6) == 0)) {
        item.start = Roll(static_cast<int>(length));
        item.rewind = true;
      }
      spec.items.push_back(item);
    }
    if (spec.items.empty()) return;
    const bool rewinds =
        std::ranges::any_of(spec.items, [](const StepItem& i) { return i.rewind; });
    if (Roll(3) == 0) {
      RunTwice(spec, "step twice");
    } else if (RunStep(spec, "step")) {
      Did(rewinds ? kRewound : kStepped);
      if (Roll(3) == 0) RunStep(spec, "step again");
    }
  }

  // Up to four sequences, each once.
  std::vector<SharedSequence> Some() {
    std::vector<SharedSequence> chosen;
    for (int i = 1 + Roll(4); i > 0; --i) {
      const SharedSequence s = world_.Any(random_);
      const auto same = [&](const SharedSequence& other) { return other->id() == s->id(); };
      if (s && std::ranges::none_of(chosen, same)) chosen.push_back(s);
    }
    return chosen;
  }

  void Read() {
    StepSpec spec{.layer = Roll(2), .write = false};
    if (Roll(2) == 0) spec.output_dtype = DType::kBf16;
    const std::vector<SharedSequence> chosen = Some();
    for (const SharedSequence& s : chosen) {
      const std::vector<std::int64_t> lengths = Lengths(*s);
      if (lengths.empty()) return;
      const auto length = static_cast<int>(lengths[static_cast<std::size_t>(spec.layer)]);
      if (length == 0) continue;
      const int count = 1 + Roll(std::min(length, 3));
      spec.items.push_back({s.get(), length - count - Roll(length - count + 1), count});
    }
    if (!spec.items.empty() && RunStep(spec, "read")) Did(kRead);
  }

  // A sequence of this thread alone, forked from a shared one: here every length is known.
  void Own() {
    const SharedSequence parent = world_.Any(random_);
    if (!parent) return;
    const std::vector<std::int64_t> lengths = Lengths(*parent);
    if (lengths.empty()) return;
    const std::int64_t at = Roll(static_cast<int>(std::ranges::min(lengths)) + 1);
    TestSequence own = parent->Forked(own_name_, at, world_.NewContent());
    const Result<CreateReply> reply = Await<CreateReply>([&](auto done) {
      engine_.ForkSequence({.parent = parent->ref(),
                            .id = own.id(),
                            .request_id = "o" + std::to_string(world_.NewContent()),
                            .at_length = at},
                           std::move(done));
    });
    if (!Ok(reply.status(), "fork own")) return;
    own.generation = reply->generation;
    std::int64_t length = at;
    std::uint64_t step_id = 0;
    bool full = false;
    for (int i = 0; i < 6 && !full; ++i) {
      const std::int64_t start =
          length > 0 && Roll(3) == 0 ? Roll(static_cast<int>(length)) : length;
      const bool rewind = start < length;
      if (rewind) own.Diverge(start, world_.NewContent());
      const int count = 1 + Roll(4);
      ++step_id;
      for (int layer = 0; layer < 2 && !full; ++layer) {
        const StepSpec spec{
            .step_id = step_id, .layer = layer, .items = {{&own, start, count, rewind}}};
        std::promise<Result<StepReply>> second;
        engine_.SubmitStep(cluster_.MakeStep(spec),
                           [&](Result<StepReply> r) { second.set_value(std::move(r)); });
        Result<StepReply> a = cluster_.Step(spec);
        Result<StepReply> b = second.get_future().get();
        // Nobody else writes here: only room can be missing, and then for both or for one.
        for (const Result<StepReply>* r : {&a, &b}) {
          const Reason why = r->status().reason();
          if (why == Reason::kKvCapacity || why == Reason::kOverloaded) {
            full = true;
          } else if (why != Reason::kNone) {
            world_.Wrong("own step: " + r->status().ToString());
          } else {
            Verify(spec, **r, "own step");
          }
        }
        if (a.ok() && b.ok() && a->output != b->output) world_.Wrong("own step: other bytes");
      }
      if (!full) {
        Did(kReplayed);
        length = start + count;
        const std::vector<std::int64_t> now = Lengths(own);
        if (!now.empty() && now != std::vector{length, length}) {
          world_.Wrong("own sequence: a step applied more or less than once");
        }
        RunStep({.layer = Roll(2),
                 .items = {{&own, Roll(static_cast<int>(length)), 1}},
                 .write = false},
                "own read");
      }
    }
    ReleaseOne(own.ref());
  }

  void Truncate() {
    const SharedSequence s = world_.Any(random_);
    if (!s) return;
    const std::vector<std::int64_t> lengths = Lengths(*s);
    if (lengths.empty()) return;
    const std::int64_t to = lengths[0] / 2 + Roll(20);
    const Result<SequenceInfo> info = Await<SequenceInfo>([&](auto done) {
      engine_.TruncateSequence({.sequence = s->ref(), .step_id = ++world_.clock, .to_length = to},
                               std::move(done));
    });
    if (!Ok(info.status(), "truncate")) return;
    if (std::ranges::max(info->layer_lengths) > to) world_.Wrong("a truncation left more");
    Did(kTruncated);
  }

  void ReleaseOne(const SequenceRef& ref) {
    const Result<ReleaseReply> reply = Await<ReleaseReply>(
        [&](auto done) { engine_.ReleaseSequences({.sequences = {ref}}, std::move(done)); });
    if (Ok(reply.status(), "release") && reply->released == 1) Did(kReleased);
  }

  void Release() {
    const SharedSequence s = world_.Any(random_);
    if (s) ReleaseOne(s->ref());
  }

  void List() {
    std::string token, last;
    do {
      const Result<ListReply> reply = Await<ListReply>([&](auto done) {
        engine_.ListSequences({.page_size = 5, .page_token = token}, std::move(done));
      });
      if (!Ok(reply.status(), "list")) return;
      for (const SequenceInfo& info : reply->sequences) {
        if (info.id <= last) world_.Wrong("a list is out of order");
        last = info.id;
      }
      token = reply->next_page_token;
    } while (!token.empty());
    const LoadInfo load = engine_.load();
    if (load.free_blocks < 0 || load.free_blocks > kBlocks) world_.Wrong("impossible load");
    Did(kListed);
  }

  // Cancels while the step waits or runs: it answers, and either way truly.
  void CancelStep() {
    const SharedSequence s = world_.Any(random_);
    if (!s) return;
    const std::vector<std::int64_t> lengths = Lengths(*s);
    if (lengths.empty()) return;
    const StepSpec spec{.step_id = ++world_.clock, .items = {{s.get(), lengths[0], 1}}};
    std::promise<Result<StepReply>> answer;
    StepHandle handle = engine_.SubmitStep(
        cluster_.MakeStep(spec), [&](Result<StepReply> r) { answer.set_value(std::move(r)); });
    handle.Cancel();
    const Result<StepReply> reply = answer.get_future().get();
    if (Ok(reply.status(), "cancelled step")) Verify(spec, *reply, "cancelled step");
  }

  World& world_;
  Cluster& cluster_;
  Engine& engine_;
  std::minstd_rand random_;
  const std::string own_name_;
};

void RunHammer(const ClusterOptions& options) {
  Cluster cluster(options);
  World world(cluster);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&world, t] { Hammer(world, t).Run(); });
  }
  // For the time asked, and longer if a busy machine has not come to everything by then.
  const TimePoint end = Clock::now() + std::chrono::seconds(Seconds());
  const TimePoint latest = end + std::chrono::seconds(60);
  const auto all_done = [&world] {
    return std::ranges::all_of(world.done, [](const auto& n) { return n > 0; });
  };
  while (!world.stop && (Clock::now() < end || (!all_done() && Clock::now() < latest))) {
    std::this_thread::sleep_for(Millis(20));
  }
  world.stop = true;
  for (std::thread& t : threads) t.join();

  for (const std::string& wrong : world.wrong()) UNSCOPED_INFO(wrong);
  CHECK(world.wrong().empty());
  std::string counts;
  for (int w = 0; w < kWhatCount; ++w) {
    counts += std::string(" ") + kWhatNames[w] + " " +
              std::to_string(world.done[static_cast<std::size_t>(w)]);
  }
  std::printf("%d ranks:%s, blocks copied on write %lld\n", options.ranks, counts.c_str(),
              static_cast<long long>(cluster.engine().load().cow_blocks));
  INFO(counts);
  CHECK(all_done());
  CHECK(cluster.engine().load().cow_blocks > 0);
  CHECK(cluster.engine().load().faulty_rows == 0);
  CHECK(cluster.engine().load().rank_failures == 0);

  ReleaseRequest all;
  const Result<ListReply> list = Await<ListReply>(
      [&](auto done) { cluster.engine().ListSequences({.page_size = 1000}, std::move(done)); });
  REQUIRE(list.ok());
  for (const SequenceInfo& info : list->sequences) {
    CHECK(info.open_appends == 0);
    all.sequences.push_back({info.id, info.generation});
  }
  const Result<ReleaseReply> released = Await<ReleaseReply>(
      [&](auto done) { cluster.engine().ReleaseSequences(all, std::move(done)); });
  REQUIRE(released.ok());
  CHECK(cluster.FreeBlocks() == kBlocks);
  CHECK(cluster.engine().Drain(Clock::now() + std::chrono::seconds(20)));
}

}  // namespace

TEST_CASE("16 threads on overlapping sequences: a2a, 2 ranks") {
  RunHammer({.ranks = 2, .heads = 4, .page_tokens = 4, .blocks = kBlocks, .timeout_ms = 60000});
}

TEST_CASE("16 threads on overlapping sequences: ag_rs, 4 ranks") {
  RunHammer({.ranks = 4,
             .heads = 4,
             .page_tokens = 4,
             .interleave = 2,
             .blocks = kBlocks,
             .exchange = ExchangeKind::kAgRs,
             .timeout_ms = 60000});
}

}  // namespace dcp::testing
