// Every RPC's ordinary use, against the real program, with a float64 check of every answered row.
#include <catch2/catch.hpp>
#include <cstring>
#include <thread>

#include "tests/integration/test_client.h"

namespace dcp {
namespace {

std::vector<std::int64_t> Lengths(const v1::Sequence& sequence) {
  return {sequence.layer_lengths().begin(), sequence.layer_lengths().end()};
}

TEST_CASE("GetServerInfo tells geometry, limits and choices") {
  const TestConfig config{.limits = "max_inflight = 3\nappend_idle_timeout_ms = 1500\n"};
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const v1::GetServerInfoResponse info = client.Info();
  CHECK(!info.version().empty());
  CHECK(!info.git_hash().empty());
  CHECK(info.epoch() > 0);
  CHECK(info.model().layers() == 2);
  CHECK(info.model().heads() == 4);
  CHECK(info.model().kv_lora_rank() == 64);
  CHECK(info.model().rope_dim() == 16);
  CHECK(info.model().softmax_scale() == config.softmax_scale);
  CHECK(info.ranks().count() == 2);
  CHECK(info.ranks().device() == "cpu");
  CHECK(info.kv().page_tokens() == 4);
  CHECK(info.kv().interleave() == 1);
  CHECK(info.kv().block_tokens() == 8);
  CHECK(info.kv().total_blocks() == 32);
  CHECK(info.kv().bytes_per_rank() == 2 * 32 * 4 * 80 * 2);
  CHECK(info.limits().max_inflight() == 3);
  CHECK(info.limits().max_message_bytes() == 64 << 20);
  CHECK(info.limits().append_idle_timeout().seconds() == 1);
  CHECK(info.limits().append_idle_timeout().nanos() == 500'000'000);
  CHECK(info.attention().backend() == "cpu_reference");
  CHECK(info.attention().lse_base() == v1::LSE_BASE_E);
  CHECK(info.attention().partial_dtype() == v1::DATA_TYPE_FP32);
  CHECK(info.exchange() == v1::EXCHANGE_ALGORITHM_A2A);
}

TEST_CASE("a sequence's life: create, append, read, fork, rewind, truncate, release") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const std::int64_t all_free = client.Load().free_blocks();
  CHECK(all_free == config.blocks);

  const TestSequence a = client.Create("a");
  CHECK(client.Create("a").ref.generation() == a.ref.generation());  // the same request again
  client.Append(a, 1, 0, 5);
  client.Append(a, 2, 5, 1);
  client.Append(a, 3, 6, 4);
  CHECK(Lengths(client.Get(a)) == std::vector<std::int64_t>{10, 10});
  CHECK(client.Get(a).max_step_id() == 3);
  CHECK(client.Get(a).blocks() == 2);

  // A read, at positions in the middle.
  v1::DecodeStepResponse response;
  const std::vector<StepPart> middle = {{&a, 3, 4}};
  REQUIRE(CodeAndReason(client.Call(client.Step(0, 1, middle, false), &response)) == "OK");
  CHECK(client.Verify(1, middle, response) == "");
  CHECK(response.timing().total().nanos() > 0);
  CHECK(response.epoch() == client.Info().epoch());

  // A fork writes into a block it shares; both go on, in one batch.
  const TestSequence b = client.Fork(a, "b", 9);
  CHECK(client.Get(b).shared_blocks() == 2);
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<StepPart> both = {{&b, 9, 2}, {&a, 10, 1}};
    REQUIRE(CodeAndReason(client.Call(client.Step(4, layer, both), &response)) == "OK");
    CHECK(client.Verify(layer, both, response) == "");
  }
  CHECK(client.Load().cow_blocks() >= 1);

  // A rewind replaces tokens: same content, so the same answer is right.
  const std::vector<StepPart> rewind = {{&a, 7, 2, true}};
  REQUIRE(CodeAndReason(client.Call(client.Step(5, 0, rewind), &response)) == "OK");
  CHECK(client.Verify(0, rewind, response) == "");
  CHECK(Lengths(client.Get(a)) == std::vector<std::int64_t>{9, 11});

  v1::TruncateSequenceRequest truncate;
  *truncate.mutable_sequence() = a.ref;
  truncate.set_step_id(6);
  truncate.set_to_length(4);
  v1::TruncateSequenceResponse truncated;
  REQUIRE(CodeAndReason(client.stub().TruncateSequence(TestClient::Context().get(), truncate,
                                                       &truncated)) == "OK");
  CHECK(Lengths(truncated.sequence()) == std::vector<std::int64_t>{4, 4});

  CHECK(client.Release({&a, &b}) == 2);
  CHECK(client.Release({&a, &b}) == 0);
  CHECK(client.Load().free_blocks() == all_free);
  CHECK(client.Load().sequences() == 0);
}

TEST_CASE("a replayed step gives the same bytes and one append") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const v1::DecodeStepRequest step = client.Step(1, 0, {{&a, 0, 3}});
  v1::DecodeStepResponse first, second;
  REQUIRE(CodeAndReason(client.Call(step, &first)) == "OK");
  REQUIRE(CodeAndReason(client.Call(step, &second)) == "OK");
  CHECK(first.output().data() == second.output().data());
  CHECK(first.lse().values().data() == second.lse().values().data());
  CHECK(client.Get(a).layer_lengths(0) == 3);
}

TEST_CASE("bf16 output, base-2 lse, and no lse") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  client.Append(a, 1, 0, 4);
  v1::DecodeStepRequest read = client.Step(0, 0, {{&a, 3, 1}}, false);
  v1::DecodeStepResponse base_e, base_2, none;
  REQUIRE(client.Call(read, &base_e).ok());
  read.set_lse_base(v1::LSE_BASE_TWO);
  read.set_output_dtype(v1::DATA_TYPE_BF16);
  REQUIRE(client.Call(read, &base_2).ok());
  read.set_return_lse(false);
  REQUIRE(client.Call(read, &none).ok());
  CHECK(base_2.output().dtype() == v1::DATA_TYPE_BF16);
  CHECK(base_2.output().data().size() * 2 == base_e.output().data().size());
  CHECK(base_2.lse().base() == v1::LSE_BASE_TWO);
  CHECK(!none.has_lse());
  const auto value = [](const v1::DecodeStepResponse& r) {
    float x = 0;
    std::memcpy(&x, r.lse().values().data().data(), sizeof(x));
    return x;
  };
  CHECK(value(base_2) == Approx(value(base_e) * 1.4426950408889634));
}

TEST_CASE("ListSequences in pages") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  for (const char* id : {"d", "b", "a", "c", "e"}) client.Create(id);
  std::string ids;
  v1::ListSequencesRequest request;
  request.set_page_size(2);
  int pages = 0;
  do {
    v1::ListSequencesResponse response;
    REQUIRE(CodeAndReason(client.stub().ListSequences(TestClient::Context().get(), request,
                                                      &response)) == "OK");
    CHECK(response.sequences_size() <= 2);
    for (const v1::Sequence& s : response.sequences()) ids += s.ref().sequence_id();
    request.set_page_token(response.next_page_token());
    ++pages;
  } while (!request.page_token().empty());
  CHECK(ids == "abcde");
  CHECK(pages == 3);
}

TEST_CASE("AppendKv, then steps on top") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  for (int round = 0; round < 2; ++round) {  // the second is the same append, sent again
    const auto context = TestClient::Context();
    v1::AppendKvResponse response;
    const auto writer = client.stub().AppendKv(context.get(), &response);
    writer->Write(client.Header(a, 1, 0, 20, 0, 2));
    for (const std::int64_t offset : {15, 5, 0, 10}) {
      writer->Write(client.Chunk(a, 1, 0, offset, 5));
      writer->Write(client.Chunk(a, 0, 0, offset, 5));
    }
    writer->WritesDone();
    REQUIRE(CodeAndReason(writer->Finish()) == "OK");
    CHECK(response.length() == 20);
    CHECK(response.replayed() == (round == 1));
    CHECK(response.epoch() == client.Info().epoch());
  }
  CHECK(Lengths(client.Get(a)) == std::vector<std::int64_t>{20, 20});
  client.Append(a, 2, 20, 3);
}

TEST_CASE("DecodeStream: layers of several steps, back to back") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const auto context = TestClient::Context();
  const auto stream = client.stub().DecodeStream(context.get());
  std::thread writer([&] {
    std::uint64_t tag = 100;
    for (int step = 0; step < 10; ++step) {
      for (int layer = 0; layer < 2; ++layer) {
        v1::DecodeStepRequest request = client.Step(step + 1, layer, {{&a, step, 1}});
        request.set_tag(tag++);
        stream->Write(request);
      }
    }
    stream->WritesDone();
  });
  std::uint64_t tag = 100;
  v1::DecodeStepResponse response;
  while (stream->Read(&response)) {
    CHECK(response.tag() == tag);
    const int step = static_cast<int>(tag - 100) / 2;
    const int layer = static_cast<int>(tag - 100) % 2;
    CHECK(client.Verify(layer, {{&a, step, 1}}, response) == "");
    ++tag;
  }
  writer.join();
  CHECK(tag == 120);
  CHECK(CodeAndReason(stream->Finish()) == "OK");
}

TEST_CASE("a lease that is not renewed releases its sequence") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  v1::CreateSequenceRequest request;
  request.set_sequence_id("leased");
  request.set_request_id("r");
  request.set_softmax_scale(config.softmax_scale);
  request.mutable_lease()->set_nanos(200'000'000);
  v1::CreateSequenceResponse response;
  REQUIRE(client.stub().CreateSequence(TestClient::Context().get(), request, &response).ok());
  CHECK(client.Load().sequences() == 1);
  for (int i = 0; i < 100 && client.Load().sequences() != 0; ++i) {
    std::this_thread::sleep_for(Millis{20});
  }
  CHECK(client.Load().sequences() == 0);
}

TEST_CASE("a unix socket and a port at the same time") {
  const TestConfig config;
  const TemporaryFolder folder;
  const std::string socket = "unix:" + folder.path() + "/socket";
  const ServerProcess server(
      ServerOptions{.config = config.Toml(), .arguments = {"--listen", socket}});
  TestClient tcp(server.address(), config);
  TestClient local(socket, config);
  const TestSequence a = tcp.Create("a");
  local.Append(a, 1, 0, 2);
  CHECK(tcp.Get(a).layer_lengths(1) == 2);
}

TEST_CASE("poll = spin serves the same") {
  const TestConfig config{.server = "poll = \"spin\"\nthreads = 1\n"};
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  client.Append(a, 1, 0, 3);
  CHECK(client.Release({&a}) == 1);
}

}  // namespace
}  // namespace dcp
