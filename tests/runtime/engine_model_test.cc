// Random requests against the engine, each predicted by tests/runtime/engine_model.h: code, reason,
// answer and after-state. A sample of the steps is checked against the float64 truth as well.
//
//   DCP_MODEL_REQUESTS  how many (5,000)      DCP_MODEL_SEED  of everything random (1)
//
// Every reason that an engine can raise in-process occurs. These it cannot raise, and why:
//   TENSOR_DATA, LSE_BASE, PROTOCOL   of the wire: server/ binds messages and raises them
//   CONFIG, BACKEND_CONTRACT, UNSUPPORTED   at start only, before there is an engine
//   INTERNAL   a broken invariant; must not occur
// Most come from the requests alone. The rest is made to happen:
//   OVERLOADED, CANCELLED, STEP_DEADLINE   in bursts behind a rank that is held in a step
//   RANK_FAILED   one request in 900 meets a rank that fails
//   APPEND_IDLE, DRAINING, RANKS_DOWN   on engines of their own, made now and then
#include "tests/runtime/engine_model.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <variant>

#include "base/wait.h"
#include "client/workload/truth.h"
#include "runtime/engine.h"
#include "tests/support/cluster.h"

namespace dcp::testing {
namespace {

constexpr Reason kNotOfTheEngine[] = {
    Reason::kTensorData,      Reason::kLseBase,     Reason::kProtocol, Reason::kConfig,
    Reason::kBackendContract, Reason::kUnsupported, Reason::kInternal};
constexpr int kCompareEvery = 500;
constexpr int kFailEvery = 900;
constexpr int kBurstEvery = 250;
constexpr int kMaxQueue = 8;
constexpr int kNames = 18;

struct CommitCase {
  AppendId append;
};
struct CancelCase {
  AppendId append;
};
using Request =
    std::variant<CreateRequest, ForkRequest, TruncateRequest, ReleaseRequest, GetSequenceRequest,
                 ListRequest, StepCase, AppendRequest, ChunkCase, CommitCase, CancelCase>;

struct Answer {
  Status status;
  std::variant<std::monostate, CreateReply, SequenceInfo, ReleaseReply, ListReply, StepReply,
               AppendId, AppendReply>
      value;
  template <class T>
  const T& As() const {
    return std::get<T>(value);
  }
};

// ---- A readable request ----

std::string Text(const SequenceRef& r) {
  return r.id + "#" + std::to_string(r.generation % 100000);
}

std::string Text(const TensorView& t) {
  std::string text(DTypeName(t.dtype));
  for (const std::int64_t d : t.shape) text += " " + std::to_string(d);
  return text + " (" + std::to_string(t.bytes.size()) + " bytes)";
}

template <class... Parts>
std::string Join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string Epoch(const std::optional<std::uint64_t>& expected) {
  return expected ? Join(" expected_epoch ", *expected) : "";
}

struct Describe {
  std::string operator()(const CreateRequest& r) const {
    return Join("Create \"", r.id.substr(0, 40), "\" request_id \"", r.request_id.substr(0, 40),
                "\" scale ", r.softmax_scale, r.lease ? Join(" lease ", r.lease->count()) : "",
                Epoch(r.expected_epoch));
  }
  std::string operator()(const ForkRequest& r) const {
    return Join("Fork ", Text(r.parent), " -> \"", r.id.substr(0, 40), "\" at ", r.at_length,
                " request_id \"", r.request_id.substr(0, 40), "\"",
                r.lease ? Join(" lease ", r.lease->count()) : "", Epoch(r.expected_epoch));
  }
  std::string operator()(const TruncateRequest& r) const {
    return Join("Truncate ", Text(r.sequence), " step_id ", r.step_id, " to ", r.to_length,
                Epoch(r.expected_epoch));
  }
  std::string operator()(const ReleaseRequest& r) const {
    std::string text = "Release";
    for (const SequenceRef& s : r.sequences) text += " " + Text(s);
    return text + Epoch(r.expected_epoch);
  }
  std::string operator()(const GetSequenceRequest& r) const {
    return Join("Get ", r.id, r.generation ? Join("#", *r.generation % 100000) : "",
                Epoch(r.expected_epoch));
  }
  std::string operator()(const ListRequest& r) const {
    return Join("List page_size ", r.page_size, " token \"", r.page_token, "\"",
                Epoch(r.expected_epoch));
  }
  std::string operator()(const StepCase& c) const {
    const StepRequest& r = c.request;
    std::string text = Join("Step step_id ", r.step_id, " layer ", r.layer);
    for (const StepEntry& e : r.entries) {
      text += Join(" {", Text(e.sequence), " start ", e.start, " count ", e.count,
                   e.rewind ? " rewind}" : "}");
    }
    text += Join(" query ", Text(r.query), r.new_kv ? " new_kv " + Text(*r.new_kv) : " read",
                 r.output_dtype ? Join(" -> ", DTypeName(*r.output_dtype)) : " -> no dtype");
    if (r.timeout) text += Join(" timeout ", r.timeout->count());
    if (c.cancelled) text += " cancelled";
    if (c.expired) text += " expired";
    return text + Epoch(r.expected_epoch);
  }
  std::string operator()(const AppendRequest& r) const {
    return Join("BeginAppend ", Text(r.sequence), " step_id ", r.step_id, " start ", r.start,
                " count ", r.count, " layers [", r.layer_begin, ", +", r.layer_count, ")",
                Epoch(r.expected_epoch));
  }
  std::string operator()(const ChunkCase& c) const {
    return Join("WriteAppend ", c.append, " layer ", c.chunk.layer, " offset ", c.chunk.offset, " ",
                Text(c.chunk.latents));
  }
  std::string operator()(const CommitCase& c) const { return Join("CommitAppend ", c.append); }
  std::string operator()(const CancelCase& c) const { return Join("CancelAppend ", c.append); }
};

std::string TextOf(const Request& r) { return std::visit(Describe{}, r); }

// ---- Ranks that fail or are held on demand ----

class Hold {
 public:
  void ArmFault(int rank, RankPhase phase) {
    const std::lock_guard lock(mutex_);
    fault_ = {rank, phase};
  }
  bool fault_armed() {
    const std::lock_guard lock(mutex_);
    return fault_.has_value();
  }
  // The next entry of rank 0 into write waits until Release().
  void ArmHold() {
    const std::lock_guard lock(mutex_);
    hold_ = true;
    held_ = false;
  }
  bool WaitHeld() {
    std::unique_lock lock(mutex_);
    return WaitUntil(changed_, lock, Clock::now() + std::chrono::seconds(30),
                     [this] { return held_; });
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    hold_ = false;
    held_ = false;
    changed_.notify_all();
  }
  Status Enter(int rank, RankPhase phase) {
    std::unique_lock lock(mutex_);
    if (fault_ && *fault_ == std::pair(rank, phase)) {
      fault_.reset();
      return Status(Reason::kInternal, "injected");
    }
    if (hold_ && rank == 0 && phase == RankPhase::kWrite) {
      held_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !hold_; });
    }
    return Status::Ok();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::pair<int, RankPhase>> fault_;
  bool hold_ = false;
  bool held_ = false;
};

// ---- Sending ----

using Lost = std::shared_ptr<std::atomic<Reason>>;  // kNone: not lost

struct Sent {
  std::shared_ptr<std::promise<Answer>> promise = std::make_shared<std::promise<Answer>>();
  std::future<Answer> answer = promise->get_future();
  StepHandle handle;
  Lost lost = std::make_shared<std::atomic<Reason>>(Reason::kNone);
};

template <class T>
Done<T> Into(const Sent& sent) {
  return [promise = sent.promise](Result<T> result) {
    Answer answer{.status = result.status(), .value = {}};
    if (result.ok()) answer.value = *std::move(result);
    promise->set_value(std::move(answer));
  };
}

struct Sender {
  Engine& engine;
  Sent& sent;
  void operator()(const CreateRequest& r) { engine.CreateSequence(r, Into<CreateReply>(sent)); }
  void operator()(const ForkRequest& r) { engine.ForkSequence(r, Into<CreateReply>(sent)); }
  void operator()(const TruncateRequest& r) {
    engine.TruncateSequence(r, Into<SequenceInfo>(sent));
  }
  void operator()(const ReleaseRequest& r) { engine.ReleaseSequences(r, Into<ReleaseReply>(sent)); }
  void operator()(const GetSequenceRequest& r) { engine.GetSequence(r, Into<SequenceInfo>(sent)); }
  void operator()(const ListRequest& r) { engine.ListSequences(r, Into<ListReply>(sent)); }
  void operator()(const StepCase& c) {
    sent.handle = engine.SubmitStep(c.request, Into<StepReply>(sent));
  }
  void operator()(const AppendRequest& r) {
    engine.BeginAppend(
        r, [lost = sent.lost](const Status& why) { *lost = why.reason(); }, Into<AppendId>(sent));
  }
  void operator()(const ChunkCase& c) {
    engine.WriteAppend(c.append, c.chunk, Into<AppendId>(sent));
  }
  void operator()(const CommitCase& c) { engine.CommitAppend(c.append, Into<AppendReply>(sent)); }
  void operator()(const CancelCase& c) {
    engine.CancelAppend(c.append);
    // Has no answer of its own: the append is gone when the next request is answered.
    engine.CommitAppend(c.append, Into<AppendReply>(sent));
  }
};

Sent Send(Engine& engine, const Request& request) {
  Sent sent;
  Sender sender{engine, sent};
  std::visit(sender, request);
  return sent;
}

// What was asked and answered, over all engines of a run.
struct Tally {
  std::map<Reason, std::int64_t> reasons;
  std::map<std::string, std::int64_t> applied;  // OK, by kind of request
  std::int64_t requests = 0;
  std::int64_t applied_total = 0;  // OK and not a mere Get or List
  std::int64_t rows_verified = 0;
  std::int64_t replays_verified = 0;
  double max_error = 0;
};

// ---- The driver of one engine ----

class Driver {
 public:
  Driver(const ClusterOptions& options, std::uint64_t seed, double verify_rate, Tally& tally)
      : options_(options),
        config_(Config(options)),
        synthetic_({.heads = config_.model.heads,
                    .d_qk = config_.model.d_qk(),
                    .softmax_scale = config_.model.softmax_scale},
                   seed),
        verify_rate_(verify_rate),
        random_(seed),
        tally_(tally) {
    EngineHooks hooks;
    hooks.poison_kv = true;
    hooks.rank_fault = [hold = hold_](int rank, RankPhase phase) {
      return hold->Enter(rank, phase);
    };
    auto engine = Engine::Create(config_, hooks);
    REQUIRE(engine.ok());
    engine_ = *std::move(engine);
    model_ = std::make_unique<EngineModel>(config_, engine_->info().epoch);
  }
  ~Driver() { hold_->Release(); }

  // Sends about `requests` requests; "" or the first mismatch.
  std::string Run(std::int64_t requests) {
    const std::int64_t end = tally_.requests + requests;
    std::int64_t next_compare = tally_.requests + kCompareEvery;
    std::int64_t next_burst = tally_.requests + kBurstEvery;
    std::int64_t next_fault = tally_.requests + kFailEvery / 2;
    while (tally_.requests < end && error_.empty()) {
      if (tally_.requests >= next_fault) {
        next_fault += kFailEvery;
        const auto phase = static_cast<RankPhase>(Int(1, 4));
        hold_->ArmFault(static_cast<int>(Int(0, config_.ranks.count - 1)), phase);
        model_->ArmFault(phase);
      }
      if (tally_.requests >= next_burst && !model_->fault_armed()) {
        next_burst += kBurstEvery;
        Burst();
      } else if (last_step_ && Chance(0.01)) {
        Twice();
      } else {
        One(Generate());
      }
      if (tally_.requests >= next_compare) {
        next_compare += kCompareEvery;
        CompareAll();
      }
    }
    return error_;
  }

  // Ends everything: every block is free again.
  std::string Finish() {
    while (model_->fault_armed() && error_.empty()) One(Generate());
    if (error_.empty()) CompareAll();
    if (!error_.empty()) return error_;
    for (int i = 0; !model_->appends().empty() && i < 2;
         ++i) {  // some by hand, the rest by release
      One(CancelCase{model_->appends().begin()->first});
    }
    ReleaseRequest all;
    for (const auto& [id, s] : model_->sequences()) all.sequences.push_back({id, s.generation});
    One(all);
    if (error_.empty() && engine_->load().free_blocks != config_.kv.blocks) {
      error_ = Join("after all is released, ", engine_->load().free_blocks, " of ",
                    config_.kv.blocks, " blocks are free");
    }
    return error_;
  }

  // Any request, for engines that refuse everything.
  Request Generate() {
    if (model_->free_blocks() < 3 && Chance(0.2)) return Chance(0.8) ? Release() : Truncate();
    const double p = Unit();
    if (p < 0.60) return Step();
    if (p < 0.66) return Create();
    if (p < 0.73) return Fork();
    if (p < 0.76) return Truncate();
    if (p < 0.79) return Release();
    if (p < 0.82) return Get();
    if (p < 0.84) return List();
    if (p < 0.88) return Begin();
    return Continue();
  }

  static EngineConfig Config(const ClusterOptions& options) {
    EngineConfig c = MakeConfig(options);
    c.limits.max_sequences = 9;
    c.limits.max_context = 96;
    c.limits.max_batch = 6;
    c.limits.max_step_tokens = 24;
    c.limits.max_queue = kMaxQueue;
    c.limits.max_open_appends = 5;
    c.limits.default_step_timeout = Millis(600000);
    c.limits.max_step_timeout = Millis(600000);
    c.limits.append_idle_timeout = Millis(86400000);
    return c;
  }

 private:
  // ---- Random choices ----
  double Unit() { return std::uniform_real_distribution<double>()(random_); }
  bool Chance(double p) { return Unit() < p; }
  std::int64_t Int(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  template <class C>
  const auto& Pick(const C& c) {
    auto it = c.begin();
    std::advance(it, Int(0, static_cast<std::int64_t>(c.size()) - 1));
    return *it;
  }
  int layers() const { return config_.model.layers; }
  std::string Name() { return "s" + std::to_string(Int(0, kNames - 1)); }
  const ModelSequence* Any() {
    return model_->sequences().empty() ? nullptr : &Pick(model_->sequences()).second;
  }
  static SequenceRef Ref(const ModelSequence& s) { return {s.id, s.generation}; }
  TokenKey NewKey() { return {++contents_, 0}; }
  std::uint64_t NewStepId() { return ++clock_; }

  // Now and then an epoch is named, and now and then it is wrong.
  template <class R>
  R Epoched(R r) {
    if (Chance(0.02)) r.expected_epoch = model_->epoch();
    if (Chance(0.005)) r.expected_epoch = model_->epoch() - static_cast<std::uint64_t>(Int(1, 3));
    return r;
  }
  // Now and then a reference is wrong.
  SequenceRef Loose(SequenceRef r) {
    if (Chance(0.01)) r.id = Chance(0.5) ? "nobody" : "";
    if (Chance(0.01)) r.generation += Chance(0.5) ? 1 : static_cast<std::uint64_t>(-1);
    return r;
  }
  std::string LooseId(std::string id) {
    if (!Chance(0.04)) return id;
    static const std::vector<std::string> kBad{"",          "a b", "\xc3\xa9",
                                               "new\nline", "x*",  std::string(129, 'a')};
    return Chance(0.2) ? "other." + std::string(122, 'a') : Pick(kBad);
  }
  std::string LooseRequestId(std::string id) {
    if (!Chance(0.04)) return id;
    static const std::vector<std::string> kBad{"", "tab\t", std::string(129, 'a'), "\x7f"};
    return Pick(kBad);
  }
  std::optional<Millis> Lease() {
    if (Chance(0.04)) {
      static const std::vector<std::int64_t> kBad{0, -1, 99, 86400001};
      return Millis(Pick(kBad));
    }
    return Chance(0.1) ? std::optional(Millis(86400000)) : std::nullopt;
  }

  // ---- Requests ----
  Request Create() {
    if (!made_.empty() && Chance(0.15)) {  // an earlier one again, dead or alive
      return Pick(made_);
    }
    CreateRequest r{.id = LooseId(Name()),
                    .request_id = LooseRequestId("c" + std::to_string(++request_ids_)),
                    .softmax_scale = config_.model.softmax_scale,
                    .lease = Lease()};
    if (Chance(0.05)) r.softmax_scale *= 1.0000001;
    r = Epoched(r);
    made_.emplace_back(r);
    if (made_.size() > 12) made_.pop_front();
    return r;
  }

  Request Fork() {
    const ModelSequence* parent = Any();
    if (parent == nullptr) return Create();
    if (!made_.empty() && Chance(0.1)) return Pick(made_);
    const std::int64_t shortest = parent->Shortest();
    ForkRequest r{.parent = Loose(Ref(*parent)),
                  .id = LooseId(Name()),
                  .request_id = LooseRequestId("f" + std::to_string(++request_ids_)),
                  .at_length = Chance(0.5) ? shortest : Int(0, shortest),
                  .lease = Lease()};
    for (int i = 0; i < 4 && model_->Find(r.id) != nullptr; ++i) r.id = Name();
    if (Chance(0.05)) r.at_length = shortest + Int(1, 3);
    if (Chance(0.03)) r.at_length = -Int(1, 3);
    r = Epoched(r);
    made_.emplace_back(r);
    if (made_.size() > 12) made_.pop_front();
    return r;
  }

  Request Truncate() {
    const ModelSequence* s = Any();
    if (s == nullptr) return Create();
    TruncateRequest r{.sequence = Loose(Ref(*s)), .step_id = NewStepId()};
    r.to_length = Chance(0.8) ? Int(s->Shortest() / 2, s->Longest()) : Int(0, 200);
    if (Chance(0.15)) {  // the last write again, or nearly
      r.step_id = s->NewestStep();
      r.to_length = s->layers[0].start + (Chance(0.2) ? 1 : 0);
    }
    if (Chance(0.05)) r.step_id = s->NewestStep() / 2;
    if (Chance(0.03)) r.step_id = 0;
    if (Chance(0.03)) r.to_length = -1;
    return Epoched(r);
  }

  Request Release() {
    ReleaseRequest r;
    for (std::int64_t i = Int(1, 2); i > 0; --i) {
      const ModelSequence* s = Any();
      if (s == nullptr) continue;
      r.sequences.push_back(Ref(*s));
      if (Chance(0.15)) --r.sequences.back().generation;
      if (Chance(0.05)) r.sequences.push_back(r.sequences.back());
    }
    if (Chance(0.1)) r.sequences.push_back({"nobody", 1});
    return Epoched(r);
  }

  Request Get() {
    const ModelSequence* s = Any();
    GetSequenceRequest r{.id = s == nullptr || Chance(0.1) ? Name() : s->id};
    if (s != nullptr && Chance(0.5)) r.generation = s->generation + (Chance(0.1) ? 1 : 0);
    return Epoched(r);
  }

  Request List() {
    ListRequest r{.page_size = static_cast<int>(Int(0, 6))};
    if (Chance(0.6)) r.page_token = Name();
    if (Chance(0.15)) r.page_size = Chance(0.5) ? -1 : 1001;
    if (Chance(0.05)) r.page_token = "not a token";
    return Epoched(r);
  }

  // What becomes a step; a mutation of it becomes a bad one.
  struct Draft {
    std::uint64_t step_id = 0;
    std::int64_t layer = 0;
    std::vector<StepEntry> entries;
    std::vector<std::vector<TokenKey>> keys;  // [entries][count]
    bool write = true;
  };

  // A read of tokens that are there; false if there are none.
  bool AddRead(Draft& d, const ModelSequence& s) {
    const std::int64_t length = s.layers[static_cast<std::size_t>(d.layer)].length();
    if (length == 0) return false;
    const std::int64_t count = Int(1, std::min<std::int64_t>(4, length));
    const std::int64_t start = Chance(0.5) ? length - count : Int(0, length - count);
    d.entries.push_back(
        {.sequence = Ref(s), .start = start, .count = static_cast<std::int32_t>(count)});
    d.keys.emplace_back(static_cast<std::size_t>(count));
    return true;
  }

  // A write that d.step_id allows; false if it allows none.
  bool AddWrite(Draft& d, const ModelSequence& s) {
    const ModelLayer& l = s.layers[static_cast<std::size_t>(d.layer)];
    StepEntry e{.sequence = Ref(s)};
    std::vector<TokenKey> keys;
    if (l.step_id > d.step_id) return false;
    if (l.step_id == d.step_id) {
      if (!l.HasLastWrite() || l.count > config_.limits.max_query_tokens) return false;
      e.start = l.start;
      e.count = static_cast<std::int32_t>(l.count);
      e.rewind = Chance(0.3);  // says nothing in a replay
      keys.assign(l.tokens.begin() + l.start, l.tokens.begin() + l.start + l.count);
    } else {
      if (l.open_append != 0 && !Chance(0.05)) return false;
      e.start = l.length();
      if (l.length() > 0 && (Chance(0.12) || l.length() >= config_.limits.max_context)) {
        const std::int64_t back = Chance(0.2) ? l.length() : std::min<std::int64_t>(l.length(), 9);
        e.start -= Int(1, back);
        e.rewind = true;
      }
      const std::int64_t room = config_.limits.max_context - e.start;
      e.count = static_cast<std::int32_t>(
          Int(1, std::min<std::int64_t>(4, std::max<std::int64_t>(room, 1))));
      e.rewind = e.rewind || Chance(0.02);
      for (int j = 0; j < e.count; ++j) keys.push_back(NewKey());
    }
    d.entries.push_back(e);
    d.keys.push_back(std::move(keys));
    return true;
  }

  Request Step() {
    const ModelSequence* first = Any();
    if (first == nullptr) return Create();
    Draft d;
    d.write = !Chance(0.15);
    d.layer = Int(0, layers() - 1);
    if (d.write && Chance(0.7)) {  // layers that lag catch up
      for (int l = 0; l < layers(); ++l) {
        if (first->layers[static_cast<std::size_t>(l)].length() == first->Shortest()) d.layer = l;
      }
    }
    const ModelLayer& l = first->layers[static_cast<std::size_t>(d.layer)];
    d.step_id = Chance(0.4) ? clock_ : NewStepId();
    if (Chance(0.08) && l.HasLastWrite()) d.step_id = l.step_id;
    const std::int64_t batch = Chance(0.4) ? 1 : Int(2, 6);
    std::vector<const ModelSequence*> chosen{first};
    for (std::int64_t i = 1; i < batch; ++i) chosen.push_back(Any());
    std::ranges::sort(chosen);
    const auto twice = std::ranges::unique(chosen);
    chosen.erase(twice.begin(), twice.end());
    std::shuffle(chosen.begin(), chosen.end(), random_);
    for (const ModelSequence* s : chosen) d.write ? AddWrite(d, *s) : AddRead(d, *s);
    if (d.entries.empty()) return Begin();
    const bool spoil = Chance(0.25);
    if (spoil && Chance(0.6)) {
      Mutate(d);
      return Build(d);
    }
    StepCase step = Build(d);
    if (spoil) MutateTensors(step);
    return step;
  }

  void Mutate(Draft& d) {
    const auto i =
        static_cast<std::size_t>(Int(0, static_cast<std::int64_t>(d.entries.size()) - 1));
    StepEntry& e = d.entries[i];
    const ModelLayer& l = model_->Find(e.sequence.id)->layers[static_cast<std::size_t>(d.layer)];
    const auto recount = [&](std::int64_t count) {
      e.count = static_cast<std::int32_t>(count);
      d.keys[i].assign(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, 64)), NewKey());
    };
    switch (Int(0, 18)) {
      case 0: d.layer = Chance(0.5) ? -1 : layers() + Int(0, 2); break;
      case 1: d.entries.clear(), d.keys.clear(); break;
      case 2:
        while (d.entries.size() <= static_cast<std::size_t>(config_.limits.max_batch)) {
          const StepEntry copy = d.entries[0];
          const std::vector<TokenKey> keys = d.keys[0];
          d.entries.push_back(copy);
          d.keys.push_back(keys);
        }
        break;
      case 3: recount(Chance(0.5) ? 0 : config_.limits.max_query_tokens + 1); break;
      case 4: recount(Chance(0.5) ? -1 : 1 << 30); break;
      case 5:
        for (std::size_t k = 0; k < d.entries.size(); ++k) {
          d.entries[k].count = 8;
          d.keys[k].assign(8, NewKey());
        }
        break;
      case 6: {
        const StepEntry copy = e;
        const std::vector<TokenKey> keys = d.keys[i];
        if (d.entries.size() < 6) d.entries.push_back(copy), d.keys.push_back(keys);
        break;
      }
      case 7: d.step_id = 0; break;
      case 8: e.start = Chance(0.5) ? -1 : std::numeric_limits<std::int64_t>::min(); break;
      case 9: e.rewind = true; break;
      case 10: e.start = l.length() + Int(1, 3); break;
      case 11: e.start = std::numeric_limits<std::int64_t>::max() - Int(0, 9); break;
      case 12: e.start = std::max<std::int64_t>(0, l.length() - Int(1, 3)), e.rewind = false; break;
      case 13:
        d.step_id = l.step_id > 1 ? Int(1, static_cast<std::int64_t>(l.step_id) - 1) : 1;
        break;
      case 14:  // the last write with another range
        d.write = true;
        d.step_id = l.step_id;
        e.start = l.start + Int(0, 1);
        recount(std::clamp<std::int64_t>(l.count + Int(0, 1), 1, 8));
        break;
      case 15:  // the last write with another latent
        if (l.HasLastWrite() && l.count <= 8) {
          d.write = true;
          d.step_id = l.step_id;
          e.start = l.start;
          e.count = static_cast<std::int32_t>(l.count);
          d.keys[i].assign(l.tokens.begin() + l.start, l.tokens.begin() + l.start + l.count);
          d.keys[i][static_cast<std::size_t>(Int(0, l.count - 1))] = NewKey();
        }
        break;
      case 16: e.sequence.id = Chance(0.5) ? "nobody" : ""; break;
      case 17: e.sequence.generation += Chance(0.5) ? 1 : static_cast<std::uint64_t>(-1); break;
      case 18: recount(8), e.start = std::max<std::int64_t>(l.length(), 1) - 1; break;
    }
  }

  struct Tensors {
    std::vector<Bf16> query, latents;
    std::vector<std::int64_t> query_shape, latent_shape;
  };

  void FillLatents(const std::vector<TokenKey>& keys, int layer, std::span<Bf16> out) const {
    const auto d_qk = static_cast<std::size_t>(config_.model.d_qk());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      synthetic_.Latent(keys[i], layer, out.subspan(i * d_qk, d_qk));
    }
  }

  // A query made of the latents of its own position, of an earlier one (another for each head) and
  // of the next one: an answer that misses one or sees too much is far off.
  void FillQuery(std::int32_t layer, const std::vector<TokenKey>& tokens, std::int64_t position,
                 std::span<Bf16> out) {
    const auto d_qk = static_cast<std::size_t>(config_.model.d_qk());
    std::vector<Bf16> own(d_qk), earlier(d_qk), next(d_qk);
    synthetic_.Latent(tokens[static_cast<std::size_t>(position)], layer, own);
    const bool has_next = static_cast<std::size_t>(position) + 1 < tokens.size();
    if (has_next) synthetic_.Latent(tokens[static_cast<std::size_t>(position) + 1], layer, next);
    for (std::size_t h = 0; h < out.size() / d_qk; ++h) {
      synthetic_.Latent(tokens[static_cast<std::size_t>(Int(0, position))], layer, earlier);
      for (std::size_t i = 0; i < d_qk; ++i) {
        const float q = 1.1f * ToFloat(own[i]) + 0.9f * ToFloat(earlier[i]) +
                        (has_next ? 1.1f * ToFloat(next[i]) : 0.0f);
        out[h * d_qk + i] = ToBf16(q);
      }
    }
  }

  StepCase Build(const Draft& d) {
    StepCase c;
    StepRequest& r = c.request;
    r.step_id = d.write || Chance(0.5) ? d.step_id : 0;
    r.layer = static_cast<std::int32_t>(d.layer);
    r.entries = d.entries;
    r.output_dtype = Chance(0.5) ? DType::kF32 : DType::kBf16;
    if (Chance(0.7)) r.lse_base = Chance(0.5) ? LogBase::kE : LogBase::kTwo;
    r = Epoched(std::move(r));
    const auto d_qk = static_cast<std::size_t>(config_.model.d_qk());
    const auto row = static_cast<std::size_t>(config_.model.heads) * d_qk;
    const auto tensors = std::make_shared<Tensors>();
    for (std::size_t i = 0; i < d.entries.size(); ++i) {
      const StepEntry& e = d.entries[i];
      c.keys.insert(c.keys.end(), d.keys[i].begin(), d.keys[i].end());
      // The layer as the entry's tokens would make it.
      const ModelSequence* s = model_->Find(e.sequence.id);
      const bool known = s != nullptr && d.layer >= 0 && d.layer < layers() && e.start >= 0 &&
                         e.start <= s->layers[static_cast<std::size_t>(d.layer)].length();
      std::vector<TokenKey> tokens;
      if (known) {
        tokens = s->layers[static_cast<std::size_t>(d.layer)].tokens;
        if (d.write) {
          tokens.resize(static_cast<std::size_t>(e.start));
          tokens.insert(tokens.end(), d.keys[i].begin(), d.keys[i].end());
        }
      }
      for (std::size_t j = 0; j < d.keys[i].size(); ++j) {
        const std::int64_t p = known ? e.start + static_cast<std::int64_t>(j) : 0;
        tensors->query.resize(tensors->query.size() + row);
        if (known && p < static_cast<std::int64_t>(tokens.size())) {
          FillQuery(r.layer, tokens, p,
                    std::span(tensors->query).subspan(tensors->query.size() - row));
        }
      }
    }
    const auto count = static_cast<std::int64_t>(c.keys.size());
    tensors->latents.resize(c.keys.size() * d_qk);
    FillLatents(c.keys, r.layer, tensors->latents);
    tensors->query_shape = {count, config_.model.heads, config_.model.d_qk()};
    tensors->latent_shape = {count, config_.model.d_qk()};
    r.query = {.shape = tensors->query_shape, .bytes = std::as_bytes(std::span(tensors->query))};
    if (d.write) {
      r.new_kv = {.shape = tensors->latent_shape,
                  .bytes = std::as_bytes(std::span(tensors->latents))};
    }
    r.keepalive = tensors;
    return c;
  }

  // The new dims live as long as the request.
  void MutateShape(TensorView& t, std::shared_ptr<const void>& keepalive) {
    struct Dims {
      std::shared_ptr<const void> tensors;
      std::vector<std::int64_t> shape;
    };
    const auto dims = std::make_shared<Dims>(Dims{keepalive, {t.shape.begin(), t.shape.end()}});
    std::vector<std::int64_t>& s = dims->shape;
    if (s.empty()) return;
    switch (Int(0, 5)) {
      case 0: s.pop_back(); break;
      case 1: s.push_back(1); break;
      case 2: s[0] += 1; break;
      case 3: s[0] = -s[0]; break;
      case 4: s.back() = std::int64_t{1} << 62; break;
      case 5: s.clear(); break;
    }
    t.shape = s;
    keepalive = dims;
  }

  void MutateTensors(StepCase& c) {
    StepRequest& r = c.request;
    TensorView& t = r.new_kv && Chance(0.5) ? *r.new_kv : r.query;
    switch (Int(0, 7)) {
      case 0: r.output_dtype.reset(); break;
      case 1: t.dtype = DType::kF32; break;
      case 2:
      case 3: MutateShape(t, r.keepalive); break;
      case 4: t.bytes = t.bytes.first(t.bytes.size() - (Chance(0.5) ? 1 : 2)); break;
      case 5: t.bytes = {}; break;
      case 6: r.timeout = Millis(Chance(0.5) ? -1 : 0); break;
      case 7: r.timeout = Millis(Chance(0.5) ? 600001 : 600000); break;
    }
  }

  Request Begin() {
    const ModelSequence* s = Any();
    if (s == nullptr) return Create();
    AppendRequest r{.sequence = Loose(Ref(*s)), .step_id = NewStepId()};
    r.layer_begin = static_cast<std::int32_t>(Int(0, layers() - 1));
    const ModelLayer& l = s->layers[static_cast<std::size_t>(r.layer_begin)];
    const auto like = [&](const ModelLayer& other) {  // may share an append with l
      return other.length() == l.length() && other.open_append == l.open_append;
    };
    r.layer_count = 1;
    while (r.layer_begin + r.layer_count < layers() &&
           like(s->layers[static_cast<std::size_t>(r.layer_begin + r.layer_count)])) {
      ++r.layer_count;
    }
    r.start = l.length();
    const std::int64_t room = config_.limits.max_context - r.start;
    r.count = Int(1, std::clamp<std::int64_t>(room, 1, Chance(0.7) ? 12 : 50));
    if (Chance(0.15) && l.HasLastWrite()) {  // a replay
      r.step_id = l.step_id;
      r.start = l.start;
      r.count = l.count + (Chance(0.1) ? 1 : 0);
      if (Chance(0.7)) r.layer_count = 1;
    }
    switch (Int(0, 40)) {
      case 0: r.step_id = 0; break;
      case 1: r.step_id = 1; break;
      case 2: r.layer_begin = -1; break;
      case 3: r.layer_count = layers() + 1; break;
      case 4: r.layer_count = 0; break;
      case 5: r.count = -Int(0, 1); break;
      case 6: r.start = -1; break;
      case 7: r.start += Int(1, 2); break;
      case 8: r.start = std::max<std::int64_t>(0, r.start - 1); break;
      case 9: r.count = room + 1; break;
      case 10: r.count = std::numeric_limits<std::int64_t>::max(); break;
      case 11: r.layer_begin = 0, r.layer_count = layers(); break;
      default: break;
    }
    return Epoched(r);
  }

  // The next request of an open append, or one of an append that is over.
  Request Continue() {
    if (model_->appends().empty()) return Begin();
    if (Chance(0.02)) {
      const AppendId gone = Chance(0.5) ? 1 : static_cast<AppendId>(Int(1, 1 << 30));
      if (Chance(0.3)) return CommitCase{gone};
      return Chunk(gone, model_->appends().begin()->second);
    }
    const auto& [id, append] = Pick(model_->appends());
    if (Chance(0.03)) return CancelCase{id};
    if (append.Missing() == 0 || Chance(0.03)) return CommitCase{id};
    return Chunk(id, append);
  }

  Request Chunk(AppendId id, const ModelAppend& a) {
    ChunkCase c{.append = id};
    const AppendRequest& r = a.request;
    // The first hole after a random place.
    std::int64_t index = Int(0, r.layer_count - 1), offset = Int(0, r.count - 1);
    for (std::int64_t i = 0; i < r.layer_count * r.count; ++i) {
      if (!a.sent[static_cast<std::size_t>(index)][static_cast<std::size_t>(offset)]) break;
      if (++offset == r.count) offset = 0, index = (index + 1) % r.layer_count;
    }
    const auto& sent = a.sent[static_cast<std::size_t>(index)];
    const std::int64_t most = Int(1, 20);
    std::int64_t n = 0;
    while (n < most && offset + n < r.count && !sent[static_cast<std::size_t>(offset + n)]) ++n;
    n = std::max<std::int64_t>(n, 1);
    c.chunk.layer = r.layer_begin + static_cast<std::int32_t>(index);
    c.chunk.offset = offset;
    const ModelLayer* l = nullptr;
    if (const ModelSequence* s = model_->Find(a.sequence)) {
      l = &s->layers[static_cast<std::size_t>(c.chunk.layer)];
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const std::int64_t p = r.start + offset + j;
      c.keys.push_back(a.replay && l != nullptr && p < l->length() && !Chance(0.03)
                           ? l->tokens[static_cast<std::size_t>(p)]
                           : NewKey());
    }
    const auto tensors = std::make_shared<Tensors>();
    tensors->latents.resize(c.keys.size() * static_cast<std::size_t>(config_.model.d_qk()));
    FillLatents(c.keys, c.chunk.layer, tensors->latents);
    tensors->latent_shape = {n, config_.model.d_qk()};
    c.chunk.latents = {.shape = tensors->latent_shape,
                       .bytes = std::as_bytes(std::span(tensors->latents))};
    c.chunk.keepalive = tensors;
    switch (Int(0, 80)) {
      case 0: c.chunk.layer = r.layer_begin - 1; break;
      case 1: c.chunk.layer = r.layer_begin + r.layer_count; break;
      case 2: c.chunk.offset = -1; break;
      case 3: c.chunk.offset = r.count; break;
      case 4: c.chunk.offset = 0; break;  // perhaps sent before
      case 5: c.chunk.latents.dtype = DType::kF32; break;
      case 6: MutateShape(c.chunk.latents, c.chunk.keepalive); break;
      case 7: c.chunk.latents.bytes = c.chunk.latents.bytes.first(1); break;
      default: break;
    }
    return c;
  }

  // ---- Sending and judging ----
  void One(const Request& request) {
    Sent sent = Send(*engine_, request);
    Judge(request, sent);
  }

  // The last writing step twice more, without waiting in between: two replays, the same bytes.
  void Twice() {
    const StepCase step = *last_step_;
    if (model_->fault_armed()) return One(step);
    Sent first = Send(*engine_, step), second = Send(*engine_, step);
    Answer a = Judge(step, first, /*later=*/true);
    const Answer b = Judge(step, second);
    if (error_.empty() && a.status.ok() && b.status.ok() &&
        (a.As<StepReply>().output != b.As<StepReply>().output ||
         a.As<StepReply>().lse != b.As<StepReply>().lse)) {
      Fail("the same step twice gave different bytes");
    }
    ++tally_.replays_verified;
  }

  // Requests that wait behind a step whose rank is held, more of them than the queue takes.
  void Burst() {
    std::optional<StepCase> blocker;
    for (int i = 0; i < 50 && !blocker; ++i) {
      const ModelSequence* s = Any();
      Draft d;
      d.write = false;
      d.layer = Int(0, layers() - 1);
      if (s != nullptr && AddRead(d, *s)) blocker = Build(d);
      if (blocker) blocker->request.expected_epoch.reset();
    }
    if (!blocker) return;
    hold_->ArmHold();
    Sent held = Send(*engine_, *blocker);
    if (!hold_->WaitHeld()) return Fail("the blocking step did not reach its ranks");

    std::vector<std::pair<Request, Sent>> queue;
    TimePoint last_expires{};
    while (queue.size() < kMaxQueue + 3) {
      Request r = Generate();
      // Neither is bounded by the queue.
      if (std::holds_alternative<ChunkCase>(r) || std::holds_alternative<CommitCase>(r) ||
          std::holds_alternative<CancelCase>(r)) {
        continue;
      }
      auto* step = std::get_if<StepCase>(&r);
      const bool bad_timeout =
          step != nullptr && step->request.timeout && *step->request.timeout != Millis(600000);
      if (bad_timeout) continue;  // never waits
      if (step != nullptr && queue.size() < kMaxQueue) {
        if (Chance(0.25)) {
          step->expired = true;
          step->request.timeout = Millis(1);
          last_expires = Clock::now();
        } else if (Chance(0.3)) {
          step->cancelled = true;
        }
      }
      Sent sent = Send(*engine_, r);
      if (step != nullptr && step->cancelled) sent.handle.Cancel();
      queue.emplace_back(std::move(r), std::move(sent));
    }
    std::this_thread::sleep_until(last_expires + Millis(3));
    for (std::size_t i = kMaxQueue; i < queue.size(); ++i) {
      // Refused inside the call, without a trace.
      ++tally_.requests;
      if (queue[i].second.answer.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
        hold_->Release();
        return Fail("a request beyond the queue waits: " + TextOf(queue[i].first));
      }
      const Status status = queue[i].second.answer.get().status;
      ++tally_.reasons[status.reason()];
      if (status.reason() != Reason::kOverloaded) {
        hold_->Release();
        return Fail("expected OVERLOADED, got " + status.ToString());
      }
    }
    hold_->Release();
    Judge(*blocker, held, /*later=*/true);
    for (std::size_t i = 0; i < kMaxQueue && error_.empty(); ++i) {
      Judge(queue[i].first, queue[i].second, /*later=*/i + 1 < kMaxQueue);
    }
  }

  // What the model says, then what the engine said. `later`: the engine may be ahead of it already.
  Answer Judge(const Request& request, Sent& sent, bool later = false) {
    ++tally_.requests;
    // Before the model changes it: what the entries will see, for the truth.
    if (sent.answer.wait_for(std::chrono::seconds(120)) != std::future_status::ready) {
      history_.push_back(TextOf(request) + " -> no answer");
      Fail("no answer within 120 s");
      return {.status = Status(Reason::kInternal, "no answer"), .value = {}};
    }
    Answer answer = sent.answer.get();
    const bool fault_before = model_->fault_armed();
    std::string wrong;
    const Reason expected =
        std::visit([&](const auto& r) { return Apply(r, answer, sent, wrong); }, request);
    const Reason got = answer.status.reason();
    ++tally_.reasons[got];
    history_.push_back(TextOf(request) + " -> " + answer.status.ToString());
    if (history_.size() > 12) history_.pop_front();
    if (got != expected) {
      Fail("expected " + std::string(ReasonName(expected)));
    } else if (!wrong.empty()) {
      Fail(wrong);
    } else if (answer.status.code() != CodeOf(expected)) {
      Fail("the code does not belong to the reason");
    } else if (got != Reason::kNone && answer.status.message().empty()) {
      Fail("an error without a message");
    }
    if (got == Reason::kNone) {
      static const char* const kKinds[] = {"create", "fork",   "truncate", "release",
                                           "get",    "list",   "step",     "begin",
                                           "chunk",  "commit", "cancel"};
      const std::string kind = kKinds[request.index()];
      ++tally_.applied[kind];
      if (kind != "get" && kind != "list") ++tally_.applied_total;
    }
    if (std::holds_alternative<CancelCase>(request) && got == Reason::kAppendCancelled) {
      ++tally_.applied["cancel"];  // the answer is that of the Commit behind it
      ++tally_.applied_total;
    }
    if (!later && error_.empty()) CheckLoad(fault_before);
    return answer;
  }

  void CheckLost() {
    for (const auto& [id, why] : model_->TakeLost()) {
      const auto it = lost_.find(id);
      if (it == lost_.end() || it->second->load() != why) {
        Fail(Join("append ", id, " should have been lost with ", ReasonName(why)));
      }
    }
    for (const auto& [id, append] : model_->appends()) {
      const auto it = lost_.find(id);
      if (it == lost_.end() || it->second->load() != Reason::kNone) {
        Fail(Join("append ", id, " was lost, or is not known"));
      }
    }
  }

  void CheckLoad(bool fault_before) {
    if (const std::string wrong = model_->LearnEpoch(engine_->info().epoch); !wrong.empty()) {
      return Fail(wrong);
    }
    if (fault_before != hold_->fault_armed() && model_->fault_armed() != hold_->fault_armed()) {
      return Fail("the injected fault did not meet the request that should meet it");
    }
    CheckLost();
    const LoadInfo got = engine_->load(), want = model_->Load();
    const auto same = [&](const char* name, auto g, auto w) {
      if (g != w) Fail(Join("load: ", name, " is ", g, ", expected ", w));
    };
    same("sequences", got.sequences, want.sequences);
    same("open_appends", got.open_appends, want.open_appends);
    same("total_blocks", got.total_blocks, want.total_blocks);
    same("free_blocks", got.free_blocks, want.free_blocks);
    same("cow_blocks", got.cow_blocks, want.cow_blocks);
    same("steps", got.steps, want.steps);
    same("failed_steps", got.failed_steps, want.failed_steps);
    same("faulty_rows", got.faulty_rows, std::int64_t{0});
    same("rank_failures", got.rank_failures, want.rank_failures);
    same("epoch", got.epoch, want.epoch);
    same("queued", got.queued, 0);
  }

  std::string Differs(const SequenceInfo& got) {
    const ModelSequence* s = model_->Find(got.id);
    if (s == nullptr) return "\"" + got.id + "\" should not exist";
    const SequenceInfo want = model_->InfoOf(*s);
    std::string wrong;
    const auto same = [&](const char* name, auto g, auto w) {
      if (g != w) wrong += Join(" ", name, " is ", g, ", expected ", w, ";");
    };
    same("generation", got.generation, want.generation);
    same("layers", got.layer_lengths.size(), want.layer_lengths.size());
    for (std::size_t l = 0; l < std::min(got.layer_lengths.size(), want.layer_lengths.size());
         ++l) {
      same(Join("length of layer ", l).c_str(), got.layer_lengths[l], want.layer_lengths[l]);
    }
    same("max_step_id", got.max_step_id, want.max_step_id);
    same("blocks", got.blocks, want.blocks);
    same("shared_blocks", got.shared_blocks, want.shared_blocks);
    same("open_appends", got.open_appends, want.open_appends);
    same("leased", got.lease_remaining.has_value(), want.lease_remaining.has_value());
    same("epoch", got.epoch, want.epoch);
    return wrong.empty() ? "" : got.id + ":" + wrong;
  }

  void CompareAll() {
    for (int id = 0; id < kNames && error_.empty(); ++id) {
      One(GetSequenceRequest{.id = "s" + std::to_string(id)});
    }
    One(ListRequest{});
  }

  // One overload per kind of request: applies it to the model, then reads the answer.
  Reason Apply(const CreateRequest& r, const Answer& a, Sent&, std::string& wrong) {
    const Reason why = model_->Create(r);
    if (why == Reason::kNone && a.status.ok()) LearnCreated(r.id, a, wrong);
    return why;
  }
  Reason Apply(const ForkRequest& r, const Answer& a, Sent&, std::string& wrong) {
    const Reason why = model_->Fork(r);
    if (why == Reason::kNone && a.status.ok()) LearnCreated(r.id, a, wrong);
    return why;
  }
  void LearnCreated(const std::string& id, const Answer& a, std::string& wrong) {
    wrong = model_->LearnGeneration(id, a.As<CreateReply>().generation);
    if (a.As<CreateReply>().epoch != model_->epoch()) wrong += " wrong epoch";
  }
  Reason Apply(const TruncateRequest& r, const Answer& a, Sent&, std::string& wrong) {
    const Reason why = model_->Truncate(r);
    if (why == Reason::kNone && a.status.ok()) wrong = Differs(a.As<SequenceInfo>());
    return why;
  }
  Reason Apply(const ReleaseRequest& r, const Answer& a, Sent&, std::string& wrong) {
    int released = 0;
    const Reason why = model_->Release(r, released);
    if (why == Reason::kNone && a.status.ok() &&
        (a.As<ReleaseReply>().released != released ||
         a.As<ReleaseReply>().epoch != model_->epoch())) {
      wrong = Join("released ", a.As<ReleaseReply>().released, ", expected ", released);
    }
    return why;
  }
  Reason Apply(const GetSequenceRequest& r, const Answer& a, Sent&, std::string& wrong) {
    const Reason why = model_->Get(r);
    if (why == Reason::kNone && a.status.ok()) wrong = Differs(a.As<SequenceInfo>());
    return why;
  }
  Reason Apply(const ListRequest& r, const Answer& a, Sent&, std::string& wrong) {
    std::vector<std::string> ids;
    std::string next;
    const Reason why = model_->List(r, ids, next);
    if (why != Reason::kNone || !a.status.ok()) return why;
    const auto& list = a.As<ListReply>();
    std::vector<std::string> got;
    for (const SequenceInfo& info : list.sequences) {
      got.push_back(info.id);
      wrong += Differs(info);
    }
    if (got != ids) wrong += " the page has other sequences";
    if (list.next_page_token != next)
      wrong += " next_page_token is \"" + list.next_page_token + "\"";
    return why;
  }
  Reason Apply(const StepCase& c, const Answer& a, Sent&, std::string& wrong) {
    const Reason why = model_->Step(c);
    if (why != Reason::kNone || !a.status.ok()) return why;
    const StepRequest& r = c.request;
    const auto& reply = a.As<StepReply>();
    const std::size_t rows = c.keys.size() * static_cast<std::size_t>(config_.model.heads);
    const std::size_t d_v = static_cast<std::size_t>(config_.model.kv_lora_rank);
    if (reply.output.size() != rows * d_v * SizeOf(*r.output_dtype))
      wrong = "output has a wrong size";
    if (reply.lse.size() != (r.lse_base ? rows : 0)) wrong = "lse has a wrong size";
    if (reply.faulty_rows != 0) wrong = "faulty rows";
    if (reply.epoch != model_->epoch()) wrong = "wrong epoch";
    if (wrong.empty() && (Chance(verify_rate_) || r.entries.size() > 4)) Verify(c, reply, wrong);
    if (r.new_kv) last_step_ = c;
    return why;
  }
  Reason Apply(const AppendRequest& r, const Answer& a, Sent& sent, std::string& wrong) {
    const Reason why = model_->BeginAppend(r);
    if (why == Reason::kNone && a.status.ok()) {
      wrong = model_->LearnAppend(a.As<AppendId>());
      lost_[a.As<AppendId>()] = sent.lost;
    }
    return why;
  }
  Reason Apply(const ChunkCase& c, const Answer&, Sent&, std::string&) {
    return model_->WriteAppend(c);
  }
  Reason Apply(const CommitCase& c, const Answer& a, Sent&, std::string& wrong) {
    AppendReply want;
    const Reason why = model_->CommitAppend(c.append, want);
    if (why == Reason::kNone && a.status.ok()) {
      const auto& got = a.As<AppendReply>();
      if (got.length != want.length || got.replayed != want.replayed || got.epoch != want.epoch) {
        wrong = Join("length ", got.length, " replayed ", got.replayed, ", expected ", want.length,
                     " ", want.replayed);
      }
    }
    return why;
  }
  Reason Apply(const CancelCase& c, const Answer&, Sent&, std::string&) {
    model_->CancelAppend(c.append);
    return Reason::kAppendCancelled;
  }

  // Every row of the step against the float64 truth of the tokens that the model holds.
  void Verify(const StepCase& c, const StepReply& reply, std::string& wrong) {
    const StepRequest& r = c.request;
    const auto heads = static_cast<std::size_t>(config_.model.heads);
    const auto d_v = static_cast<std::size_t>(config_.model.kv_lora_rank);
    const auto d_qk = static_cast<std::size_t>(config_.model.d_qk());
    const TruthGeometry geometry{.d_qk = static_cast<int>(d_qk),
                                 .d_v = static_cast<int>(d_v),
                                 .softmax_scale = config_.model.softmax_scale};
    const std::span<const Bf16> queries(reinterpret_cast<const Bf16*>(r.query.bytes.data()),
                                        r.query.bytes.size() / sizeof(Bf16));
    const double limit = Limit(*r.output_dtype);
    std::size_t token = 0;
    for (const StepEntry& e : r.entries) {
      const auto& tokens =
          model_->Find(e.sequence.id)->layers[static_cast<std::size_t>(r.layer)].tokens;
      std::vector<Bf16> latents(static_cast<std::size_t>(e.start + e.count) * d_qk);
      std::vector<const Bf16*> rows;
      for (std::int64_t p = 0; p < e.start + e.count; ++p) {
        const std::size_t at = static_cast<std::size_t>(p) * d_qk;
        synthetic_.Latent(tokens[static_cast<std::size_t>(p)], r.layer,
                          std::span(latents).subspan(at, d_qk));
        rows.push_back(latents.data() + at);
      }
      for (std::int64_t j = 0; j < e.count; ++j, ++token) {
        const std::vector<RowTruth> truth = AttendRows(
            geometry, queries.subspan(token * heads * d_qk, heads * d_qk),
            std::span<const Bf16* const>(rows).first(static_cast<std::size_t>(e.start + j + 1)));
        for (std::size_t h = 0; h < heads; ++h) {
          const std::size_t row = token * heads + h;
          std::vector<float> output(d_v);
          for (std::size_t i = 0; i < d_v; ++i) {
            if (*r.output_dtype == DType::kF32) {
              std::memcpy(&output[i], reply.output.data() + (row * d_v + i) * 4, 4);
            } else {
              Bf16 x;
              std::memcpy(&x, reply.output.data() + (row * d_v + i) * 2, 2);
              output[i] = ToFloat(x);
            }
          }
          const double error = RelativeError(output, truth[h].output);
          tally_.max_error = std::max(tally_.max_error, error / limit);
          ++tally_.rows_verified;
          if (!(error <= limit)) {
            wrong = Join("entry ", e.sequence.id, " token ", j, " head ", h, ": error ", error,
                         ", at most ", limit);
          }
          if (r.lse_base) {
            const double lse = static_cast<double>(reply.lse[row]) *
                               (*r.lse_base == LogBase::kTwo ? 0.6931471805599453 : 1.0);
            const double lse_error =
                std::abs(lse - truth[h].lse) / std::max(1.0, std::abs(truth[h].lse));
            if (!(lse_error <= 1e-5)) {
              wrong = Join("entry ", e.sequence.id, " token ", j, " head ", h, ": LSE ", lse,
                           ", expected ", truth[h].lse);
            }
          }
        }
      }
    }
  }

  double Limit(DType output_dtype) const {
    const bool bf16_partial = config_.attention.partial_dtype == DType::kBf16;
    if (bf16_partial && config_.exchange == ExchangeKind::kAgRs) return 8e-3;
    return bf16_partial || output_dtype == DType::kBf16 ? 4e-3 : 1e-5;
  }

  void Fail(const std::string& what) {
    if (!error_.empty()) return;
    error_ = Join("ranks ", config_.ranks.count, " ", ExchangeName(config_.exchange), " request ",
                  tally_.requests, ": ", what, "\nthe last requests, oldest first:\n");
    for (const std::string& line : history_) error_ += "  " + line + "\n";
  }

  const ClusterOptions options_;
  const EngineConfig config_;
  const Synthetic synthetic_;
  const double verify_rate_;
  std::mt19937_64 random_;
  Tally& tally_;
  const std::shared_ptr<Hold> hold_ = std::make_shared<Hold>();
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineModel> model_;
  std::map<AppendId, Lost> lost_;
  std::deque<Request> made_;  // Creates and Forks, to be sent again
  std::optional<StepCase> last_step_;
  std::uint64_t clock_ = 0, contents_ = 0, request_ids_ = 0;
  std::deque<std::string> history_;
  std::string error_;
};

// ---- Engines of their own ----

// Requests to an engine that takes none: each is refused with `why` at once.
void ExpectRefused(Engine& engine, Driver& requests, int count, Reason why, Tally& tally) {
  for (int i = 0; i < count;) {
    const Request request = requests.Generate();
    if (const auto* step = std::get_if<StepCase>(&request)) {
      if (step->request.timeout) continue;  // a bad one is refused before
    }
    Sent sent = Send(engine, request);
    INFO(TextOf(request));
    REQUIRE(sent.answer.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    const Status status = sent.answer.get().status;
    CHECK(status.reason() == why);
    ++tally.reasons[status.reason()];
    ++tally.requests;
    ++i;
  }
}

void Drained(const ClusterOptions& options, Driver& requests, int count, Tally& tally) {
  auto engine = Engine::Create(Driver::Config(options));
  REQUIRE(engine.ok());
  REQUIRE((*engine)->Drain(Clock::now() + std::chrono::seconds(30)));
  ExpectRefused(**engine, requests, count, Reason::kDraining, tally);
}

void Down(ClusterOptions options, Driver& requests, int count, Tally& tally) {
  const auto hold = std::make_shared<Hold>();
  options.timeout_ms = 40;
  EngineHooks hooks;
  hooks.rank_fault = [hold](int rank, RankPhase phase) { return hold->Enter(rank, phase); };
  auto engine = Engine::Create(Driver::Config(options), hooks);
  if (!engine.ok()) {  // a busy machine cannot start ranks in 40 ms
    CHECK(engine.status().reason() == Reason::kRankFailed);
    options.timeout_ms = 2000;
    engine = Engine::Create(Driver::Config(options), hooks);
  }
  REQUIRE(engine.ok());
  const EngineConfig config = (*engine)->info().config;
  const std::uint64_t generation =
      Await<CreateReply>([&](auto done) {
        (*engine)->CreateSequence(
            {.id = "s", .request_id = "r", .softmax_scale = config.model.softmax_scale},
            std::move(done));
      })->generation;
  struct Tensors {
    std::vector<std::int64_t> query_shape, kv_shape;
    std::vector<std::byte> query, kv;
  };
  const std::int64_t heads = config.model.heads, d_qk = config.model.d_qk();
  const auto tensors = std::make_shared<Tensors>(
      Tensors{.query_shape = {1, heads, d_qk},
              .kv_shape = {1, d_qk},
              .query = std::vector<std::byte>(static_cast<std::size_t>(heads * d_qk * 2)),
              .kv = std::vector<std::byte>(static_cast<std::size_t>(d_qk * 2))});
  hold->ArmHold();
  const Result<StepReply> reply = Await<StepReply>([&](auto done) {
    (*engine)->SubmitStep({.step_id = 1,
                           .entries = {{.sequence = {"s", generation}, .count = 1}},
                           .query = {.shape = tensors->query_shape, .bytes = tensors->query},
                           .new_kv = TensorView{.shape = tensors->kv_shape, .bytes = tensors->kv},
                           .output_dtype = DType::kF32,
                           .keepalive = tensors},
                          std::move(done));
  });
  CHECK(reply.status().reason() == Reason::kRankFailed);
  ++tally.reasons[reply.status().reason()];
  ++tally.requests;
  const TimePoint end = Clock::now() + std::chrono::seconds(30);
  while ((*engine)->state() != EngineState::kRanksDown && Clock::now() < end) {
    std::this_thread::sleep_for(Millis(1));
  }
  ExpectRefused(**engine, requests, count, Reason::kRanksDown, tally);
  engine = Status(Reason::kInternal, "ended");
  hold->Release();
}

// An engine whose appends fall silent after a millisecond.
void Idle(const ClusterOptions& options, int rounds, std::uint64_t seed, Tally& tally) {
  EngineConfig config = Driver::Config(options);
  config.limits.append_idle_timeout = Millis(1);
  auto made = Engine::Create(config);
  REQUIRE(made.ok());
  Engine& engine = **made;
  EngineModel model(config, engine.info().epoch);
  std::mt19937_64 random(seed);
  const auto roll = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < rounds; ++i) {
    const CreateRequest create{.id = "s" + std::to_string(roll(4)),
                               .request_id = "r",
                               .softmax_scale = config.model.softmax_scale};
    Sent created = Send(engine, create);
    const Answer created_answer = created.answer.get();
    REQUIRE(created_answer.status.reason() == model.Create(create));
    REQUIRE(model.LearnGeneration(create.id, created_answer.As<CreateReply>().generation).empty());
    const AppendRequest begin{.sequence = {create.id, model.Find(create.id)->generation},
                              .step_id = 1,
                              .count = 1 + roll(50),
                              .layer_begin = 0,
                              .layer_count = 1 + roll(config.model.layers)};
    Sent sent = Send(engine, begin);
    const Answer answer = sent.answer.get();
    REQUIRE(answer.status.reason() == model.BeginAppend(begin));
    REQUIRE(model.LearnAppend(answer.As<AppendId>()).empty());
    model.LoseAppends(Reason::kAppendIdle);
    const TimePoint end = Clock::now() + std::chrono::seconds(30);
    while (*sent.lost == Reason::kNone && Clock::now() < end) {
      std::this_thread::sleep_for(Millis(1));
    }
    CHECK(*sent.lost == Reason::kAppendIdle);
    ++tally.reasons[*sent.lost];
    Sent commit = Send(engine, CommitCase{answer.As<AppendId>()});
    CHECK(commit.answer.get().status.reason() == Reason::kAppendCancelled);
    ++tally.reasons[Reason::kAppendCancelled];
    tally.reasons[Reason::kNone] += 2;
    tally.applied_total += 2;
    tally.applied["create"] += 1;
    tally.applied["begin"] += 1;
    tally.requests += 3;
    CHECK(engine.load().free_blocks == model.Load().free_blocks);
    CHECK(engine.load().open_appends == 0);
  }
}

std::int64_t FromEnvironment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}

void Print(const Tally& tally) {
  std::printf(
      "%lld requests, %lld applied (%.1f %%)\n", static_cast<long long>(tally.requests),
      static_cast<long long>(tally.applied_total),
      100.0 * static_cast<double>(tally.applied_total) / static_cast<double>(tally.requests));
  std::printf("rows verified %lld, steps sent twice %lld, largest error %.3f of its limit\n",
              static_cast<long long>(tally.rows_verified),
              static_cast<long long>(tally.replays_verified), tally.max_error);
  for (const auto& [kind, n] : tally.applied) {
    std::printf("  OK %-20s %8lld\n", kind.c_str(), static_cast<long long>(n));
  }
  for (const auto& [reason, n] : tally.reasons) {
    if (reason == Reason::kNone) continue;
    std::printf("  %-23s %8lld\n", std::string(ReasonName(reason)).c_str(),
                static_cast<long long>(n));
  }
}

}  // namespace

TEST_CASE("random requests are answered as the model predicts") {
  const std::int64_t requests = FromEnvironment("DCP_MODEL_REQUESTS", 5000);
  const auto seed = static_cast<std::uint64_t>(FromEnvironment("DCP_MODEL_SEED", 1));
  const ClusterOptions shapes[] = {
      {.ranks = 2, .layers = 3, .heads = 4, .page_tokens = 4, .blocks = 22},
      {.ranks = 1,
       .layers = 3,
       .heads = 4,
       .page_tokens = 8,
       .blocks = 20,
       .exchange = ExchangeKind::kAgRs},
      {.ranks = 4,
       .layers = 2,
       .heads = 8,
       .page_tokens = 4,
       .interleave = 2,
       .blocks = 14,
       .exchange = ExchangeKind::kAgRs,
       .partial_dtype = DType::kBf16},
      {.ranks = 2,
       .layers = 4,
       .heads = 6,
       .page_tokens = 4,
       .interleave = 4,
       .blocks = 24,
       .partial_dtype = DType::kBf16}};
  constexpr int kParts = 8;
  Tally tally;
  for (int part = 0; part < kParts; ++part) {
    ClusterOptions options = shapes[part % 4];
    options.timeout_ms = 60000;  // no rank is ever late here
    const std::uint64_t part_seed = HashWords(seed, static_cast<std::uint64_t>(part));
    Driver driver(options, part_seed, requests > 20000 ? 0.1 : 0.4, tally);
    std::string error = driver.Run(requests / kParts);
    if (error.empty()) error = driver.Finish();
    INFO("DCP_MODEL_SEED=" << seed << " DCP_MODEL_REQUESTS=" << requests << "\n" << error);
    REQUIRE(error.empty());
    Driver bystander(options, part_seed + 1, 0, tally);  // its requests go to engines that are over
    if (error = bystander.Run(60); !error.empty()) FAIL(error);
    const int refused = static_cast<int>(std::clamp<std::int64_t>(requests / 4000, 3, 25));
    Drained(options, bystander, refused, tally);
    Down(options, bystander, refused, tally);
    Idle(options, static_cast<int>(std::max<std::int64_t>(1, requests / 6000)), part_seed, tally);
  }
  Print(tally);

  CHECK(2 * tally.applied_total >= tally.requests);
  const std::int64_t at_least = requests >= 100000 ? 100 : requests >= 5000 ? 1 : 0;
  for (const ReasonEntry& entry : Reasons()) {
    INFO("seed " << seed << ": " << entry.name << " occurred " << tally.reasons[entry.reason]
                 << " times");
    if (std::ranges::find(kNotOfTheEngine, entry.reason) != std::end(kNotOfTheEngine)) {
      CHECK(tally.reasons[entry.reason] == 0);
    } else {
      CHECK(tally.reasons[entry.reason] >= at_least);
    }
  }
}

}  // namespace dcp::testing
