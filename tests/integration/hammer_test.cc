// 64 concurrent clients on the same few sequences: no deadlock, no lost or torn answer, nothing
// left behind. DCP_HAMMER_SECONDS (5) says how long.
//
// A token's latent follows from its sequence and position alone and a write's step_id from its
// position, so that clients which race for the same token send the same write: one applies, the
// others are replays or are told STALE_STEP or the like. Whatever is answered can be checked
// against float64, whoever wrote it.
#include <signal.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "tests/integration/health_client.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

constexpr int kClients = 64;
constexpr int kSequences = 12;

TestConfig Config() {
  return {.blocks = 512, .limits = "max_context = 96\nmax_queue = 48\nmax_inflight = 8\n"};
}

// What a client may be told when others work on the same sequences. Anything else is a failure.
const std::set<std::string> kExpected = {
    "OK",
    "ABORTED/APPEND_CANCELLED",
    "ABORTED/APPEND_OPEN",
    "ABORTED/LENGTH_CONFLICT",
    "ABORTED/REPLAY_MISMATCH",
    "ABORTED/STALE_STEP",
    "FAILED_PRECONDITION/INCOMPLETE_TOKEN",
    "OUT_OF_RANGE/CONTEXT_LIMIT",
    "OUT_OF_RANGE/POSITION_GAP",
    "OUT_OF_RANGE/READ_RANGE",
    "RESOURCE_EXHAUSTED/KV_CAPACITY",
    "RESOURCE_EXHAUSTED/OVERLOADED",
};

class Hammer {
 public:
  Hammer(const std::string& address, std::vector<TestSequence> shared, TimePoint end)
      : address_(address), shared_(std::move(shared)), end_(end) {}

  void Run(int index) {
    try {
      Client(index);
    } catch (const std::exception& e) {
      Fail("client " + std::to_string(index) + ": " + e.what());
    }
  }

  int answers() const { return answers_; }
  std::vector<std::string> failures() {
    const std::lock_guard lock(mutex_);
    return failures_;
  }
  std::map<std::string, int> outcomes() {
    const std::lock_guard lock(mutex_);
    return outcomes_;
  }

 private:
  void Fail(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (failures_.size() < 20) failures_.push_back(what);
  }

  void Count(const std::string& outcome) {
    ++answers_;
    const std::lock_guard lock(mutex_);
    ++outcomes_[outcome];
    if (!kExpected.contains(outcome) && failures_.size() < 20) failures_.push_back(outcome);
  }

  void Check(TestClient& client, int layer, const std::vector<StepPart>& parts,
             const grpc::Status& status, const v1::DecodeStepResponse& response) {
    Count(CodeAndReason(status));
    if (!status.ok()) return;
    const std::string wrong = client.Verify(layer, parts, response);
    if (!wrong.empty()) Fail("answer: " + wrong);
  }

  void Client(int index) {
    TestClient client(address_, Config());
    std::mt19937_64 random(static_cast<std::uint64_t>(index) + 1);
    for (int round = 0; Clock::now() < end_; ++round) {
      const TestSequence& s = shared_[random() % shared_.size()];
      switch (random() % 10) {
        case 0:
        case 1:
        case 2: AppendBoth(client, s, random); break;
        case 3:
        case 4: Read(client, random); break;
        case 5:
        case 6: StreamReads(client, s, random); break;
        case 7: ForkAndGoOn(client, s, std::to_string(index) + "." + std::to_string(round)); break;
        case 8: Prefill(client, s, random); break;
        default: Disturb(client, s, random); break;
      }
    }
  }

  // Nothing when the server is too busy to say.
  std::optional<v1::Sequence> Get(TestClient& client, const TestSequence& s) {
    v1::GetSequenceRequest request;
    request.set_sequence_id(s.ref.sequence_id());
    v1::GetSequenceResponse response;
    const grpc::Status status =
        client.stub().GetSequence(TestClient::Context().get(), request, &response);
    Count(CodeAndReason(status));
    if (!status.ok()) return std::nullopt;
    return response.sequence();
  }

  // The next tokens of every layer, as any other client would write them.
  void AppendBoth(TestClient& client, const TestSequence& s, std::mt19937_64& random) {
    const auto now = Get(client, s);
    if (!now) return;
    const int count = 1 + static_cast<int>(random() % 2);
    for (int layer = 0; layer < now->layer_lengths_size(); ++layer) {
      const std::int64_t start = now->layer_lengths(layer);
      const std::vector<StepPart> parts = {{&s, start, count}};
      v1::DecodeStepResponse response;
      const auto step = client.Step(NextStep(*now, start), layer, parts);
      Check(client, layer, parts, client.Call(step, &response), response);
    }
  }

  static std::uint64_t NextStep(const v1::Sequence& now, std::int64_t start) {
    return std::max<std::uint64_t>(now.max_step_id(), static_cast<std::uint64_t>(start)) + 1;
  }

  // Two sequences in one step.
  void Read(TestClient& client, std::mt19937_64& random) {
    const std::size_t i = random() % shared_.size();
    const std::size_t j = (i + 1 + random() % (shared_.size() - 1)) % shared_.size();
    const std::vector<StepPart> parts = {{&shared_[i], static_cast<std::int64_t>(random() % 8), 2},
                                         {&shared_[j], static_cast<std::int64_t>(random() % 8), 1}};
    const int layer = static_cast<int>(random() % 2);
    v1::DecodeStepResponse response;
    Check(client, layer, parts, client.Call(client.Step(0, layer, parts, false), &response),
          response);
  }

  void StreamReads(TestClient& client, const TestSequence& s, std::mt19937_64& random) {
    const auto context = TestClient::Context();
    const auto stream = client.stub().DecodeStream(context.get());
    std::vector<StepPart> items;
    for (int i = 0; i < 6; ++i) {
      items.push_back({&s, static_cast<std::int64_t>(random() % 12), 1});
      auto request = client.Step(0, i % 2, {items.back()}, false);
      request.set_tag(static_cast<std::uint64_t>(i) + 1000);
      if (!stream->Write(request)) return Fail("stream: Write");
    }
    if (random() % 8 == 0) {  // goes away with answers owed
      context->TryCancel();
      static_cast<void>(stream->Finish());
      return;
    }
    stream->WritesDone();
    v1::DecodeStepResponse response;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (!stream->Read(&response)) return Fail("stream: an answer is lost");
      if (response.tag() != i + 1000) return Fail("stream: tag");
      const std::string outcome = CodeAndReason(response.status());
      Count(outcome);
      if (outcome != "OK") continue;
      const std::string wrong = client.Verify(static_cast<int>(i % 2), {items[i]}, response);
      if (!wrong.empty()) Fail("stream answer: " + wrong);
    }
    if (stream->Read(&response)) Fail("stream: one answer too many");
    if (!stream->Finish().ok()) Fail("stream: Finish");
  }

  void ForkAndGoOn(TestClient& client, const TestSequence& parent, const std::string& id) {
    const auto now = Get(client, parent);
    if (!now) return;
    const std::int64_t at = std::min(now->layer_lengths(0), now->layer_lengths(1)) / 2;
    if (at == 0) return;
    v1::ForkSequenceRequest request;
    *request.mutable_parent() = parent.ref;
    request.set_sequence_id("fork." + id);
    request.set_request_id(id);
    request.set_at_length(at);
    v1::ForkSequenceResponse response;
    const grpc::Status status =
        client.stub().ForkSequence(TestClient::Context().get(), request, &response);
    Count(CodeAndReason(status));
    if (!status.ok()) return;
    const TestSequence child{
        .ref = response.sequence(),
        .content = Content(std::hash<std::string>()(id), {{parent.content.At(0).content, at}})};
    for (int layer = 0; layer < 2; ++layer) {
      const std::vector<StepPart> parts = {{&child, at, 2}, {&parent, at - 1, 1}};
      // The child writes, the parent is read in a step of its own: a step writes all or none.
      v1::DecodeStepResponse answer;
      const std::vector<StepPart> write = {parts[0]};
      Check(client, layer, write, client.Call(client.Step(1, layer, write), &answer), answer);
      const std::vector<StepPart> read = {parts[1]};
      Check(client, layer, read, client.Call(client.Step(0, layer, read, false), &answer), answer);
    }
    while (true) {  // the queue may be full
      v1::ReleaseSequencesRequest release;
      *release.add_sequences() = child.ref;
      v1::ReleaseSequencesResponse released;
      const grpc::Status freed =
          client.stub().ReleaseSequences(TestClient::Context().get(), release, &released);
      Count(CodeAndReason(freed));
      if (freed.ok() || freed.error_code() != grpc::RESOURCE_EXHAUSTED) break;
    }
  }

  void Prefill(TestClient& client, const TestSequence& s, std::mt19937_64& random) {
    const auto now = Get(client, s);
    if (!now || now->layer_lengths(0) != now->layer_lengths(1)) return;
    const std::int64_t start = now->layer_lengths(0);
    const auto context = TestClient::Context();
    v1::AppendKvResponse response;
    const auto writer = client.stub().AppendKv(context.get(), &response);
    writer->Write(client.Header(s, NextStep(*now, start), start, 4, 0, 2));
    writer->Write(client.Chunk(s, 1, start, 0, 4));
    if (random() % 4 == 0) context->TryCancel();
    writer->Write(client.Chunk(s, 0, start, 2, 2));
    writer->Write(client.Chunk(s, 0, start, 0, 2));
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    if (status.error_code() != grpc::CANCELLED) Count(CodeAndReason(status));
  }

  // Truncation, a client without patience, and questions.
  void Disturb(TestClient& client, const TestSequence& s, std::mt19937_64& random) {
    const auto now = Get(client, s);
    if (now && now->layer_lengths(0) > 64) {
      v1::TruncateSequenceRequest request;
      *request.mutable_sequence() = s.ref;
      request.set_step_id(NextStep(*now, 0));
      request.set_to_length(16);
      v1::TruncateSequenceResponse response;
      Count(CodeAndReason(
          client.stub().TruncateSequence(TestClient::Context().get(), request, &response)));
    }
    const auto hasty = TestClient::Context(Millis{static_cast<int>(random() % 3)});
    v1::DecodeStepResponse response;
    static_cast<void>(
        client.stub().DecodeStep(hasty.get(), client.Step(0, 0, {{&s, 0, 1}}, false), &response));
    client.Load();
  }

  const std::string address_;
  const std::vector<TestSequence> shared_;
  const TimePoint end_;
  std::atomic<int> answers_{0};
  std::mutex mutex_;
  std::vector<std::string> failures_;
  std::map<std::string, int> outcomes_;
};

TEST_CASE("64 clients on overlapping sequences") {
  const char* seconds = std::getenv("DCP_HAMMER_SECONDS");
  const std::chrono::seconds duration(seconds != nullptr ? std::atoi(seconds) : 5);
  const TestConfig config = Config();
  ServerProcess server(config);
  TestClient client(server.address(), config);
  std::vector<TestSequence> shared;
  for (int i = 0; i < kSequences; ++i) {
    shared.push_back(client.Create("s" + std::to_string(i)));
    for (int j = 0; j < 4; ++j) client.Append(shared.back(), j + 1, 4 * j, 4);
  }

  Hammer hammer(server.address(), shared, Clock::now() + duration);
  std::vector<std::thread> threads;
  threads.reserve(kClients);
  for (int i = 0; i < kClients; ++i) threads.emplace_back([&hammer, i] { hammer.Run(i); });
  for (std::thread& t : threads) t.join();

  for (const std::string& failure : hammer.failures()) FAIL_CHECK(failure);
  for (const auto& [outcome, count] : hammer.outcomes()) {
    std::cout << count << ' ' << outcome << '\n';
  }
  CHECK(hammer.outcomes()["OK"] > 100 * duration.count());
  CHECK(server.Runs());
  CHECK(CheckHealth(client.channel(), "") == ServingStatus::kServing);

  // Forks whose release was cut short by the end are not left: each released its own.
  std::vector<const TestSequence*> all;
  for (const TestSequence& s : shared) all.push_back(&s);
  CHECK(client.Release(all) == kSequences);
  const v1::GetLoadResponse load = client.Load();
  CHECK(load.sequences() == 0);
  CHECK(load.free_blocks() == load.total_blocks());
  CHECK(load.open_appends() == 0);
  CHECK(load.queued() == 0);
  CHECK(load.faulty_rows() == 0);
  CHECK(load.rank_failures() == 0);
  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{10000}) == 0);
}

}  // namespace
}  // namespace dcp
