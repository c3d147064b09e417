// DecodeStream: order, tags, failed items, bounds, cancellation.
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <iostream>
#include <thread>

#include "tests/integration/tcp_proxy.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

ServerOptions Delayed(const TestConfig& config, int step, int ms) {
  return {
      .program = DCP_FAULTY_SERVER_PROGRAM,
      .config = config.Toml(),
      .arguments = {},
      .environment = {{"DCP_TEST_FAULT", "rank=1,phase=attend,kind=delay,step=" +
                                             std::to_string(step) + ",ms=" + std::to_string(ms)}}};
}

bool WaitFor(const std::function<bool()>& condition, Millis timeout = Millis{5000}) {
  const TimePoint deadline = Clock::now() + timeout;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(Millis{2});
  }
  return true;
}

struct Stream {
  explicit Stream(TestClient& client)
      : context(TestClient::Context()), rpc(client.stub().DecodeStream(context.get())) {}
  void Send(v1::DecodeStepRequest request, std::uint64_t tag) {
    request.set_tag(tag);
    Expect(rpc->Write(request), "the stream takes no more");
  }
  // The next answer's tag and outcome: "7 OK", "8 ABORTED/STALE_STEP"; "end" when there is none.
  std::string Next() {
    if (!rpc->Read(&last)) return "end";
    return std::to_string(last.tag()) + " " + CodeAndReason(last.status());
  }
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeStepRequest, v1::DecodeStepResponse>> rpc;
  v1::DecodeStepResponse last;
};

TEST_CASE("answers come in the order sent, refused ones in their turn") {
  const TestConfig config;
  const ServerProcess server(Delayed(config, 1, 300));  // the first step is slow
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  Stream stream(client);
  stream.Send(client.Step(1, 0, {{&a, 0, 1}}), 11);
  auto no_query = client.Step(2, 0, {{&a, 1, 1}});
  no_query.clear_query();  // refused by the binding, at once
  stream.Send(no_query, 12);
  auto long_timeout = client.Step(2, 0, {{&a, 1, 1}});
  long_timeout.mutable_timeout()->set_seconds(100'000);  // refused by the engine, at once
  stream.Send(long_timeout, 13);
  stream.Send(client.Step(2, 0, {{&a, 5, 1}}), 14);  // refused when it is its turn
  stream.Send(client.Step(2, 0, {{&a, 1, 1}}), 15);  // judged by its position: fine
  stream.Send(client.Step(2, 0, {{&a, 1, 1}}), 0);   // a replay; 0 is a tag as any other
  stream.rpc->WritesDone();
  CHECK(stream.Next() == "11 OK");
  CHECK(client.Verify(0, {{&a, 0, 1}}, stream.last) == "");
  CHECK(stream.Next() == "12 INVALID_ARGUMENT/TENSOR_DATA");
  CHECK(stream.Next() == "13 INVALID_ARGUMENT/TIMEOUT");
  CHECK(stream.Next() == "14 OUT_OF_RANGE/POSITION_GAP");
  CHECK(stream.Next() == "15 OK");
  CHECK(client.Verify(0, {{&a, 1, 1}}, stream.last) == "");
  const std::string bytes = stream.last.output().data();
  CHECK(stream.Next() == "0 OK");
  CHECK(stream.last.output().data() == bytes);
  CHECK(stream.Next() == "end");
  CHECK(CodeAndReason(stream.rpc->Finish()) == "OK");
}

TEST_CASE("past max_inflight the server stops reading") {
  const TestConfig config{.limits = "max_inflight = 3\n"};
  const ServerProcess server(Delayed(config, 1, 500));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  Stream stream(client);
  stream.Send(client.Step(1, 0, {{&a, 0, 1}}), 0);
  std::this_thread::sleep_for(Millis{100});  // it is no longer in the queue
  for (int i = 1; i < 20; ++i) stream.Send(client.Step(i + 1, 0, {{&a, i, 1}}), i);
  stream.rpc->WritesDone();
  int most = 0;
  while (client.Load().steps() == 0) most = std::max(most, client.Load().queued());
  CHECK(most == 2);  // one runs, two wait, 17 are unread
  for (int i = 0; i < 20; ++i) CHECK(stream.Next() == std::to_string(i) + " OK");
  CHECK(stream.Next() == "end");
  CHECK(stream.rpc->Finish().ok());
}

TEST_CASE("a full queue: items are refused in their turn, unary calls at once") {
  const TestConfig config{.limits = "max_queue = 2\nmax_inflight = 8\n"};
  const ServerProcess server(Delayed(config, 1, 1000));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  Stream stream(client);
  stream.Send(client.Step(1, 0, {{&a, 0, 1}}), 0);
  std::this_thread::sleep_for(Millis{100});  // it is no longer in the queue
  for (int i = 1; i < 5; ++i) stream.Send(client.Step(i + 1, 0, {{&a, i, 1}}), i);
  REQUIRE(WaitFor([&] { return client.Load().queued() == 2; }));
  const TimePoint begin = Clock::now();
  v1::DecodeStepResponse response;
  const grpc::Status unary = client.Call(client.Step(0, 0, {{&a, 0, 1}}, false), &response);
  CHECK(Clock::now() - begin < Millis{500});
  CHECK(client.Load().steps() == 0);  // the slow one still runs
  CHECK(CodeAndReason(unary) == "RESOURCE_EXHAUSTED/OVERLOADED");
  CHECK(ErrorOf(unary).retry);
  stream.rpc->WritesDone();
  CHECK(stream.Next() == "0 OK");
  CHECK(stream.Next() == "1 OK");
  CHECK(stream.Next() == "2 OK");
  CHECK(stream.Next() == "3 RESOURCE_EXHAUSTED/OVERLOADED");
  CHECK(ErrorOf(stream.last.status()).retry);
  CHECK(stream.Next() == "4 RESOURCE_EXHAUSTED/OVERLOADED");
  CHECK(stream.Next() == "end");
  CHECK(stream.rpc->Finish().ok());
  CHECK(client.Get(a).layer_lengths(0) == 3);
}

TEST_CASE("a step's timeout counts while it waits") {
  const TestConfig config;
  const ServerProcess server(Delayed(config, 1, 400));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  Stream stream(client);
  stream.Send(client.Step(1, 0, {{&a, 0, 1}}), 1);
  auto hasty = client.Step(2, 0, {{&a, 1, 1}});
  hasty.mutable_timeout()->set_nanos(50'000'000);
  stream.Send(hasty, 2);
  stream.rpc->WritesDone();
  CHECK(stream.Next() == "1 OK");
  CHECK(stream.Next() == "2 DEADLINE_EXCEEDED/STEP_DEADLINE");
  CHECK(stream.Next() == "end");
  CHECK(client.Get(a).layer_lengths(0) == 1);
}

TEST_CASE("cancelled calls: what has not been launched is dropped, what has finishes") {
  const TestConfig config;
  const ServerProcess server(Delayed(config, 1, 600));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const TestSequence b = client.Create("b");
  {
    Stream stream(client);
    for (int i = 0; i < 4; ++i) stream.Send(client.Step(i + 1, 0, {{&a, i, 1}}), i);
    REQUIRE(WaitFor([&] { return client.Load().queued() == 3; }));
    // A unary step behind them, given up by its client.
    const auto context = TestClient::Context(Millis{100});
    v1::DecodeStepResponse response;
    CHECK(client.stub()
              .DecodeStep(context.get(), client.Step(1, 0, {{&b, 0, 1}}), &response)
              .error_code() == grpc::DEADLINE_EXCEEDED);
    stream.context->TryCancel();
    CHECK(CodeAndReason(stream.rpc->Finish()) == "CANCELLED");
  }
  CHECK(client.Get(a).layer_lengths(0) == 1);  // queued behind all of them
  CHECK(client.Get(b).layer_lengths(0) == 0);
  CHECK(client.Load().queued() == 0);
}

TEST_CASE("a client that vanishes in mid-stream") {
  const TestConfig config;
  const ServerProcess server(Delayed(config, 1, 600));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  {
    TcpProxy proxy(server.port());
    TestClient doomed(proxy.address(), config);
    Stream stream(doomed);
    for (int i = 0; i < 4; ++i) stream.Send(doomed.Step(i + 1, 0, {{&a, i, 1}}), i);
    REQUIRE(WaitFor([&] { return client.Load().queued() == 3; }));
    proxy.Cut();
    CHECK(stream.Next() == "end");
    CHECK(CodeAndReason(stream.rpc->Finish()) == "UNAVAILABLE");
  }
  CHECK(client.Get(a).layer_lengths(0) == 1);
  v1::DecodeStepResponse response;
  CHECK(client.Call(client.Step(9, 0, {{&a, 1, 1}}), &response).ok());
}

TEST_CASE("a client that does not read stops its own stream and no other") {
  // Answers of 4 KiB: what the transport buffers is used up soon.
  const TestConfig config{.blocks = 600, .limits = "max_inflight = 4\nmax_context = 4096\n"};
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const TestSequence b = client.Create("b");
  client.Append(a, 1, 0, 8);
  constexpr int kItems = 3000;
  Stream slow(client);
  const auto read = client.Step(0, 0, {{&a, 0, 4}}, false);
  std::thread writer([&] {
    for (int i = 0; i < kItems; ++i) {
      auto item = read;
      item.set_tag(static_cast<std::uint64_t>(i));
      slow.rpc->Write(item);
    }
    slow.rpc->WritesDone();
  });
  // Until nothing moves any more.
  std::int64_t steps = -1;
  while (steps != client.Load().steps()) {
    steps = client.Load().steps();
    std::this_thread::sleep_for(Millis{300});
  }
  const bool stopped = steps < kItems;
  for (int i = 0; i < 50; ++i) client.Append(b, i + 1, i, 1);
  int in_order = 0;
  while (slow.Next() == std::to_string(in_order) + " OK") ++in_order;
  writer.join();
  CHECK(stopped);
  CHECK(in_order == kItems);
  CHECK(slow.rpc->Finish().ok());
}

TEST_CASE("bytes that do not decode end the stream after the answers it owes") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  grpc::GenericStub stub(client.channel());
  grpc::CompletionQueue queue;
  const auto context = TestClient::Context();
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  const auto call = stub.PrepareCall(context.get(), "/dcp.v1.DecodeService/DecodeStream", &queue);
  call->StartCall(nullptr);
  REQUIRE(next());
  const auto send = [&](const std::string& bytes) {
    const grpc::Slice slice(bytes);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    REQUIRE(next());
  };
  send(client.Step(1, 0, {{&a, 0, 1}}).SerializeAsString());
  send("\x0a\x7fgarbage");
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  REQUIRE(next());
  v1::DecodeStepResponse response;
  REQUIRE(grpc::SerializationTraits<v1::DecodeStepResponse>::Deserialize(&answer, &response).ok());
  CHECK(client.Verify(0, {{&a, 0, 1}}, response) == "");
  call->Read(&answer, nullptr);
  CHECK(!next());
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  CHECK(CodeAndReason(status) == "INVALID_ARGUMENT/PROTOCOL");
}

TEST_CASE("many streams at once, each in its own order") {
  const TestConfig config{.blocks = 200};
  const ServerProcess server(config);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  const auto run = [&](int t) {
    TestClient client(server.address(), config);
    const TestSequence s = client.Create("s" + std::to_string(t));
    Stream stream(client);
    for (int i = 0; i < 40; ++i) {
      stream.Send(client.Step(i + 1, 0, {{&s, i, 1}}), i);
      if (i % 8 != 7) continue;
      for (int j = i - 7; j <= i; ++j) {
        if (stream.Next() == std::to_string(j) + " OK" &&
            client.Verify(0, {{&s, j, 1}}, stream.last).empty()) {
          ++right;
        }
      }
    }
    stream.rpc->WritesDone();
    if (stream.rpc->Finish().ok()) ++right;
  };
  threads.reserve(16);
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      try {
        run(t);
      } catch (const std::exception& e) {
        std::cerr << "client " << t << ": " << e.what() << '\n';  // and `right` is too small
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(right == 16 * 41);
}

}  // namespace
}  // namespace dcp
