// What steps do to sequences: appends, rewinds, forks, copy-on-write, replays, refusals.
#include "runtime/engine.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <future>
#include <thread>

#include "tests/support/cluster.h"

namespace dcp::testing {
namespace {

std::int64_t Length(Cluster& cluster, const TestSequence& s, int layer = 0) {
  return cluster.Info(s).layer_lengths[static_cast<std::size_t>(layer)];
}

// A step on every layer, each answer checked.
void StepAllLayers(Cluster& cluster, StepSpec spec) {
  for (int layer = 0; layer < cluster.config().model.layers; ++layer) {
    spec.layer = layer;
    cluster.StepChecked(spec);
  }
}

void CheckReadsBack(Cluster& cluster, const TestSequence& s, std::int64_t length) {
  for (int layer = 0; layer < cluster.config().model.layers; ++layer) {
    for (const std::int64_t p : {std::int64_t{0}, length / 2, length - 1}) {
      cluster.StepChecked({.layer = layer, .items = {{&s, p, 1}}, .write = false});
    }
  }
}

Reason StepReason(Cluster& cluster, const StepSpec& spec) {
  return cluster.Step(spec).status().reason();
}

}  // namespace

TEST_CASE("a mixed batch: lengths of every size, forks of one parent, a rewound sequence") {
  Cluster cluster({.ranks = 4, .heads = 8, .page_tokens = 16, .interleave = 2, .blocks = 128});
  TestSequence small = cluster.Create("small", 1);
  TestSequence large = cluster.Create("large", 2);
  cluster.Append(large, 1, 0, 3000);
  TestSequence parent = cluster.Create("parent", 3);
  cluster.Append(parent, 1, 0, 150);
  const TestSequence child_a = cluster.Fork(parent, "child-a", 150, 4);
  const TestSequence child_b = cluster.Fork(parent, "child-b", 70, 5);
  TestSequence rewound = cluster.Create("rewound", 6);
  cluster.Append(rewound, 1, 0, 200);
  rewound.Diverge(190, 7);
  StepAllLayers(cluster, {.step_id = 2,
                          .items = {{&small, 0, 3},
                                    {&large, 3000, 1},
                                    {&child_a, 150, 2},
                                    {&child_b, 70, 4},
                                    {&parent, 150, 1},
                                    {&rewound, 190, 2, true}}});
  CHECK(Length(cluster, rewound) == 192);
  CHECK(Length(cluster, child_b) == 74);
  CheckReadsBack(cluster, parent, 151);
  CheckReadsBack(cluster, child_a, 152);
  CheckReadsBack(cluster, child_b, 74);
  CheckReadsBack(cluster, rewound, 192);
}

TEST_CASE("rewinding parent and child below their fork point leaves the other alone") {
  for (const bool rewind_parent : {true, false}) {
    Cluster cluster({.ranks = 2, .page_tokens = 16, .blocks = 64});
    TestSequence parent = cluster.Create("parent", 1);
    cluster.Append(parent, 1, 0, 100);
    TestSequence child = cluster.Fork(parent, "child", 100, 2);
    TestSequence& moved = rewind_parent ? parent : child;
    const TestSequence& kept = rewind_parent ? child : parent;
    moved.Diverge(40, 3);
    StepAllLayers(cluster, {.step_id = 5, .items = {{&moved, 40, 4, true}}});
    CHECK(Length(cluster, moved) == 44);
    CheckReadsBack(cluster, moved, 44);
    CheckReadsBack(cluster, kept, 100);
    for (std::int64_t p = 44; p < 70; ++p) {  // across the block the fork shares
      StepAllLayers(cluster, {.step_id = static_cast<std::uint64_t>(p), .items = {{&moved, p, 1}}});
    }
    CheckReadsBack(cluster, moved, 70);
    CheckReadsBack(cluster, kept, 100);
    cluster.Release(parent);
    CheckReadsBack(cluster, child, rewind_parent ? 100 : 70);
    cluster.Release(child);
    CHECK(cluster.FreeBlocks() == 64);
  }
}

TEST_CASE("fork while the parent's layers differ") {
  Cluster cluster({.ranks = 2, .layers = 3, .page_tokens = 16, .blocks = 32});
  TestSequence parent = cluster.Create("parent", 1);
  cluster.Append(parent, 1, 0, 30);
  cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&parent, 30, 4}}});
  cluster.StepChecked({.step_id = 2, .layer = 1, .items = {{&parent, 30, 4}}});
  const auto fork = [&](std::int64_t at) {
    return Await<CreateReply>([&](auto done) {
             cluster.engine().ForkSequence(
                 {.parent = parent.ref(), .id = "late", .request_id = "r", .at_length = at},
                 std::move(done));
           })
        .status()
        .reason();
  };
  CHECK(fork(31) == Reason::kIncompleteToken);
  CHECK(fork(-1) == Reason::kPosition);
  const TestSequence child = cluster.Fork(parent, "child", 30, 2);
  for (int layer = 0; layer < 3; ++layer) CHECK(Length(cluster, child, layer) == 30);
  StepAllLayers(cluster, {.step_id = 2, .items = {{&child, 30, 2}}});
  cluster.StepChecked({.step_id = 2, .layer = 2, .items = {{&parent, 30, 4}}});
  CheckReadsBack(cluster, parent, 34);
  CheckReadsBack(cluster, child, 32);
}

TEST_CASE("copy on write with exactly zero and one free block") {
  for (const int spare : {0, 1}) {
    // 40 tokens are 2 blocks of 32; the child shares both.
    Cluster cluster({.ranks = 2, .page_tokens = 16, .blocks = 2 + spare});
    TestSequence parent = cluster.Create("parent", 1);
    cluster.Append(parent, 1, 0, 40);
    TestSequence child = cluster.Fork(parent, "child", 40, 2);
    CHECK(cluster.FreeBlocks() == spare);
    CHECK(cluster.Info(child).shared_blocks == 2);
    const StepSpec write{.step_id = 2, .items = {{&child, 40, 1}}};
    if (spare == 0) {
      CHECK(StepReason(cluster, write) == Reason::kKvCapacity);
      CHECK(Length(cluster, child) == 40);
      CHECK(cluster.engine().load().cow_blocks == 0);
    } else {
      cluster.StepChecked(write);
      CHECK(cluster.FreeBlocks() == 0);
      CHECK(cluster.engine().load().cow_blocks == 1);
      CHECK(cluster.Info(child).shared_blocks == 1);
      // The parent is the only owner of its tail now and writes in place.
      cluster.StepChecked({.step_id = 2, .items = {{&parent, 40, 1}}});
    }
    for (int layer = 0; layer < 2; ++layer) {
      cluster.StepChecked({.layer = layer, .items = {{&parent, 39, 1}}, .write = false});
      cluster.StepChecked({.layer = layer, .items = {{&child, 39, 1}}, .write = false});
    }
  }
}

TEST_CASE("the pool runs out in the middle of a batch: nothing is applied") {
  Cluster cluster({.ranks = 2, .page_tokens = 16, .blocks = 3});
  TestSequence a = cluster.Create("a", 1), b = cluster.Create("b", 2), c = cluster.Create("c", 3);
  cluster.Append(a, 1, 0, 32);
  cluster.Append(b, 1, 0, 32);
  CHECK(StepReason(cluster, {.step_id = 2, .items = {{&a, 32, 1}, {&b, 32, 1}, {&c, 0, 1}}}) ==
        Reason::kKvCapacity);
  CHECK(Length(cluster, a) == 32);
  CHECK(Length(cluster, b) == 32);
  CHECK(cluster.FreeBlocks() == 1);
  cluster.StepChecked({.step_id = 2, .items = {{&a, 32, 1}}});
  CHECK(cluster.FreeBlocks() == 0);
}

TEST_CASE("a step sent twice is applied once and answers the same bytes") {
  for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
    Cluster cluster({.ranks = 4, .page_tokens = 16, .blocks = 64, .exchange = exchange});
    TestSequence s = cluster.Create("s", 1);
    cluster.Append(s, 1, 0, 77);
    const StepSpec step{.step_id = 2, .items = {{&s, 77, 3}}};
    const auto first = cluster.Step(step);
    REQUIRE(first.ok());
    SECTION("at once") {
      const auto again = cluster.Step(step);
      REQUIRE(again.ok());
      CHECK(again->output == first->output);
      CHECK(again->lse == first->lse);
    }
    SECTION("concurrently") {
      std::vector<std::promise<Result<StepReply>>> replies(8);
      std::vector<std::thread> threads;
      for (auto& reply : replies) {
        threads.emplace_back([&] {
          cluster.engine().SubmitStep(cluster.MakeStep(step),
                                      [&](Result<StepReply> r) { reply.set_value(std::move(r)); });
        });
      }
      for (std::thread& t : threads) t.join();
      for (auto& reply : replies) {
        const Result<StepReply> r = reply.get_future().get();
        REQUIRE(r.ok());
        CHECK(r->output == first->output);
      }
    }
    SECTION("after later steps of other layers and sequences") {
      TestSequence other = cluster.Create("other", 9);
      cluster.StepChecked({.step_id = 2, .layer = 1, .items = {{&s, 77, 3}}});
      cluster.StepChecked({.step_id = 5, .items = {{&other, 0, 2}}});
      const auto again = cluster.Step(step);
      REQUIRE(again.ok());
      CHECK(again->output == first->output);
    }
    CHECK(Length(cluster, s) == 80);
    // After a later step of the same layer it is stale, and a read gives the same bytes.
    cluster.StepChecked({.step_id = 3, .items = {{&s, 80, 1}}});
    CHECK(StepReason(cluster, step) == Reason::kStaleStep);
    CHECK(Length(cluster, s) == 81);
    StepSpec read = step;
    read.write = false;
    const auto late = cluster.Step(read);
    REQUIRE(late.ok());
    CHECK(late->output == first->output);
  }
}

TEST_CASE("a replay must be the same request") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 20);
  const StepSpec step{.step_id = 4, .items = {{&s, 20, 2}}};
  cluster.StepChecked(step);
  CHECK(StepReason(cluster, {.step_id = 4, .items = {{&s, 20, 1}}}) == Reason::kReplayMismatch);
  CHECK(StepReason(cluster, {.step_id = 4, .items = {{&s, 22, 2}}}) == Reason::kReplayMismatch);
  TestSequence liar = s;
  liar.Diverge(21, 99);  // another latent at position 21
  const Status status = cluster.Step({.step_id = 4, .items = {{&liar, 20, 2}}}).status();
  CHECK(status.reason() == Reason::kReplayMismatch);
  CHECK(status.message().find("position 21") != std::string::npos);
  cluster.StepChecked(step);  // what is stored is what was first sent
}

TEST_CASE("a mismatched replay in a batch leaves no trace, not even of a rewind") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence a = cluster.Create("a", 1), b = cluster.Create("b", 2);
  cluster.Append(a, 4, 0, 20);
  cluster.StepChecked({.step_id = 5, .items = {{&a, 20, 1}}});
  cluster.Append(b, 1, 0, 20);
  TestSequence liar = a;
  liar.Diverge(20, 99);
  TestSequence back = b;
  back.Diverge(10, 98);
  CHECK(StepReason(cluster, {.step_id = 5, .items = {{&back, 10, 1, true}, {&liar, 20, 1}}}) ==
        Reason::kReplayMismatch);
  CHECK(Length(cluster, b) == 20);
  CheckReadsBack(cluster, b, 20);
}

TEST_CASE("a delayed duplicate of a rewind changes nothing") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 50);
  s.Diverge(30, 2);
  const StepSpec rewind{.step_id = 2, .items = {{&s, 30, 2, true}}};
  cluster.StepChecked(rewind);
  cluster.StepChecked(rewind);  // a replay
  CHECK(Length(cluster, s) == 32);
  cluster.StepChecked({.step_id = 3, .items = {{&s, 32, 4}}});
  CHECK(StepReason(cluster, rewind) == Reason::kStaleStep);
  CHECK(Length(cluster, s) == 36);
  cluster.StepChecked({.items = {{&s, 35, 1}}, .write = false});
}

TEST_CASE("a late duplicate of an old generation does nothing to the new one") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  const TestSequence old = cluster.Create("s", 1);
  cluster.Append(old, 1, 0, 10);
  cluster.Release(old);
  const TestSequence fresh = cluster.Create("s", 2);
  CHECK(fresh.generation != old.generation);
  cluster.Append(fresh, 1, 0, 5);
  CHECK(StepReason(cluster, {.step_id = 2, .items = {{&old, 10, 1}}}) ==
        Reason::kSequenceGeneration);
  const auto release = Await<ReleaseReply>([&](auto done) {
    cluster.engine().ReleaseSequences({.sequences = {old.ref(), {"unknown", 1}}}, std::move(done));
  });
  REQUIRE(release.ok());
  CHECK(release->released == 0);
  CHECK(Length(cluster, fresh) == 5);
  CheckReadsBack(cluster, fresh, 5);
}

TEST_CASE("positions that do not fit are refused with the actual length") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 20);
  const auto status = [&](std::int64_t start, int count, bool write, std::uint64_t step_id = 2) {
    StepRequest request = cluster.MakeStep(
        {.step_id = step_id, .items = {{&s, 0, std::max(count, 1)}}, .write = write});
    request.entries[0].start = start;
    request.entries[0].count = count;
    return cluster.Submit(std::move(request)).status();
  };
  const Status conflict = status(19, 1, true);
  CHECK(conflict.reason() == Reason::kLengthConflict);
  CHECK(conflict.metadata() == Status::Metadata{{"actual_length", "20"}});
  CHECK(status(21, 1, true).reason() == Reason::kPositionGap);
  CHECK(status(20, 1, false).reason() == Reason::kReadRange);
  CHECK(status(19, 2, false).reason() == Reason::kReadRange);
  CHECK(status(std::numeric_limits<std::int64_t>::max(), 8, false).reason() == Reason::kReadRange);
  CHECK(status(std::numeric_limits<std::int64_t>::max(), 8, true).reason() == Reason::kPositionGap);
  CHECK(status(-1, 1, true).reason() == Reason::kPosition);
  CHECK(status(20, 0, true).reason() == Reason::kTokenCount);
  CHECK(status(20, 9, true).reason() == Reason::kTokenCount);
  CHECK(status(20, 1, true, 0).reason() == Reason::kStepId);
  CHECK(Length(cluster, s) == 20);
}

TEST_CASE("the context limit holds for appends and AppendKv") {
  ClusterOptions options{.ranks = 2, .blocks = 64};
  Cluster cluster(options);
  const std::int64_t limit = cluster.config().limits.max_context;
  TestSequence s = cluster.Create("s", 1);
  const auto append = cluster.BeginAppend({.sequence = s.ref(),
                                           .step_id = 1,
                                           .start = 0,
                                           .count = limit + 1,
                                           .layer_begin = 0,
                                           .layer_count = 1});
  CHECK(append.status().reason() == Reason::kContextLimit);
  const auto huge = cluster.BeginAppend({.sequence = s.ref(),
                                         .step_id = 1,
                                         .start = 0,
                                         .count = std::numeric_limits<std::int64_t>::max(),
                                         .layer_begin = 0,
                                         .layer_count = 1});
  CHECK(huge.status().reason() == Reason::kContextLimit);
  CHECK(cluster.FreeBlocks() == 64);
}

TEST_CASE("malformed steps are refused and change nothing") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 20);
  const StepSpec good{.step_id = 2, .items = {{&s, 20, 1}}};
  const auto reason = [&](auto change) {
    StepRequest request = cluster.MakeStep(good);
    change(request);
    return cluster.Submit(std::move(request)).status().reason();
  };
  CHECK(reason([](StepRequest& r) { r.layer = -1; }) == Reason::kLayer);
  CHECK(reason([](StepRequest& r) { r.layer = 2; }) == Reason::kLayer);
  CHECK(reason([](StepRequest& r) { r.entries.clear(); }) == Reason::kBatchSize);
  CHECK(reason([](StepRequest& r) { r.entries.resize(257, r.entries[0]); }) == Reason::kBatchSize);
  CHECK(reason([](StepRequest& r) {
          r.entries[0].count = 8;
          r.entries.resize(17, r.entries[0]);  // 136 tokens, 128 allowed
        }) == Reason::kTokenCount);
  CHECK(reason([](StepRequest& r) { r.output_dtype.reset(); }) == Reason::kDtype);
  CHECK(reason([](StepRequest& r) { r.query.dtype = DType::kF32; }) == Reason::kDtype);
  CHECK(reason([](StepRequest& r) { r.query.bytes = r.query.bytes.first(10); }) ==
        Reason::kByteSize);
  CHECK(reason([](StepRequest& r) { r.query.shape = r.query.shape.first(2); }) == Reason::kShape);
  CHECK(reason([](StepRequest& r) { r.new_kv->bytes = {}; }) == Reason::kByteSize);
  CHECK(reason([](StepRequest& r) { r.timeout = Millis(0); }) == Reason::kTimeout);
  CHECK(reason([](StepRequest& r) { r.timeout = Millis(60001); }) == Reason::kTimeout);
  CHECK(reason([](StepRequest& r) { r.expected_epoch = 3; }) == Reason::kEpochChanged);
  CHECK(reason([](StepRequest& r) { r.entries[0].sequence.id = "nobody"; }) ==
        Reason::kSequenceNotFound);
  CHECK(reason([](StepRequest& r) {
          r.entries[0].rewind = true;
          r.new_kv.reset();
        }) == Reason::kPosition);
  CHECK(StepReason(cluster, {.step_id = 2, .items = {{&s, 20, 1}, {&s, 20, 1}}}) ==
        Reason::kDuplicateSequence);
  CHECK(Length(cluster, s) == 20);
  CHECK(cluster.Info(s).max_step_id == 1);
  cluster.StepChecked(good);
}

TEST_CASE("NaN in an owned latent reaches the answer and is counted") {
  for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
    for (const char* backend : {"cpu_reference", "cpu_simd"}) {
      Cluster cluster({.ranks = 2, .exchange = exchange, .backend = backend});
      TestSequence s = cluster.Create("s", 1);
      cluster.Append(s, 1, 0, 10);
      StepRequest request = cluster.MakeStep({.step_id = 2, .items = {{&s, 10, 2}}});
      auto bytes = std::make_shared<std::vector<std::byte>>(request.new_kv->bytes.begin(),
                                                            request.new_kv->bytes.end());
      (*bytes)[bytes->size() - 1] = std::byte{0x7f};  // the second token's last RoPE dim: NaN
      (*bytes)[bytes->size() - 2] = std::byte{0xc1};
      const auto shape =
          std::vector<std::int64_t>(request.new_kv->shape.begin(), request.new_kv->shape.end());
      request.new_kv = TensorView{.dtype = DType::kBf16, .shape = shape, .bytes = *bytes};
      const auto reply = cluster.Submit(std::move(request));
      REQUIRE(reply.ok());
      CHECK(reply->faulty_rows == 8);  // every head of the second token, none of the first
      CHECK(cluster.engine().load().faulty_rows == 8);
    }
  }
}

TEST_CASE("create and fork are idempotent by request id") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  const double scale = cluster.config().model.softmax_scale;
  const auto create = [&](CreateRequest request) {
    return Await<CreateReply>(
        [&](auto done) { cluster.engine().CreateSequence(std::move(request), std::move(done)); });
  };
  const CreateRequest request{.id = "s", .request_id = "r1", .softmax_scale = scale};
  const auto first = create(request);
  REQUIRE(first.ok());
  CHECK(create(request)->generation == first->generation);
  CreateRequest other = request;
  other.request_id = "r2";
  CHECK(create(other).status().reason() == Reason::kSequenceExists);
  other = request;
  other.lease = Millis(5000);  // other content under the same request id
  CHECK(create(other).status().reason() == Reason::kSequenceExists);
  other = request;
  other.id = "t";
  other.softmax_scale = scale * 1.0000001;
  CHECK(create(other).status().reason() == Reason::kGeometry);
  other.softmax_scale = scale;
  other.lease = Millis(99);
  CHECK(create(other).status().reason() == Reason::kLease);
  for (const std::string& id : {std::string(), std::string(129, 'a'), std::string("a b"),
                                std::string("a\0b", 3), std::string("\xc3\xa9")}) {
    other = request;
    other.id = id;
    CHECK(create(other).status().reason() == Reason::kSequenceId);
    other = request;
    other.id = "t";
    other.request_id = id == "a b" ? "" : id;
    CHECK(create(other).status().reason() == Reason::kRequestId);
  }
  // A fork sent again after its parent is gone answers as before.
  const TestSequence parent = cluster.Create("parent", 1);
  const TestSequence child = cluster.Fork(parent, "child", 0, 2);
  cluster.Release(parent);
  CHECK(cluster.Fork(parent, "child", 0, 2).generation == child.generation);
}

TEST_CASE("a lease releases the sequence, any call naming it renews it") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  const auto create = Await<CreateReply>([&](auto done) {
    cluster.engine().CreateSequence({.id = "leased",
                                     .request_id = "r",
                                     .softmax_scale = cluster.config().model.softmax_scale,
                                     .lease = Millis(400)},
                                    std::move(done));
  });
  REQUIRE(create.ok());
  TestSequence s("leased", 1);
  s.generation = create->generation;
  cluster.Append(s, 1, 0, 20);
  for (int i = 0; i < 8; ++i) {  // 800 ms in all
    std::this_thread::sleep_for(Millis(100));
    CHECK(cluster.Info(s).lease_remaining.has_value());
  }
  std::this_thread::sleep_for(Millis(700));
  CHECK(cluster.engine().load().sequences == 0);
  CHECK(cluster.FreeBlocks() == 16);
}

TEST_CASE("truncate sets every layer and obeys step ids") {
  Cluster cluster({.ranks = 2, .page_tokens = 16, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  cluster.Append(s, 1, 0, 70);
  cluster.StepChecked({.step_id = 2, .layer = 0, .items = {{&s, 70, 4}}});
  const auto truncate = [&](std::uint64_t step_id, std::int64_t to) {
    return Await<SequenceInfo>([&](auto done) {
      cluster.engine().TruncateSequence({.sequence = s.ref(), .step_id = step_id, .to_length = to},
                                        std::move(done));
    });
  };
  CHECK(truncate(1, 10).status().reason() == Reason::kStaleStep);
  CHECK(truncate(2, 10).status().reason() == Reason::kReplayMismatch);
  CHECK(truncate(0, 10).status().reason() == Reason::kStepId);
  CHECK(truncate(3, -1).status().reason() == Reason::kPosition);
  const auto cut = truncate(3, 71);
  REQUIRE(cut.ok());
  CHECK(cut->layer_lengths == std::vector<std::int64_t>{71, 70});
  CHECK(truncate(3, 71).ok());  // again
  CHECK(truncate(3, 70).status().reason() == Reason::kReplayMismatch);
  REQUIRE(truncate(4, 20).ok());
  CHECK(cluster.FreeBlocks() == 15);
  CheckReadsBack(cluster, s, 20);
  s.Diverge(20, 5);
  StepAllLayers(cluster, {.step_id = 5, .items = {{&s, 20, 2}}});
}

TEST_CASE("sequences are listed in pages, ordered by id") {
  Cluster cluster({.ranks = 1, .heads = 2, .blocks = 4});
  for (int i = 0; i < 25; ++i) {
    cluster.Create("s" + std::to_string(100 + (i * 7) % 25), static_cast<std::uint64_t>(i));
  }
  const auto list = [&](int size, const std::string& token) {
    return Await<ListReply>([&](auto done) {
      cluster.engine().ListSequences({.page_size = size, .page_token = token}, std::move(done));
    });
  };
  std::vector<std::string> ids;
  std::string token;
  do {
    const auto page = list(10, token);
    REQUIRE(page.ok());
    for (const SequenceInfo& info : page->sequences) ids.push_back(info.id);
    token = page->next_page_token;
  } while (!token.empty());
  CHECK(ids.size() == 25);
  CHECK(std::ranges::is_sorted(ids));
  CHECK(list(0, "")->sequences.size() == 25);
  CHECK(list(-1, "").status().reason() == Reason::kPage);
  CHECK(list(1001, "").status().reason() == Reason::kPage);
  CHECK(list(10, "not a token").status().reason() == Reason::kPage);
}

TEST_CASE("a full queue refuses at once, deadlines and cancellation act before launch") {
  std::promise<void> release;
  std::shared_future<void> gate = release.get_future().share();
  ClusterOptions options{.ranks = 1, .heads = 2, .blocks = 16};
  std::atomic<bool> armed{false};
  options.hooks.rank_fault = [&armed, gate](int, RankPhase phase) {
    if (phase == RankPhase::kAttend && armed.exchange(false)) gate.wait();
    return Status::Ok();
  };
  Cluster cluster(options);
  TestSequence s = cluster.Create("s", 1);
  armed = true;
  std::vector<std::future<Result<StepReply>>> replies;
  std::vector<StepHandle> handles;
  const auto submit = [&](std::int64_t start, std::optional<Millis> timeout) {
    auto promise = std::make_shared<std::promise<Result<StepReply>>>();
    replies.push_back(promise->get_future());
    StepRequest request = cluster.MakeStep(
        {.step_id = static_cast<std::uint64_t>(start + 1), .items = {{&s, start, 1}}});
    request.timeout = timeout;
    handles.push_back(cluster.engine().SubmitStep(
        std::move(request), [promise](Result<StepReply> r) { promise->set_value(std::move(r)); }));
  };
  submit(0, {});  // blocks in the rank
  while (cluster.engine().load().queued > 0) std::this_thread::yield();
  submit(1, {});
  submit(1, Millis(1));  // passes its deadline in the queue
  submit(2, {});
  handles.back().Cancel();
  const int limit = cluster.config().limits.max_queue;
  for (int i = 3; i < limit; ++i) submit(2, {});
  CHECK(cluster.engine().load().queued == limit);
  submit(2, {});
  CHECK(replies.back().get().status().reason() == Reason::kOverloaded);
  std::this_thread::sleep_for(Millis(5));
  release.set_value();
  CHECK(replies[0].get().ok());
  CHECK(replies[1].get().ok());
  CHECK(replies[2].get().status().reason() == Reason::kStepDeadline);
  CHECK(replies[3].get().status().reason() == Reason::kCancelled);
  CHECK(replies[4].get().ok());  // start 2 is the length now
  for (std::size_t i = 5; i + 1 < replies.size(); ++i) CHECK(replies[i].get().ok());  // replays
  CHECK(Length(cluster, s, 0) == 3);
}

TEST_CASE("drain finishes what is queued and refuses the rest") {
  Cluster cluster({.ranks = 2, .blocks = 16});
  TestSequence s = cluster.Create("s", 1);
  CHECK(cluster.engine().Drain(Clock::now() + Millis(20000)));
  CHECK(cluster.engine().state() == EngineState::kDraining);
  CHECK(StepReason(cluster, {.step_id = 1, .items = {{&s, 0, 1}}}) == Reason::kDraining);
}

TEST_CASE("swapping a backend's declared base is refused by name at start") {
  std::vector<BackendEntry> table(Backends().begin(), Backends().end());
  for (BackendEntry& entry : table) {
    if (entry.caps.arch != Arch::kHost) continue;
    const LogBase declared = entry.caps.lse_base;
    entry.caps.lse_base = declared == LogBase::kE ? LogBase::kTwo : LogBase::kE;
    EngineConfig config = MakeConfig({.backend = std::string(entry.name)});
    const auto engine = Engine::Create(config, {.backends = table});
    CHECK(engine.status().reason() == Reason::kBackendContract);
    CHECK(engine.status().message().find(entry.name) != std::string::npos);
    entry.caps.lse_base = declared;
    CHECK(Engine::Create(config, {.backends = table}).ok());
  }
}

TEST_CASE("KV memory: a token costs its latents and no more") {
  Cluster cluster({.ranks = 4, .page_tokens = 16, .blocks = 512});
  const EngineInfo info = cluster.engine().info();
  TestSequence s = cluster.Create("s", 1);
  const std::int64_t tokens = 20000;
  cluster.Append(s, 1, 0, tokens);
  const std::int64_t bytes_per_block =
      info.kv_bytes_per_rank * info.config.ranks.count / info.config.kv.blocks;
  const std::int64_t reserved = cluster.Info(s).blocks * bytes_per_block;
  const std::int64_t layers = info.config.model.layers;
  const std::int64_t latents = tokens * 2 * info.config.model.d_qk() * layers;
  CHECK(static_cast<double>(reserved) <=
        1.01 * static_cast<double>(latents) + static_cast<double>(bytes_per_block));
  CHECK(bytes_per_block == info.block_tokens * 2 * info.config.model.d_qk() * layers);
}

}  // namespace dcp::testing
