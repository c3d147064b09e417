// AppendKv: coverage, order of messages, loss, memory.
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <iostream>
#include <limits>
#include <thread>

#include "tests/integration/tcp_proxy.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

bool WaitFor(const std::function<bool()>& condition, Millis timeout = Millis{5000}) {
  const TimePoint deadline = Clock::now() + timeout;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(Millis{2});
  }
  return true;
}

struct Append {
  explicit Append(TestClient& client, Millis timeout = Millis{20000})
      : context(TestClient::Context(timeout)),
        writer(client.stub().AppendKv(context.get(), &reply)) {}
  Append& Send(const v1::AppendKvRequest& message) {
    writer->Write(message);
    return *this;
  }
  std::string Commit() {
    writer->WritesDone();
    return CodeAndReason(writer->Finish());
  }
  std::unique_ptr<grpc::ClientContext> context;
  v1::AppendKvResponse reply;
  std::unique_ptr<grpc::ClientWriter<v1::AppendKvRequest>> writer;
};

struct World {
  TestConfig config{.limits = "append_idle_timeout_ms = 400\nmax_open_appends = 2\n"};
  ServerProcess server{config};
  TestClient client{server.address(), config};
  TestSequence a = client.Create("a");

  World() { client.Append(a, 10, 0, 3); }
  std::string State() {
    v1::ListSequencesResponse list;
    REQUIRE(client.stub().ListSequences(TestClient::Context().get(), {}, &list).ok());
    const v1::GetLoadResponse load = client.Load();
    return list.DebugString() + std::to_string(load.free_blocks()) + " free, " +
           std::to_string(load.open_appends()) + " appends";
  }
  v1::AppendKvRequest Header(std::int64_t count = 12, int layers = 2) const {
    return client.Header(a, 11, 3, count, 0, layers);
  }
  v1::AppendKvRequest Chunk(int layer, std::int64_t offset, std::int64_t count) const {
    return client.Chunk(a, layer, 3, offset, count);
  }
};

TEST_CASE("what does not cover each (layer, token) once is COVERAGE") {
  World w;
  const std::string before = w.State();
  const auto append = [&](const std::vector<v1::AppendKvRequest>& chunks) {
    Append append(w.client);
    append.Send(w.Header());
    for (const auto& chunk : chunks) append.Send(chunk);
    std::string got = append.Commit();
    CHECK(w.State() == before);
    return got;
  };
  CHECK(append({}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(0, 0, 12)}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(0, 0, 12), w.Chunk(1, 0, 11)}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(0, 0, 12), w.Chunk(0, 11, 1)}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(0, 0, 13)}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(0, -1, 1)}) == "INVALID_ARGUMENT/COVERAGE");
  CHECK(append({w.Chunk(2, 0, 12)}) == "INVALID_ARGUMENT/LAYER");
  CHECK(append({w.Chunk(0, 0, 12), w.Chunk(1, 0, 12), w.Chunk(1, 0, 12)}) ==
        "INVALID_ARGUMENT/COVERAGE");
  auto chunk = w.Chunk(0, 0, 12);
  chunk.mutable_chunk()->mutable_latents()->set_dtype(v1::DATA_TYPE_FP32);
  CHECK(append({chunk}) == "INVALID_ARGUMENT/DTYPE");
  chunk = w.Chunk(0, 0, 12);
  chunk.mutable_chunk()->mutable_latents()->set_shape(1, 81);
  CHECK(append({chunk}) == "INVALID_ARGUMENT/SHAPE");
  chunk = w.Chunk(0, 0, 12);
  chunk.mutable_chunk()->mutable_latents()->mutable_data()->pop_back();
  CHECK(append({chunk}) == "INVALID_ARGUMENT/BYTE_SIZE");
  chunk.mutable_chunk()->mutable_latents()->clear_data();
  CHECK(append({chunk}) == "INVALID_ARGUMENT/TENSOR_DATA");
}

TEST_CASE("headers that are refused") {
  World w;
  const std::string before = w.State();
  const auto append = [&](auto change) {
    v1::AppendKvRequest header = w.Header();
    change(*header.mutable_header());
    Append append(w.client);
    append.Send(header).Send(w.Chunk(0, 0, 12));
    std::string got = append.Commit();
    CHECK(w.State() == before);
    return got;
  };
  using Header = v1::AppendKvHeader;
  CHECK(append([](Header& h) { h.mutable_sequence()->set_sequence_id("x"); }) ==
        "NOT_FOUND/SEQUENCE_NOT_FOUND");
  CHECK(append([](Header& h) { h.mutable_sequence()->set_generation(1); }) ==
        "NOT_FOUND/SEQUENCE_GENERATION");
  CHECK(append([](Header& h) { h.set_step_id(0); }) == "INVALID_ARGUMENT/STEP_ID");
  CHECK(append([](Header& h) { h.set_step_id(9); }) == "ABORTED/STALE_STEP");
  CHECK(append([](Header& h) { h.set_step_id(10); }) == "ABORTED/REPLAY_MISMATCH");
  CHECK(append([](Header& h) { h.set_start(2); }) == "ABORTED/LENGTH_CONFLICT");
  CHECK(append([](Header& h) { h.set_start(4); }) == "OUT_OF_RANGE/POSITION_GAP");
  CHECK(append([](Header& h) { h.set_start(-1); }) == "INVALID_ARGUMENT/POSITION");
  CHECK(append([](Header& h) { h.set_count(0); }) == "INVALID_ARGUMENT/TOKEN_COUNT");
  CHECK(append([](Header& h) { h.set_count(-4); }) == "INVALID_ARGUMENT/TOKEN_COUNT");
  CHECK(append([](Header& h) { h.set_count(std::numeric_limits<std::int64_t>::max()); }) ==
        "OUT_OF_RANGE/CONTEXT_LIMIT");
  CHECK(append([](Header& h) { h.set_count(1000); }) == "RESOURCE_EXHAUSTED/KV_CAPACITY");
  CHECK(append([](Header& h) { h.set_layer_begin(-1); }) == "INVALID_ARGUMENT/LAYER");
  CHECK(append([](Header& h) { h.set_layer_begin(1); }) == "INVALID_ARGUMENT/LAYER");
  CHECK(append([](Header& h) { h.set_layer_count(0); }) == "INVALID_ARGUMENT/LAYER");
  CHECK(append([](Header& h) { h.set_layer_count(std::numeric_limits<int>::max()); }) ==
        "INVALID_ARGUMENT/LAYER");
  CHECK(append([](Header& h) { h.set_expected_epoch(1); }) == "ABORTED/EPOCH_CHANGED");
}

TEST_CASE("messages out of order are PROTOCOL") {
  World w;
  const std::string before = w.State();
  CHECK(Append(w.client).Commit() == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(Append(w.client).Send({}).Commit() == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(Append(w.client).Send(w.Chunk(0, 0, 12)).Commit() == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(Append(w.client).Send(w.Header()).Send(w.Header()).Commit() == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(Append(w.client).Send(w.Header()).Send({}).Commit() == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(w.State() == before);
}

TEST_CASE("bytes that do not decode do not count as the end of a complete append") {
  World w;
  const std::string before = w.State();
  grpc::GenericStub stub(w.client.channel());
  grpc::CompletionQueue queue;
  const auto context = TestClient::Context();
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  const auto call = stub.PrepareCall(context.get(), "/dcp.v1.DecodeService/AppendKv", &queue);
  call->StartCall(nullptr);
  REQUIRE(next());
  for (const std::string& bytes :
       {w.Header(4, 1).SerializeAsString(), w.Chunk(0, 0, 4).SerializeAsString(),
        std::string("\x12\x7fgarbage")}) {
    const grpc::Slice slice(bytes);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    REQUIRE(next());
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  CHECK(CodeAndReason(status) == "INVALID_ARGUMENT/PROTOCOL");
  CHECK(w.State() == before);
}

TEST_CASE("while an append is open: writes are refused, reads proceed, nothing is visible") {
  World w;
  Append open(w.client);
  open.Send(w.Header(4, 1)).Send(w.Chunk(0, 0, 3));
  REQUIRE(WaitFor([&] { return w.client.Load().open_appends() == 1; }));
  v1::DecodeStepResponse response;
  CHECK(CodeAndReason(w.client.Call(w.client.Step(12, 0, {{&w.a, 3, 1}}), &response)) ==
        "ABORTED/APPEND_OPEN");
  CHECK(Append(w.client).Send(w.client.Header(w.a, 12, 3, 1, 0, 1)).Commit() ==
        "ABORTED/APPEND_OPEN");
  const std::vector<StepPart> read = {{&w.a, 2, 1}};
  CHECK(CodeAndReason(w.client.Call(w.client.Step(0, 0, read, false), &response)) == "OK");
  CHECK(w.client.Verify(0, read, response) == "");
  CHECK(CodeAndReason(w.client.Call(w.client.Step(0, 0, {{&w.a, 3, 1}}, false), &response)) ==
        "OUT_OF_RANGE/READ_RANGE");
  // The other layer is free.
  const std::vector<StepPart> other = {{&w.a, 3, 1}};
  CHECK(CodeAndReason(w.client.Call(w.client.Step(12, 1, other), &response)) == "OK");
  CHECK(w.client.Verify(1, other, response) == "");
  CHECK(open.Send(w.Chunk(0, 3, 1)).Commit() == "OK");
  CHECK(w.client.Get(w.a).layer_lengths(0) == 7);
}

TEST_CASE("silence ends an append and returns its blocks, while the client waits") {
  World w;
  const std::string before = w.State();
  Append open(w.client);
  open.Send(w.Header()).Send(w.Chunk(0, 0, 5));
  REQUIRE(WaitFor([&] { return w.client.Load().open_appends() == 1; }));
  CHECK(w.State() != before);
  // Finish without half-close: the answer comes although the server waits for a message.
  const TimePoint begin = Clock::now();
  CHECK(CodeAndReason(open.writer->Finish()) == "DEADLINE_EXCEEDED/APPEND_IDLE");
  CHECK(Clock::now() - begin < Millis{2000});
  CHECK(w.State() == before);
}

// Hidden: takes 30 s.
TEST_CASE("by default an append may be silent for 30 s", "[.long]") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  Append open(client, Millis{60000});
  open.Send(client.Header(a, 1, 0, 20, 0, 2)).Send(client.Chunk(a, 0, 0, 0, 7));
  REQUIRE(WaitFor([&] { return client.Load().open_appends() == 1; }));
  const TimePoint begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::seconds(28));
  CHECK(client.Load().open_appends() == 1);
  CHECK(client.Load().free_blocks() == config.blocks - 3);
  CHECK(CodeAndReason(open.writer->Finish()) == "DEADLINE_EXCEEDED/APPEND_IDLE");
  const auto silent = std::chrono::duration_cast<Millis>(Clock::now() - begin);
  std::cout << "the append was ended after " << silent.count() << " ms\n";
  CHECK(silent > Millis{29500});
  CHECK(silent < Millis{32000});
  CHECK(client.Load().open_appends() == 0);
  CHECK(client.Load().free_blocks() == config.blocks);
  CHECK(client.Get(a).layer_lengths(0) == 0);
}

TEST_CASE("release cancels an open append at once") {
  World w;
  Append open(w.client);
  open.Send(w.Header()).Send(w.Chunk(0, 0, 5));
  REQUIRE(WaitFor([&] { return w.client.Load().open_appends() == 1; }));
  CHECK(w.client.Release({&w.a}) == 1);
  CHECK(CodeAndReason(open.writer->Finish()) == "ABORTED/APPEND_CANCELLED");
  CHECK(w.client.Load().free_blocks() == w.config.blocks);
  CHECK(w.client.Load().open_appends() == 0);
}

TEST_CASE("cancel, deadline and a client that vanishes return every block") {
  const TestConfig config;  // silence ends an append after 30 s: not what is seen here
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const auto open = [&](Append& append) {
    append.Send(client.Header(a, 1, 0, 20, 0, 2)).Send(client.Chunk(a, 0, 0, 0, 7));
    REQUIRE(WaitFor([&] { return client.Load().open_appends() == 1; }));
    REQUIRE(client.Load().free_blocks() == config.blocks - 3);
  };
  const auto all_back = [&] {
    return WaitFor([&] {
      return client.Load().open_appends() == 0 && client.Load().free_blocks() == config.blocks;
    });
  };
  SECTION("cancel") {
    Append append(client);
    open(append);
    append.context->TryCancel();
    CHECK(CodeAndReason(append.writer->Finish()) == "CANCELLED");
    CHECK(all_back());
  }
  SECTION("deadline") {
    Append append(client, Millis{700});
    open(append);
    CHECK(CodeAndReason(append.writer->Finish()) == "DEADLINE_EXCEEDED");
    CHECK(all_back());
  }
  SECTION("the client's host is gone") {
    TcpProxy proxy(server.port());
    TestClient doomed(proxy.address(), config);
    Append append(doomed);
    open(append);
    proxy.Cut();
    CHECK(all_back());
    CHECK(CodeAndReason(append.writer->Finish()) == "UNAVAILABLE");
  }
  client.Append(a, 2, 0, 2);
}

TEST_CASE("max_open_appends") {
  World w;
  const TestSequence b = w.client.Create("b");
  const TestSequence c = w.client.Create("c");
  Append first(w.client);
  Append second(w.client);
  first.Send(w.Header());
  second.Send(w.client.Header(b, 1, 0, 4, 0, 1));
  REQUIRE(WaitFor([&] { return w.client.Load().open_appends() == 2; }));
  Append third(w.client);
  third.Send(w.client.Header(c, 1, 0, 4, 0, 1));
  const grpc::Status status = third.writer->Finish();
  CHECK(CodeAndReason(status) == "RESOURCE_EXHAUSTED/OVERLOADED");
  CHECK(ErrorOf(status).retry);
}

#if !defined(__SANITIZE_ADDRESS__)  // which keeps freed memory for a while
TEST_CASE("host memory of an open append stays under two messages") {
  // Chunks of 7 MiB, a rank that takes two seconds for the first: what the server takes from the
  // client meanwhile would show as memory.
  constexpr std::int64_t kMiB = 1 << 20;
  constexpr std::int64_t kTokens = 7 * kMiB / (2 * 576);
  constexpr int kChunks = 8;
  const TestConfig config{.layers = 1,
                          .heads = 4,
                          .kv_lora_rank = 512,
                          .rope_dim = 64,
                          .page_tokens = 64,
                          .blocks = static_cast<int>(kTokens * (kChunks + 1) / 128 + 2),
                          .server = "max_message_mib = 8\n",
                          .limits = "max_step_tokens = 64\n",
                          .rank_timeout_ms = 20000};
  const ServerProcess server(ServerOptions{
      .program = DCP_FAULTY_SERVER_PROGRAM,
      .config = config.Toml(),
      .arguments = {},
      .environment = {{"DCP_TEST_FAULT", "rank=1,phase=write,kind=delay,step=2,ms=2000"},
                      // Freed memory goes back at once, so that what is resident is in use.
                      {"MALLOC_ARENA_MAX", "1"},
                      {"MALLOC_MMAP_THRESHOLD_", "4096"},
                      {"MALLOC_TRIM_THRESHOLD_", "0"}}});
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const auto append = [&](std::uint64_t step_id, std::int64_t start, int chunks) {
    Append append(client, Millis{60000});
    append.Send(client.Header(a, step_id, start, kTokens * chunks, 0, 1));
    for (int i = 0; i < chunks; ++i) {
      append.Send(client.Chunk(a, 0, start, i * kTokens, kTokens));
    }
    return append.Commit();
  };
  // The first write, one message: buffers and the allocator's arenas are there from now on.
  REQUIRE(append(1, 0, 1) == "OK");
  const std::int64_t base = server.ResidentBytes();
  std::atomic<bool> done{false};
  std::string outcome;
  std::thread writer([&] {
    outcome = append(2, kTokens, kChunks);
    done = true;
  });
  std::int64_t peak = 0;
  const TimePoint slow_until = Clock::now() + Millis{1500};
  while (Clock::now() < slow_until) {
    peak = std::max(peak, server.ResidentBytes() - base);
    std::this_thread::sleep_for(Millis{1});
  }
  CHECK(!done);
  CHECK(peak < 2 * 7 * kMiB);
  WARN("peak above base: " << static_cast<double>(peak) / kMiB << " MiB");
  writer.join();
  CHECK(outcome == "OK");
  CHECK(client.Get(a).layer_lengths(0) == kTokens * (kChunks + 1));
}
#endif

}  // namespace
}  // namespace dcp
