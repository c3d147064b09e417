// AppendKv: reserve, write chunks, commit or cancel; and everything that may happen in between.
#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <future>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "runtime/engine.h"
#include "tests/support/cluster.h"

namespace dcp::testing {
namespace {

using Lengths = std::vector<std::int64_t>;

ClusterOptions Small(int ranks = 2, int layers = 2, std::int64_t blocks = 64) {
  return {.ranks = ranks, .layers = layers, .heads = 4, .page_tokens = 4, .blocks = blocks};
}

AppendRequest Request(const TestSequence& s, std::uint64_t step_id, std::int64_t start,
                      std::int64_t count, int layer_begin = 0, int layer_count = 2) {
  return {.sequence = s.ref(),
          .step_id = step_id,
          .start = start,
          .count = count,
          .layer_begin = layer_begin,
          .layer_count = layer_count};
}

AppendId Begin(Cluster& cluster, const AppendRequest& request) {
  const Result<AppendId> id = cluster.BeginAppend(request);
  INFO(id.status().ToString());
  REQUIRE(id.ok());
  return *id;
}

// All tokens of some layers.
void WriteAll(Cluster& cluster, AppendId id, const TestSequence& s, const AppendRequest& request) {
  for (int i = 0; i < request.layer_count; ++i) {
    const Status status = cluster
                              .WriteAppend(id, cluster.MakeChunk(s, request.layer_begin + i,
                                                                 request.start, 0, request.count))
                              .status();
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

void Cancel(Cluster& cluster, AppendId id) {
  cluster.engine().CancelAppend(id);
  CHECK(cluster.CommitAppend(id).status().reason() == Reason::kAppendCancelled);
}

Reason BeginReason(Cluster& cluster, const AppendRequest& request) {
  const Result<AppendId> id = cluster.BeginAppend(request);
  if (id.ok()) Cancel(cluster, *id);
  return id.status().reason();
}

Reason StepReason(Cluster& cluster, const StepSpec& spec) {
  return cluster.Step(spec).status().reason();
}

Reason TruncateReason(Cluster& cluster, const TestSequence& s, std::uint64_t step_id,
                      std::int64_t to) {
  return Await<SequenceInfo>([&](auto done) {
           cluster.engine().TruncateSequence(
               {.sequence = s.ref(), .step_id = step_id, .to_length = to}, std::move(done));
         })
      .status()
      .reason();
}

// Every position of one layer below `length`.
void CheckLayer(Cluster& cluster, const TestSequence& s, int layer, std::int64_t length) {
  for (std::int64_t p = 0; p < length; p += 8) {
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(8, length - p));
    cluster.StepChecked({.layer = layer, .items = {{&s, p, count}}, .write = false});
  }
}
void CheckAll(Cluster& cluster, const TestSequence& s, std::int64_t length) {
  for (int layer = 0; layer < cluster.config().model.layers; ++layer) {
    CheckLayer(cluster, s, layer, length);
  }
}

// What the engine says when it ends an append by itself.
struct Lost {
  std::mutex mutex;
  std::vector<Reason> reasons;  // guarded by mutex

  std::vector<Reason> Get() {
    const std::lock_guard lock(mutex);
    return reasons;
  }
  std::function<void(Status)> Callback() {
    return [this](const Status& why) {
      const std::lock_guard lock(mutex);
      reasons.push_back(why.reason());
    };
  }
};

AppendId Begin(Cluster& cluster, const AppendRequest& request, Lost& lost) {
  const Result<AppendId> id = Await<AppendId>(
      [&](auto done) { cluster.engine().BeginAppend(request, lost.Callback(), std::move(done)); });
  REQUIRE(id.ok());
  return *id;
}

template <class Ready>
bool Eventually(Ready ready) {
  const TimePoint end = Clock::now() + std::chrono::seconds(20);
  while (!ready() && Clock::now() < end) std::this_thread::sleep_for(Millis(2));
  return ready();
}

void ReleaseAllAndCheck(Cluster& cluster, std::initializer_list<const TestSequence*> sequences) {
  for (const TestSequence* s : sequences) cluster.Release(*s);
  CHECK(cluster.FreeBlocks() == cluster.config().kv.blocks);
  CHECK(cluster.engine().load().open_appends == 0);
}

}  // namespace

TEST_CASE("chunks in any order and of any size") {
  const int ranks = GENERATE(1, 2, 4);
  Cluster cluster(Small(ranks));
  std::minstd_rand random(static_cast<unsigned>(ranks));
  for (int round = 0; round < 6; ++round) {
    const TestSequence s =
        cluster.Create("s" + std::to_string(round), static_cast<std::uint64_t>(round + 1));
    const std::int64_t start = round * 3;  // also in the middle of a page
    if (start > 0) cluster.Append(s, 1, 0, start);
    const std::int64_t count = 1 + static_cast<std::int64_t>(random() % 60);
    struct Piece {
      int layer;
      std::int64_t offset, tokens;
    };
    std::vector<Piece> pieces;
    for (int layer = 0; layer < 2; ++layer) {
      for (std::int64_t at = 0; at < count;) {
        const std::int64_t n =
            std::min<std::int64_t>(count - at, 1 + static_cast<std::int64_t>(random() % 17));
        pieces.push_back({layer, at, n});
        at += n;
      }
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    const AppendId id = Begin(cluster, Request(s, 2, start, count));
    for (const Piece& p : pieces) {
      REQUIRE(
          cluster.WriteAppend(id, cluster.MakeChunk(s, p.layer, start, p.offset, p.tokens)).ok());
    }
    const Result<AppendReply> reply = cluster.CommitAppend(id);
    REQUIRE(reply.ok());
    CHECK(reply->length == start + count);
    CHECK_FALSE(reply->replayed);
    CHECK(reply->epoch == cluster.engine().info().epoch);
    CHECK(cluster.Info(s).layer_lengths == Lengths{start + count, start + count});
    CHECK(cluster.Info(s).max_step_id == 2);
    CheckAll(cluster, s, start + count);
    ReleaseAllAndCheck(cluster, {&s});
  }
}

TEST_CASE("a chunk that does not fit ends the append, and every block is free again") {
  Cluster cluster(Small());
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 9);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  const AppendRequest request = Request(s, 2, 9, 20);
  const auto refused = [&](const AppendChunk& chunk, Reason reason) {
    const AppendId id = Begin(cluster, request);
    CHECK(cluster.FreeBlocks() < free_blocks);
    REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 9, 5, 5)).ok());
    CHECK(cluster.WriteAppend(id, chunk).status().reason() == reason);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CHECK(cluster.Info(s).open_appends == 0);
    CHECK(cluster.CommitAppend(id).status().reason() == Reason::kAppendCancelled);
    CHECK(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 9, 0, 5)).status().reason() ==
          Reason::kAppendCancelled);
    CHECK(cluster.Info(s).layer_lengths == Lengths{9, 9});
  };
  refused(cluster.MakeChunk(s, 0, 9, 5, 5), Reason::kCoverage);   // again
  refused(cluster.MakeChunk(s, 0, 9, 9, 2), Reason::kCoverage);   // its first token again
  refused(cluster.MakeChunk(s, 0, 9, 0, 6), Reason::kCoverage);   // its last token again
  refused(cluster.MakeChunk(s, 0, 9, 0, 21), Reason::kCoverage);  // too long
  refused(cluster.MakeChunk(s, 1, 9, 19, 2), Reason::kCoverage);  // past the end
  refused(cluster.MakeChunk(s, 1, 9, 20, 1), Reason::kCoverage);
  AppendChunk chunk = cluster.MakeChunk(s, 1, 9, 0, 4);
  chunk.offset = -1;
  refused(chunk, Reason::kCoverage);
  chunk.offset = std::numeric_limits<std::int64_t>::max();
  refused(chunk, Reason::kCoverage);
  chunk.offset = std::numeric_limits<std::int64_t>::min();
  refused(chunk, Reason::kCoverage);
  chunk.offset = 0;
  for (const int layer :
       {-1, 2, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    chunk.layer = layer;
    refused(chunk, Reason::kLayer);
  }
  chunk.layer = 1;
  AppendChunk bad = chunk;
  bad.latents.dtype = DType::kF32;
  refused(bad, Reason::kDtype);
  bad = chunk;
  bad.latents.bytes = chunk.latents.bytes.first(chunk.latents.bytes.size() - 1);
  refused(bad, Reason::kByteSize);
  bad = chunk;
  bad.latents.bytes = {};
  refused(bad, Reason::kByteSize);
  const std::vector<std::vector<std::int64_t>> shapes{
      {}, {4}, {80, 4}, {0, 80}, {-4, 80}, {4, -80}, {2, 2, 80}, {std::int64_t{1} << 62, 0}};
  for (const auto& shape : shapes) {
    bad = chunk;
    bad.latents.shape = shape;
    refused(bad, Reason::kShape);
  }
  const std::vector<std::int64_t> huge{std::int64_t{1} << 62, 80};  // the product passes 64 bits
  bad = chunk;
  bad.latents.shape = huge;
  refused(bad, Reason::kByteSize);
}

TEST_CASE("a commit needs every token of every layer") {
  Cluster cluster(Small());
  const TestSequence s = cluster.Create("s", 1);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  for (const int missing : {0, 7, 19}) {
    const AppendId id = Begin(cluster, Request(s, 1, 0, 20));
    REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 0, 0, 20)).ok());
    for (int i = 0; i < 20; ++i) {
      if (i != missing) REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 1, 0, i, 1)).ok());
    }
    const Status status = cluster.CommitAppend(id).status();
    CHECK(status.reason() == Reason::kCoverage);
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CHECK(cluster.Info(s).layer_lengths == Lengths{0, 0});
    CHECK(cluster.Info(s).blocks == 0);
    CHECK(cluster.CommitAppend(id).status().reason() == Reason::kAppendCancelled);
  }
  CHECK(cluster.CommitAppend(Begin(cluster, Request(s, 1, 0, 1))).status().reason() ==
        Reason::kCoverage);
  cluster.Append(s, 1, 0, 20);  // no trace of step 1
  CheckAll(cluster, s, 20);
}

TEST_CASE("what a request to append may not say") {
  Cluster cluster(Small());
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 5, 0, 9);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, 0, 0)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, 0, 3)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, 1, 2)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, -1, 1)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, 2, 1)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 4, 2147483647, 2147483647)) == Reason::kLayer);
  CHECK(BeginReason(cluster, Request(s, 6, 9, 0)) == Reason::kTokenCount);
  CHECK(BeginReason(cluster, Request(s, 6, 9, -4)) == Reason::kTokenCount);
  CHECK(BeginReason(cluster, Request(s, 6, -1, 4)) == Reason::kPosition);
  CHECK(BeginReason(cluster, Request(s, 0, 9, 4)) == Reason::kStepId);
  CHECK(BeginReason(cluster, Request(s, 4, 9, 4)) == Reason::kStaleStep);
  CHECK(BeginReason(cluster, Request(s, 5, 9, 4)) == Reason::kReplayMismatch);
  CHECK(BeginReason(cluster, Request(s, 5, 0, 8)) == Reason::kReplayMismatch);
  CHECK(BeginReason(cluster, Request(s, 6, 10, 4)) == Reason::kPositionGap);
  CHECK(BeginReason(cluster, Request(s, 6, kMax, kMax)) == Reason::kPositionGap);
  CHECK(BeginReason(cluster, Request(s, 6, 8, 4)) == Reason::kLengthConflict);
  CHECK(BeginReason(cluster, Request(s, 6, 9, kMax)) == Reason::kContextLimit);
  CHECK(BeginReason(cluster, Request(s, 6, 9, (1 << 16) - 9)) == Reason::kKvCapacity);
  CHECK(BeginReason(cluster, Request(s, 6, 9, (1 << 16) - 8)) == Reason::kContextLimit);
  AppendRequest request = Request(s, 6, 9, 4);
  request.sequence.id = "nobody";
  CHECK(BeginReason(cluster, request) == Reason::kSequenceNotFound);
  request = Request(s, 6, 9, 4);
  ++request.sequence.generation;
  CHECK(BeginReason(cluster, request) == Reason::kSequenceGeneration);
  request = Request(s, 6, 9, 4);
  request.expected_epoch = cluster.engine().info().epoch + 1;
  CHECK(BeginReason(cluster, request) == Reason::kEpochChanged);
  cluster.StepChecked({.step_id = 6, .layer = 1, .items = {{&s, 9, 1}}});
  CHECK(BeginReason(cluster, Request(s, 7, 9, 4)) == Reason::kLengthConflict);  // layer 1
  CHECK(BeginReason(cluster, Request(s, 7, 10, 4)) == Reason::kPositionGap);    // layer 0
  CHECK(cluster.FreeBlocks() == free_blocks);
  CHECK(cluster.engine().load().open_appends == 0);
}

TEST_CASE("nothing of an append shows until its commit; reads and other layers go on") {
  Cluster cluster(Small(2, 3));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 10);
  const AppendRequest request = Request(s, 2, 10, 30, 0, 2);
  const AppendId id = Begin(cluster, request);
  CHECK(cluster.Info(s).open_appends == 1);
  CHECK(cluster.engine().load().open_appends == 1);
  for (int i = 0; i < 30; i += 5) {
    for (int layer : {0, 1}) {
      REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, layer, 10, i, 5)).ok());
    }
    CHECK(cluster.Info(s).layer_lengths[0] == 10);
    CHECK(cluster.Info(s).layer_lengths[1] == 10);
    CHECK(StepReason(cluster, {.layer = 0, .items = {{&s, 10, 1}}, .write = false}) ==
          Reason::kReadRange);
    cluster.StepChecked({.layer = 0, .items = {{&s, 8, 2}}, .write = false});
    // Layer 2 fills the same blocks meanwhile.
    cluster.StepChecked(
        {.step_id = static_cast<std::uint64_t>(2 + i), .layer = 2, .items = {{&s, 10 + i, 5}}});
  }
  CheckLayer(cluster, s, 2, 40);
  REQUIRE(cluster.CommitAppend(id).ok());
  CHECK(cluster.Info(s).layer_lengths == Lengths{40, 40, 40});
  CHECK(cluster.Info(s).blocks == 5);
  CheckAll(cluster, s, 40);
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("cancel keeps what other layers wrote into the reserved blocks, and no more") {
  Cluster cluster(Small(2, 2));
  const TestSequence s = cluster.Create("s", 1);
  const AppendId id = Begin(cluster, Request(s, 1, 0, 100, 0, 1));
  CHECK(cluster.Info(s).blocks == 13);
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 0, 0, 100)).ok());
  for (int i = 0; i < 12; i += 4) {
    cluster.StepChecked(
        {.step_id = static_cast<std::uint64_t>(1 + i), .layer = 1, .items = {{&s, i, 4}}});
  }
  CHECK(cluster.Info(s).blocks == 13);
  Cancel(cluster, id);
  CHECK(cluster.Info(s).blocks == 2);
  CHECK(cluster.Info(s).layer_lengths == Lengths{0, 12});
  CheckLayer(cluster, s, 1, 12);
  cluster.StepChecked({.step_id = 1, .layer = 0, .items = {{&s, 0, 4}}});
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("other writes to the layers of an open append") {
  Cluster cluster(Small(2, 3));
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 10);
  cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&s, 10, 1}}});
  const AppendId id = Begin(cluster, Request(s, 3, 10, 6, 1, 2));
  CHECK(StepReason(cluster, {.step_id = 4, .layer = 1, .items = {{&s, 10, 1}}}) ==
        Reason::kAppendOpen);
  CHECK(StepReason(cluster, {.step_id = 4, .layer = 2, .items = {{&s, 4, 1, true}}}) ==
        Reason::kAppendOpen);
  CHECK(BeginReason(cluster, Request(s, 4, 10, 2, 2, 1)) == Reason::kAppendOpen);
  CHECK(BeginReason(cluster, Request(s, 3, 10, 6, 1, 2)) == Reason::kAppendOpen);  // itself again
  CHECK(TruncateReason(cluster, s, 4, 5) == Reason::kAppendOpen);
  // What is applied may be sent again, and the free layer is free.
  CHECK(StepReason(cluster, {.step_id = 1, .layer = 1, .items = {{&s, 0, 8}}}) ==
        Reason::kReplayMismatch);
  cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&s, 10, 1}}});
  TestSequence back = s;
  back.Diverge(4, 7);
  cluster.StepChecked({.step_id = 4, .layer = 0, .items = {{&back, 4, 2, true}}});
  // A rewind of the free layer leaves the reservation alone.
  WriteAll(cluster, id, s, Request(s, 3, 10, 6, 1, 2));
  REQUIRE(cluster.CommitAppend(id).ok());
  CHECK(cluster.Info(s).layer_lengths == Lengths{6, 16, 16});
  CheckLayer(cluster, back, 0, 6);
  CheckLayer(cluster, s, 1, 16);
  CheckLayer(cluster, s, 2, 16);
  cluster.StepChecked({.step_id = 4, .layer = 1, .items = {{&s, 16, 1}}});
  CHECK(TruncateReason(cluster, s, 5, 5) == Reason::kNone);
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("appends to disjoint layers of one sequence at the same time") {
  const bool first_commits = GENERATE(true, false);
  const bool second_commits = GENERATE(true, false);
  Cluster cluster(Small(2, 3));
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 3);
  const AppendRequest first = Request(s, 2, 3, 40, 0, 1), second = Request(s, 5, 3, 17, 1, 2);
  const AppendId a = Begin(cluster, first), b = Begin(cluster, second);
  CHECK(cluster.Info(s).open_appends == 2);
  for (int i = 0; i < 40; i += 10) {
    REQUIRE(cluster.WriteAppend(a, cluster.MakeChunk(s, 0, 3, i, 10)).ok());
    if (i == 10) WriteAll(cluster, b, s, second);
  }
  const auto finish = [&](AppendId id, bool commits) {
    if (commits) {
      CHECK(cluster.CommitAppend(id).ok());
    } else {
      Cancel(cluster, id);
    }
  };
  finish(b, second_commits);
  CHECK(cluster.Info(s).blocks == 6);
  finish(a, first_commits);
  const std::int64_t in_first = first_commits ? 43 : 3, in_second = second_commits ? 20 : 3;
  CHECK(cluster.Info(s).layer_lengths == Lengths{in_first, in_second, in_second});
  CHECK(cluster.Info(s).blocks == (first_commits ? 6 : second_commits ? 3 : 1));
  CheckLayer(cluster, s, 0, in_first);
  CheckLayer(cluster, s, 1, in_second);
  CheckLayer(cluster, s, 2, in_second);
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("append onto a shared tail block") {
  const int layers_appended = GENERATE(1, 2);
  Cluster cluster(Small());
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 21);
  const TestSequence child = cluster.Fork(parent, "child", 19, 2);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  const SequenceInfo before = cluster.Info(child);
  CHECK(before.shared_blocks == 3);
  const AppendRequest request = Request(child, 1, 19, 30, 0, layers_appended);
  const AppendId id = Begin(cluster, request);
  CHECK(cluster.FreeBlocks() == free_blocks - 5);  // the copy and 4 more blocks
  CHECK(cluster.engine().load().cow_blocks == 1);
  WriteAll(cluster, id, child, request);
  CheckAll(cluster, parent, 21);
  CheckAll(cluster, child, 19);
  SECTION("cancel gives every block back") {
    Cancel(cluster, id);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CHECK(cluster.Info(child).blocks == 3);
    CHECK(cluster.Info(child).shared_blocks == 3);
    CheckAll(cluster, child, 19);
  }
  SECTION("release of the child gives every block back") {
    cluster.Release(child);
    CHECK(cluster.FreeBlocks() == free_blocks);
    CheckAll(cluster, parent, 21);
    ReleaseAllAndCheck(cluster, {&parent});
    return;
  }
  SECTION("commit leaves the parent as it was") {
    REQUIRE(cluster.CommitAppend(id).ok());
    CHECK(cluster.FreeBlocks() == free_blocks - 5);
    CHECK(cluster.Info(child).shared_blocks == 2);
    CheckLayer(cluster, child, 0, 49);
    CheckLayer(cluster, child, 1, layers_appended == 2 ? 49 : 19);
    // Layer 1 goes on in the copied block.
    if (layers_appended == 1) {
      cluster.StepChecked({.step_id = 1, .layer = 1, .items = {{&child, 19, 4}}});
    }
    CHECK(cluster.engine().load().cow_blocks == 1);
  }
  SECTION("the parent writes meanwhile, and is released") {
    cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&parent, 21, 2}}});
    cluster.StepChecked({.step_id = 2, .layer = 1, .items = {{&parent, 21, 2}}});
    CheckAll(cluster, parent, 23);
    REQUIRE(cluster.CommitAppend(id).ok());
    CheckLayer(cluster, child, 0, 49);
    CheckAll(cluster, parent, 23);
    cluster.Release(parent);
    CheckLayer(cluster, child, 0, 49);
    CheckLayer(cluster, child, 1, layers_appended == 2 ? 49 : 19);
    ReleaseAllAndCheck(cluster, {&child});
    return;
  }
  CheckAll(cluster, parent, 21);
  ReleaseAllAndCheck(cluster, {&parent, &child});
}

TEST_CASE("a step on another layer takes over the copy that an append has staged") {
  const bool commits = GENERATE(true, false);
  const bool rewinds = GENERATE(true, false);
  Cluster cluster(Small());
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 21);
  const TestSequence child = cluster.Fork(parent, "child", 19, 2);
  const std::int64_t free_blocks = cluster.FreeBlocks();
  const AppendRequest request = Request(child, 1, 19, 2, 0, 1);
  const AppendId id = Begin(cluster, request);
  CHECK(cluster.FreeBlocks() == free_blocks - 1);
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(child, 0, 19, 1, 1)).ok());
  TestSequence moved = child;
  StepSpec step{.step_id = 1, .layer = 1, .items = {{&moved, 19, 3}}};
  if (rewinds) {
    moved.Diverge(17, 3);
    step.items[0] = {&moved, 17, 3, true};
  }
  cluster.StepChecked(step);
  CHECK(cluster.FreeBlocks() == free_blocks - 1);  // no second copy
  CHECK(cluster.engine().load().cow_blocks == 1);
  CHECK(cluster.Info(child).shared_blocks == 2);
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(child, 0, 19, 0, 1)).ok());
  if (commits) {
    REQUIRE(cluster.CommitAppend(id).ok());
  } else {
    Cancel(cluster, id);
  }
  CHECK(cluster.FreeBlocks() == free_blocks - 1);
  CheckLayer(cluster, child, 0, commits ? 21 : 19);
  CheckLayer(cluster, moved, 1, rewinds ? 20 : 22);
  CheckAll(cluster, parent, 21);
  cluster.StepChecked({.step_id = 4, .layer = 0, .items = {{&child, commits ? 21 : 19, 1}}});
  ReleaseAllAndCheck(cluster, {&parent, &child});
}

TEST_CASE("two appends over one shared block") {
  const bool first_commits = GENERATE(true, false);
  const bool second_commits = GENERATE(true, false);
  const bool first_ends_first = GENERATE(true, false);
  Cluster cluster(Small());
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 21);
  const TestSequence child = cluster.Fork(parent, "child", 19, 2);
  const AppendRequest first = Request(child, 1, 19, 3, 0, 1),
                      second = Request(child, 1, 19, 9, 1, 1);
  const AppendId a = Begin(cluster, first);
  REQUIRE(cluster.WriteAppend(a, cluster.MakeChunk(child, 0, 19, 0, 1)).ok());
  const AppendId b = Begin(cluster, second);
  CHECK(cluster.engine().load().cow_blocks == 1);
  WriteAll(cluster, b, child, second);
  REQUIRE(cluster.WriteAppend(a, cluster.MakeChunk(child, 0, 19, 1, 2)).ok());
  for (const bool turn : {true, false}) {
    const bool is_first = turn == first_ends_first;
    const AppendId id = is_first ? a : b;
    if (is_first ? first_commits : second_commits) {
      CHECK(cluster.CommitAppend(id).ok());
    } else {
      Cancel(cluster, id);
    }
    CheckAll(cluster, child, 19);
  }
  CheckLayer(cluster, child, 0, first_commits ? 22 : 19);
  CheckLayer(cluster, child, 1, second_commits ? 28 : 19);
  CheckAll(cluster, parent, 21);
  ReleaseAllAndCheck(cluster, {&child, &parent});
}

TEST_CASE("a fork during an append sees what is committed and keeps it") {
  const bool commits = GENERATE(true, false);
  Cluster cluster(Small());
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 18);
  const AppendRequest request = Request(parent, 2, 18, 20);
  const AppendId id = Begin(cluster, request);
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(parent, 0, 18, 0, 7)).ok());
  CHECK(Await<CreateReply>([&](auto done) {
          cluster.engine().ForkSequence(
              {.parent = parent.ref(), .id = "x", .request_id = "x", .at_length = 19},
              std::move(done));
        })
            .status()
            .reason() == Reason::kIncompleteToken);
  const TestSequence child = cluster.Fork(parent, "child", 18, 2);
  CHECK(cluster.Info(child).blocks == 3);
  CHECK(cluster.Info(child).open_appends == 0);
  // Both write into the block they share.
  cluster.StepChecked({.step_id = 1, .layer = 0, .items = {{&child, 18, 3}}});
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(parent, 0, 18, 7, 13)).ok());
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(parent, 1, 18, 0, 20)).ok());
  const TestSequence second = cluster.Fork(parent, "second", 17, 3);
  if (commits) {
    REQUIRE(cluster.CommitAppend(id).ok());
  } else {
    Cancel(cluster, id);
  }
  cluster.StepChecked({.step_id = 1, .layer = 1, .items = {{&child, 18, 3}, {&second, 17, 2}}});
  CheckAll(cluster, child, 21);
  CheckAll(cluster, parent, commits ? 38 : 18);
  CheckLayer(cluster, second, 0, 17);
  CheckLayer(cluster, second, 1, 19);
  ReleaseAllAndCheck(cluster, {&parent, &child, &second});
}

TEST_CASE("a parent that appends into a block its child shares, and goes") {
  Cluster cluster(Small());
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 18);
  const AppendRequest request = Request(parent, 2, 18, 3, 0, 1);
  const AppendId id = Begin(cluster, request);
  const TestSequence child = cluster.Fork(parent, "child", 18, 2);
  WriteAll(cluster, id, parent, request);
  REQUIRE(cluster.CommitAppend(id).ok());
  cluster.Release(parent);
  CHECK(cluster.Info(child).shared_blocks == 0);
  CheckAll(cluster, child, 18);
  cluster.StepChecked({.step_id = 1, .layer = 0, .items = {{&child, 18, 1}}});
  CheckLayer(cluster, child, 0, 19);
  CHECK(StepReason(cluster, {.layer = 0, .items = {{&child, 19, 1}}, .write = false}) ==
        Reason::kReadRange);
  ReleaseAllAndCheck(cluster, {&child});
}

TEST_CASE("release and the end of a lease cancel an append") {
  Cluster cluster(Small());
  Lost lost;
  const TestSequence s = cluster.Create("s", 1);
  const AppendId a = Begin(cluster, Request(s, 1, 0, 20, 0, 1), lost);
  const AppendId b = Begin(cluster, Request(s, 1, 0, 50, 1, 1), lost);
  cluster.Release(s);
  CHECK(lost.Get() == std::vector{Reason::kAppendCancelled, Reason::kAppendCancelled});
  CHECK(cluster.FreeBlocks() == 64);
  CHECK(cluster.WriteAppend(a, cluster.MakeChunk(s, 0, 0, 0, 1)).status().reason() ==
        Reason::kAppendCancelled);
  CHECK(cluster.CommitAppend(b).status().reason() == Reason::kAppendCancelled);
  CHECK(cluster.engine().load().open_appends == 0);

  const Result<CreateReply> leased = Await<CreateReply>([&](auto done) {
    cluster.engine().CreateSequence({.id = "leased",
                                     .request_id = "r",
                                     .softmax_scale = cluster.config().model.softmax_scale,
                                     .lease = Millis(150)},
                                    std::move(done));
  });
  REQUIRE(leased.ok());
  TestSequence t("leased", 2);
  t.generation = leased->generation;
  const AppendId c = Begin(cluster, Request(t, 1, 0, 20), lost);
  // Chunks renew the lease.
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(Millis(40));
    const Status status = cluster.WriteAppend(c, cluster.MakeChunk(t, 0, 0, i, 1)).status();
    if (!status.ok()) {  // this machine was away for longer than the lease
      CHECK(status.reason() == Reason::kAppendCancelled);
      break;
    }
  }
  CHECK(Eventually([&] { return lost.Get().size() == 3; }));
  CHECK(lost.Get().back() == Reason::kAppendCancelled);
  CHECK(Eventually([&] { return cluster.FreeBlocks() == 64; }));
  CHECK(cluster.engine().load().sequences == 0);
  CHECK(cluster.CommitAppend(c).status().reason() == Reason::kAppendCancelled);
}

namespace {

// An engine whose appends fall silent soon; Cluster has no option for it.
struct IdleEngine {
  explicit IdleEngine(Millis idle, EngineHooks hooks = {}) : config(MakeConfig(Small(2, 3))) {
    config.limits.append_idle_timeout = idle;
    auto made = Engine::Create(config, std::move(hooks));
    REQUIRE(made.ok());
    engine = *std::move(made);
    const Result<CreateReply> reply = Await<CreateReply>([&](auto done) {
      engine->CreateSequence(
          {.id = "s", .request_id = "r", .softmax_scale = config.model.softmax_scale},
          std::move(done));
    });
    REQUIRE(reply.ok());
    sequence = {"s", reply->generation};
  }
  Result<AppendId> Begin(Lost& lost, int layer, std::int64_t count) {
    return Await<AppendId>([&](auto done) {
      engine->BeginAppend({.sequence = sequence,
                           .step_id = 1,
                           .count = count,
                           .layer_begin = layer,
                           .layer_count = 1},
                          lost.Callback(), std::move(done));
    });
  }
  AppendChunk Chunk(int layer, std::int64_t offset) const {
    return {.layer = layer, .offset = offset, .latents = {DType::kBf16, shape, bytes}};
  }
  const std::vector<std::byte> bytes = std::vector<std::byte>(80 * 2);
  const std::vector<std::int64_t> shape{1, 80};
  EngineConfig config;
  std::unique_ptr<Engine> engine;
  SequenceRef sequence;
};

}  // namespace

TEST_CASE("an append that falls silent is lost") {
  IdleEngine idle(Millis(30));
  Lost lost;
  const Result<AppendId> id = Await<AppendId>([&](auto done) {
    idle.engine->BeginAppend(
        {.sequence = idle.sequence, .step_id = 1, .count = 40, .layer_count = 2}, lost.Callback(),
        std::move(done));
  });
  REQUIRE(id.ok());
  // Without any request: the engine looks by itself.
  CHECK(Eventually([&] { return lost.Get() == std::vector{Reason::kAppendIdle}; }));
  CHECK(Eventually([&] { return idle.engine->load().free_blocks == 64; }));
  CHECK(idle.engine->load().open_appends == 0);
  CHECK(idle.engine->load().sequences == 1);
  CHECK(Await<AppendReply>([&](auto done) { idle.engine->CommitAppend(*id, std::move(done)); })
            .status()
            .reason() == Reason::kAppendCancelled);
}

TEST_CASE("chunks keep an append alive") {
  IdleEngine idle(Millis(2000));
  Lost lost;
  const Result<AppendId> id = idle.Begin(lost, 0, 6);
  REQUIRE(id.ok());
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(Millis(500));
    CHECK(Await<AppendId>([&](auto done) {
            idle.engine->WriteAppend(*id, idle.Chunk(0, i), std::move(done));
          }).ok());
  }
  CHECK(
      Await<AppendReply>([&](auto done) { idle.engine->CommitAppend(*id, std::move(done)); }).ok());
  CHECK(lost.Get().empty());
}

TEST_CASE("what waits behind a long request, or takes long itself, is not silence") {
  constexpr Millis kIdle{250};
  std::atomic<bool> armed{true};
  std::promise<void> held, go_on;
  IdleEngine idle(kIdle, {.rank_fault = [&](int rank, RankPhase phase) {
                    if (rank == 0 && phase == RankPhase::kWrite && armed.exchange(false)) {
                      held.set_value();
                      go_on.get_future().wait();
                    }
                    return Status::Ok();
                  }});
  Lost lost, silent;
  const Result<AppendId> slow = idle.Begin(lost, 0, 1), waiting = idle.Begin(lost, 1, 1);
  REQUIRE((slow.ok() && waiting.ok() && idle.Begin(silent, 2, 1).ok()));

  std::vector<std::promise<Status>> answers(2);
  const auto write = [&](std::size_t i, AppendId id) {
    idle.engine->WriteAppend(
        id, idle.Chunk(static_cast<int>(i), 0),
        [&, i](const Result<AppendId>& reply) { answers[i].set_value(reply.status()); });
  };
  write(0, *slow);
  held.get_future().wait();
  write(1, *waiting);
  std::this_thread::sleep_for(2 * kIdle);
  go_on.set_value();
  CHECK(answers[0].get_future().get().ToString() == Status::Ok().ToString());
  CHECK(answers[1].get_future().get().ToString() == Status::Ok().ToString());
  // The engine was no less busy for the one of which nothing came.
  CHECK(Eventually([&] { return silent.Get() == std::vector{Reason::kAppendIdle}; }));
  for (const AppendId id : {*slow, *waiting}) {
    CHECK(Await<AppendReply>([&](auto done) {
            idle.engine->CommitAppend(id, std::move(done));
          }).ok());
  }
  CHECK(lost.Get().empty());
}

TEST_CASE("an append sent again") {
  Cluster cluster(Small(2, 3));
  const TestSequence s = cluster.Create("s", 1);
  const AppendRequest request = Request(s, 3, 0, 25, 0, 2);
  AppendId id = Begin(cluster, request);
  WriteAll(cluster, id, s, request);
  REQUIRE(cluster.CommitAppend(id).ok());
  const std::int64_t free_blocks = cluster.FreeBlocks();
  const auto open = [&](const AppendRequest& r) {
    id = Begin(cluster, r);
    CHECK(cluster.FreeBlocks() == free_blocks);
  };

  open(request);
  WriteAll(cluster, id, s, request);
  const Result<AppendReply> again = cluster.CommitAppend(id);
  REQUIRE(again.ok());
  CHECK(again->replayed);
  CHECK(again->length == 25);

  open(request);  // still needs every token
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 0, 0, 25)).ok());
  CHECK(cluster.CommitAppend(id).status().reason() == Reason::kCoverage);

  TestSequence liar = s;
  liar.Diverge(13, 99);
  for (const int layer : {0, 1}) {
    open(request);
    REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(liar, layer, 0, 0, 13)).ok());
    const Status status =
        cluster.WriteAppend(id, cluster.MakeChunk(liar, layer, 0, 13, 12)).status();
    CHECK(status.reason() == Reason::kReplayMismatch);
    CHECK(status.message().find("position 13") != std::string::npos);
    CHECK(cluster.CommitAppend(id).status().reason() == Reason::kAppendCancelled);
  }
  CheckLayer(cluster, s, 0, 25);

  // A part of its layers is a replay as well; with a layer it did not have, it is another append.
  open(Request(s, 3, 0, 25, 1, 1));
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 1, 0, 0, 25)).ok());
  CHECK(cluster.CommitAppend(id).ok());
  CHECK(BeginReason(cluster, Request(s, 3, 0, 25, 1, 2)) == Reason::kReplayMismatch);
  CHECK(BeginReason(cluster, Request(s, 3, 0, 25, 0, 3)) == Reason::kReplayMismatch);
  CHECK(BeginReason(cluster, Request(s, 3, 0, 24, 0, 2)) == Reason::kReplayMismatch);
  // A step and an append of the same step_id, start and count are one write.
  cluster.StepChecked({.step_id = 4, .layer = 0, .items = {{&s, 25, 2}}});
  open(Request(s, 4, 25, 2, 0, 1));
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 25, 0, 2)).ok());
  CHECK(cluster.CommitAppend(id)->replayed);

  CHECK(cluster.Info(s).layer_lengths == Lengths{27, 25, 0});
  CHECK(cluster.FreeBlocks() == free_blocks);
  CHECK(BeginReason(cluster, Request(s, 3, 0, 25, 0, 1)) == Reason::kStaleStep);
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("an open replay ends with its sequence and stops a truncation, but no step") {
  Cluster cluster(Small());
  Lost lost;
  const TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 25);
  Begin(cluster, Request(s, 1, 0, 25), lost);
  CHECK(cluster.Info(s).open_appends == 1);
  CHECK(TruncateReason(cluster, s, 2, 3) == Reason::kAppendOpen);
  cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&s, 25, 1}}});
  cluster.Release(s);
  CHECK(lost.Get() == std::vector{Reason::kAppendCancelled});
  CHECK(cluster.FreeBlocks() == 64);
}

TEST_CASE("a replay that a rewind has overtaken is stale") {
  // The rewind gives back the blocks that the replay would compare with.
  const int rewound_layers = GENERATE(1, 2);
  Cluster cluster(Small());
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 60);
  const AppendId id = Begin(cluster, Request(s, 1, 0, 60));
  REQUIRE(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 0, 0, 8)).ok());
  TestSequence back = s;
  back.Diverge(2, 7);
  for (int layer = 0; layer < rewound_layers; ++layer) {
    cluster.StepChecked({.step_id = 2, .layer = layer, .items = {{&back, 2, 1, true}}});
  }
  CHECK(cluster.WriteAppend(id, cluster.MakeChunk(s, 0, 0, 52, 8)).status().reason() ==
        Reason::kStaleStep);
  CHECK(cluster.CommitAppend(id).status().reason() == Reason::kAppendCancelled);
  CHECK(cluster.Info(s).open_appends == 0);
  CheckLayer(cluster, back, 0, 3);
  ReleaseAllAndCheck(cluster, {&s});
}

TEST_CASE("a replay that is overtaken before its commit does not claim a length") {
  Cluster cluster(Small());
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 20);
  const AppendId id = Begin(cluster, Request(s, 1, 0, 20));
  WriteAll(cluster, id, s, Request(s, 1, 0, 20));
  TestSequence back = s;
  back.Diverge(2, 7);
  cluster.StepChecked({.step_id = 2, .layer = 1, .items = {{&back, 2, 1, true}}});
  CHECK(cluster.CommitAppend(id).status().reason() == Reason::kStaleStep);
  CHECK(cluster.Info(s).open_appends == 0);
}

TEST_CASE("an append that does not fit takes nothing") {
  // Two blocks of 8 for the parent's 13 tokens, shared with the child, and 3 free.
  Cluster cluster(Small(2, 2, 5));
  const TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 13);
  const TestSequence child = cluster.Fork(parent, "child", 12, 2);
  CHECK(cluster.FreeBlocks() == 3);
  const SequenceInfo before = cluster.Info(child);
  // 12..32 needs a copy of block 1 and the blocks 2 and 3; 12..33 one more.
  CHECK(BeginReason(cluster, Request(child, 1, 12, 21)) == Reason::kKvCapacity);
  CHECK(cluster.FreeBlocks() == 3);
  CHECK(cluster.engine().load().cow_blocks == 0);
  CHECK(cluster.Info(child).blocks == before.blocks);
  CHECK(cluster.Info(child).shared_blocks == before.shared_blocks);
  CHECK(cluster.Info(child).open_appends == 0);
  const AppendRequest fits = Request(child, 1, 12, 20);
  const AppendId id = Begin(cluster, fits);
  CHECK(cluster.FreeBlocks() == 0);
  CHECK(BeginReason(cluster, Request(parent, 2, 13, 4)) == Reason::kKvCapacity);
  CHECK(StepReason(cluster, {.step_id = 2, .items = {{&parent, 13, 1}}}) == Reason::kKvCapacity);
  WriteAll(cluster, id, child, fits);
  REQUIRE(cluster.CommitAppend(id).ok());
  // The child has left the parent's tail: the parent may write there in place.
  cluster.StepChecked({.step_id = 2, .items = {{&parent, 13, 1}}});
  CheckAll(cluster, child, 32);
  CheckLayer(cluster, parent, 0, 14);
  CheckLayer(cluster, parent, 1, 13);
  ReleaseAllAndCheck(cluster, {&parent, &child});
}

TEST_CASE("limits.max_open_appends") {
  EngineConfig config = MakeConfig(Small());
  config.limits.max_open_appends = 3;
  auto made = Engine::Create(config);
  REQUIRE(made.ok());
  Engine& engine = **made;
  const SequenceRef s{
      "s", Await<CreateReply>([&](auto done) {
             engine.CreateSequence(
                 {.id = "s", .request_id = "r", .softmax_scale = config.model.softmax_scale},
                 std::move(done));
           })->generation};
  const SequenceRef t{
      "t", Await<CreateReply>([&](auto done) {
             engine.CreateSequence(
                 {.id = "t", .request_id = "r", .softmax_scale = config.model.softmax_scale},
                 std::move(done));
           })->generation};
  const auto begin = [&](const SequenceRef& ref, int layer) {
    return Await<AppendId>([&](auto done) {
      engine.BeginAppend(
          {.sequence = ref, .step_id = 1, .count = 9, .layer_begin = layer, .layer_count = 1},
          [](const Status&) {}, std::move(done));
    });
  };
  const Result<AppendId> a = begin(s, 0), b = begin(s, 1), c = begin(t, 0);
  REQUIRE((a.ok() && b.ok() && c.ok()));
  CHECK(*b > *a);
  CHECK(*c > *b);
  const std::int64_t free_blocks = engine.load().free_blocks;
  const Status refused = begin(t, 1).status();
  CHECK(refused.reason() == Reason::kOverloaded);
  CHECK(refused.code() == StatusCode::kResourceExhausted);
  CHECK(engine.load().free_blocks == free_blocks);
  engine.CancelAppend(*a);
  const Result<AppendId> d = begin(t, 1);
  REQUIRE(d.ok());
  CHECK(*d > *c);  // numbers are never used again
  CHECK(engine.load().open_appends == 3);
}

TEST_CASE("a drain cancels open appends") {
  Cluster cluster(Small());
  Lost lost;
  const TestSequence s = cluster.Create("s", 1);
  const AppendId id = Begin(cluster, Request(s, 1, 0, 20), lost);
  CHECK(cluster.engine().Drain(Clock::now() + std::chrono::seconds(20)));
  CHECK(lost.Get() == std::vector{Reason::kDraining});
  CHECK(cluster.FreeBlocks() == 64);
  CHECK(cluster.CommitAppend(id).status().reason() == Reason::kDraining);
}

TEST_CASE("an append larger than a step of the ranks") {
  Cluster cluster(Small(2, 1, 600));
  const TestSequence s = cluster.Create("s", 1);
  const AppendRequest request = Request(s, 1, 0, 4001, 0, 1);
  const AppendId id = Begin(cluster, request);
  WriteAll(cluster, id, s, request);
  REQUIRE(cluster.CommitAppend(id).ok());
  cluster.StepChecked({.items = {{&s, 3998, 3}}, .write = false});
  cluster.StepChecked({.step_id = 2, .items = {{&s, 4001, 2}}});
  ReleaseAllAndCheck(cluster, {&s});
}

}  // namespace dcp::testing
