// Every class of bad input through gRPC: its code, its reason, and a server whose state is what it
// was.
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <limits>
#include <random>

#include "base/status.h"
#include "tests/integration/tcp_proxy.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TestConfig Config() {
  return {.server = "max_message_mib = 1\n",
          .limits =
              "max_sequences = 4\nmax_context = 64\nmax_batch = 3\nmax_query_tokens = 4\n"
              "max_step_tokens = 8\nmax_step_timeout_ms = 60000\n"};
}

// A server with two sequences of 6 and 5 tokens.
struct World {
  TestConfig config = Config();
  ServerProcess server{config};
  TestClient client{server.address(), config};
  TestSequence a = client.Create("a");
  TestSequence b = client.Create("b");

  World() {
    client.Append(a, 10, 0, 4);
    client.Append(a, 11, 4, 2);
    client.Append(b, 10, 0, 4);
    client.Append(b, 11, 4, 1);
  }

  // Everything that a refused request must not change.
  std::string State() {
    v1::ListSequencesResponse list;
    REQUIRE(client.stub().ListSequences(TestClient::Context().get(), {}, &list).ok());
    const v1::GetLoadResponse load = client.Load();
    return list.DebugString() + std::to_string(load.free_blocks()) + " free, " +
           std::to_string(load.open_appends()) + " appends";
  }

  // What the server answers, unary and as an item of a stream; both leave the state as it was.
  RpcError Refused(const v1::DecodeStepRequest& request) {
    const std::string before = State();
    v1::DecodeStepResponse response;
    RpcError unary = ErrorOf(client.Call(request, &response));
    CHECK(State() == before);

    const auto context = TestClient::Context();
    const auto stream = client.stub().DecodeStream(context.get());
    v1::DecodeStepRequest item = request;
    item.set_tag(5);
    stream->Write(item);
    stream->WritesDone();
    REQUIRE(stream->Read(&response));
    CHECK(response.tag() == 5);
    CHECK(!response.has_output());
    const RpcError streamed = ErrorOf(response.status());
    CHECK(!stream->Read(&response));
    CHECK(stream->Finish().ok());
    CHECK(streamed.code == unary.code);
    CHECK(streamed.reason == unary.reason);
    CHECK(streamed.metadata == unary.metadata);
    CHECK(State() == before);
    return unary;
  }
  std::string RefusedAs(const v1::DecodeStepRequest& request) {
    const RpcError error = Refused(request);
    CHECK(!error.message.empty());
    return std::string(CodeName(static_cast<StatusCode>(error.code))) + "/" + error.reason;
  }

  // A valid step that appends to both.
  v1::DecodeStepRequest Valid() const { return client.Step(12, 0, {{&a, 6, 1}, {&b, 5, 2}}); }
};

void SetShape(v1::Tensor* tensor, std::initializer_list<std::int64_t> shape) {
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
}

TEST_CASE("steps on sequences that are not there, or twice") {
  World w;
  auto step = w.Valid();
  step.mutable_entries(1)->mutable_sequence()->set_sequence_id("nobody");
  CHECK(w.RefusedAs(step) == "NOT_FOUND/SEQUENCE_NOT_FOUND");
  step = w.Valid();
  step.mutable_entries(0)->mutable_sequence()->set_generation(1);
  CHECK(w.RefusedAs(step) == "NOT_FOUND/SEQUENCE_GENERATION");
  CHECK(w.RefusedAs(w.client.Step(12, 0, {{&w.a, 6, 1}, {&w.a, 6, 1}})) ==
        "INVALID_ARGUMENT/DUPLICATE_SEQUENCE");
  // The valid one is valid.
  v1::DecodeStepResponse response;
  CHECK(CodeAndReason(w.client.Call(w.Valid(), &response)) == "OK");
}

TEST_CASE("tensors: dtype, rank, dims, byte size") {
  World w;
  const auto with = [&](auto change) {
    auto step = w.Valid();
    change(step);
    return w.RefusedAs(step);
  };
  using Step = v1::DecodeStepRequest;
  CHECK(with([](Step& s) { s.mutable_query()->set_dtype(v1::DATA_TYPE_FP32); }) ==
        "INVALID_ARGUMENT/DTYPE");
  CHECK(with([](Step& s) { s.mutable_query()->set_dtype(v1::DATA_TYPE_UNSPECIFIED); }) ==
        "INVALID_ARGUMENT/DTYPE");
  CHECK(with([](Step& s) { s.mutable_new_kv()->set_dtype(static_cast<v1::DataType>(9)); }) ==
        "INVALID_ARGUMENT/DTYPE");
  CHECK(with([](Step& s) { s.clear_output_dtype(); }) == "INVALID_ARGUMENT/DTYPE");
  CHECK(with([](Step& s) { s.clear_query(); }) == "INVALID_ARGUMENT/TENSOR_DATA");
  CHECK(with([](Step& s) { s.mutable_query()->clear_data(); }) == "INVALID_ARGUMENT/TENSOR_DATA");
  CHECK(with([](Step& s) { s.mutable_new_kv()->clear_data(); }) == "INVALID_ARGUMENT/TENSOR_DATA");

  CHECK(with([](Step& s) { s.mutable_query()->clear_shape(); }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) {
          SetShape(s.mutable_query(), {3, 4 * 80});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) {
          SetShape(s.mutable_query(), {3, 4, 80, 1});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) { SetShape(s.mutable_query(), {3, 8, 40}); }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) {
          SetShape(s.mutable_query(), {-3, 4, 80});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) { SetShape(s.mutable_query(), {3, 0, 80}); }) == "INVALID_ARGUMENT/SHAPE");
  // 2^33 * 2^33 * ... would wrap to a small product in 64 bits.
  CHECK(with([](Step& s) {
          SetShape(s.mutable_query(), {1LL << 33, 1LL << 33, 80});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) {
          SetShape(s.mutable_query(), {kHuge, kHuge, kHuge});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) {
          SetShape(s.mutable_new_kv(), {kHuge, 80});
        }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) { SetShape(s.mutable_new_kv(), {3, 79}); }) == "INVALID_ARGUMENT/SHAPE");
  CHECK(with([](Step& s) { SetShape(s.mutable_new_kv(), {-1, -80}); }) == "INVALID_ARGUMENT/SHAPE");

  CHECK(with([](Step& s) { s.mutable_query()->mutable_data()->pop_back(); }) ==
        "INVALID_ARGUMENT/BYTE_SIZE");
  CHECK(with([](Step& s) { s.mutable_query()->mutable_data()->append("xx"); }) ==
        "INVALID_ARGUMENT/BYTE_SIZE");
  CHECK(with([](Step& s) { s.mutable_new_kv()->set_data(""); }) == "INVALID_ARGUMENT/BYTE_SIZE");
}

TEST_CASE("numbers out of range: layer, batch, counts, step id, positions, timeout, lse base") {
  World w;
  const auto with = [&](auto change) {
    auto step = w.Valid();
    change(step);
    return w.RefusedAs(step);
  };
  using Step = v1::DecodeStepRequest;
  CHECK(with([](Step& s) { s.set_layer(2); }) == "INVALID_ARGUMENT/LAYER");
  CHECK(with([](Step& s) { s.set_layer(-1); }) == "INVALID_ARGUMENT/LAYER");
  CHECK(with([](Step& s) { s.set_layer(std::numeric_limits<int>::max()); }) ==
        "INVALID_ARGUMENT/LAYER");
  CHECK(with([](Step& s) { s.clear_entries(); }) == "INVALID_ARGUMENT/BATCH_SIZE");
  CHECK(with([](Step& s) {
          for (int i = 0; i < 2; ++i) *s.add_entries() = s.entries(0);
        }) == "INVALID_ARGUMENT/BATCH_SIZE");
  for (const int count :
       {0, -1, 5, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    CAPTURE(count);
    CHECK(with([count](Step& s) { s.mutable_entries(1)->set_count(count); }) ==
          "INVALID_ARGUMENT/TOKEN_COUNT");
  }
  // Each entry within its limit, all together over max_step_tokens = 8.
  const TestSequence c = w.client.Create("c");
  CHECK(w.RefusedAs(w.client.Step(12, 0, {{&w.a, 6, 4}, {&w.b, 5, 4}, {&c, 0, 1}})) ==
        "INVALID_ARGUMENT/TOKEN_COUNT");
  CHECK(with([](Step& s) { s.set_step_id(0); }) == "INVALID_ARGUMENT/STEP_ID");
  CHECK(with([](Step& s) { s.mutable_entries(0)->set_start(-1); }) == "INVALID_ARGUMENT/POSITION");
  CHECK(with([](Step& s) {
          s.mutable_entries(0)->set_start(std::numeric_limits<std::int64_t>::min());
        }) == "INVALID_ARGUMENT/POSITION");
  CHECK(with([](Step& s) { s.clear_lse_base(); }) == "INVALID_ARGUMENT/LSE_BASE");
  CHECK(with([](Step& s) { s.set_lse_base(static_cast<v1::LseBase>(3)); }) ==
        "INVALID_ARGUMENT/LSE_BASE");
  CHECK(with([](Step& s) { s.mutable_timeout(); }) == "INVALID_ARGUMENT/TIMEOUT");
  CHECK(with([](Step& s) { s.mutable_timeout()->set_seconds(-1); }) == "INVALID_ARGUMENT/TIMEOUT");
  CHECK(with([](Step& s) { s.mutable_timeout()->set_seconds(61); }) == "INVALID_ARGUMENT/TIMEOUT");
  CHECK(with([](Step& s) { s.mutable_timeout()->set_seconds(kHuge); }) ==
        "INVALID_ARGUMENT/TIMEOUT");
}

TEST_CASE("steps that do not fit the sequence's state") {
  World w;
  const auto metadata = [&](const v1::DecodeStepRequest& step) { return w.Refused(step).metadata; };
  const auto gap = w.client.Step(12, 0, {{&w.a, 6, 1}, {&w.b, 6, 1}});
  CHECK(w.RefusedAs(gap) == "OUT_OF_RANGE/POSITION_GAP");
  CHECK(metadata(gap)["actual_length"] == "5");
  auto far = w.client.Step(12, 0, {{&w.a, 6, 1}});
  far.mutable_entries(0)->set_start(kHuge);
  CHECK(w.RefusedAs(far) == "OUT_OF_RANGE/POSITION_GAP");
  const auto conflict = w.client.Step(12, 0, {{&w.a, 6, 1}, {&w.b, 4, 1}});
  CHECK(w.RefusedAs(conflict) == "ABORTED/LENGTH_CONFLICT");
  CHECK(metadata(conflict)["actual_length"] == "5");
  CHECK(w.RefusedAs(w.client.Step(10, 0, {{&w.a, 6, 1}})) == "ABORTED/STALE_STEP");
  CHECK(w.RefusedAs(w.client.Step(11, 0, {{&w.a, 4, 1}})) == "ABORTED/REPLAY_MISMATCH");
  auto mismatch = w.client.Step(11, 0, {{&w.a, 4, 2}});
  (*mismatch.mutable_new_kv()->mutable_data())[7] ^= 1;
  CHECK(w.RefusedAs(mismatch) == "ABORTED/REPLAY_MISMATCH");
  CHECK(w.RefusedAs(w.client.Step(0, 0, {{&w.a, 5, 2}}, false)) == "OUT_OF_RANGE/READ_RANGE");
  far = w.client.Step(0, 0, {{&w.a, 2, 4}}, false);
  far.mutable_entries(0)->set_start(kHuge);
  CHECK(w.RefusedAs(far) == "OUT_OF_RANGE/READ_RANGE");
  auto epoch = w.Valid();
  epoch.set_expected_epoch(w.client.Info().epoch() + 1);
  CHECK(w.RefusedAs(epoch) == "ABORTED/EPOCH_CHANGED");
}

TEST_CASE("the context limit") {
  World w;
  for (int i = 0; i < 14; ++i) w.client.Append(w.a, 20 + i, 6 + 4 * i, 4);  // to 62 of 64
  CHECK(w.RefusedAs(w.client.Step(50, 0, {{&w.a, 62, 3}, {&w.b, 5, 1}})) ==
        "OUT_OF_RANGE/CONTEXT_LIMIT");
  w.client.Append(w.a, 50, 62, 2);
}

TEST_CASE("the pool exhausted in the middle of a batch: nothing applied, all blocks back") {
  TestConfig config;
  config.blocks = 4;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  std::vector<TestSequence> s;
  for (const char* id : {"a", "b", "c"}) {
    s.push_back(client.Create(id));
    client.Append(s.back(), 1, 0, 8);  // a block each: the next token needs another
  }
  REQUIRE(client.Load().free_blocks() == 1);
  v1::DecodeStepResponse response;
  const grpc::Status status =
      client.Call(client.Step(2, 0, {{&s[0], 8, 1}, {&s[1], 8, 1}, {&s[2], 8, 1}}), &response);
  CHECK(CodeAndReason(status) == "RESOURCE_EXHAUSTED/KV_CAPACITY");
  CHECK(ErrorOf(status).retry);
  CHECK(client.Load().free_blocks() == 1);
  for (const TestSequence& sequence : s) CHECK(client.Get(sequence).layer_lengths(0) == 8);
  client.Append(s[1], 2, 8, 1);  // one fits
  CHECK(client.Load().free_blocks() == 0);
}

TEST_CASE("sequences: ids, request ids, geometry, leases, limits") {
  World w;
  v1::CreateSequenceRequest good;
  good.set_sequence_id("new");
  good.set_request_id("r");
  good.set_softmax_scale(w.config.softmax_scale);
  const auto create = [&](auto change) {
    v1::CreateSequenceRequest request = good;
    change(request);
    const std::string before = w.State();
    v1::CreateSequenceResponse response;
    std::string got = CodeAndReason(
        w.client.stub().CreateSequence(TestClient::Context().get(), request, &response));
    CHECK(w.State() == before);
    return got;
  };
  using Create = v1::CreateSequenceRequest;
  CHECK(create([](Create& r) { r.set_sequence_id(""); }) == "INVALID_ARGUMENT/SEQUENCE_ID");
  CHECK(create([](Create& r) { r.set_sequence_id("sp ace"); }) == "INVALID_ARGUMENT/SEQUENCE_ID");
  CHECK(create([](Create& r) { r.set_sequence_id(std::string(129, 'a')); }) ==
        "INVALID_ARGUMENT/SEQUENCE_ID");
  // Far more than fits into the trailers of an answer.
  CHECK(create([](Create& r) { r.set_sequence_id(std::string(100'000, '!')); }) ==
        "INVALID_ARGUMENT/SEQUENCE_ID");
  CHECK(create([](Create& r) { r.clear_request_id(); }) == "INVALID_ARGUMENT/REQUEST_ID");
  CHECK(create([](Create& r) { r.set_request_id("\n"); }) == "INVALID_ARGUMENT/REQUEST_ID");
  CHECK(create([](Create& r) { r.set_softmax_scale(0.21); }) == "FAILED_PRECONDITION/GEOMETRY");
  CHECK(create([](Create& r) { r.mutable_lease()->set_nanos(1); }) == "INVALID_ARGUMENT/LEASE");
  CHECK(create([](Create& r) { r.mutable_lease()->set_seconds(-1); }) == "INVALID_ARGUMENT/LEASE");
  CHECK(create([](Create& r) { r.mutable_lease()->set_seconds(kHuge); }) ==
        "INVALID_ARGUMENT/LEASE");
  CHECK(create([](Create& r) { r.set_sequence_id("a"); }) == "ALREADY_EXISTS/SEQUENCE_EXISTS");
  CHECK(create([](Create& r) { r.set_expected_epoch(1); }) == "ABORTED/EPOCH_CHANGED");

  const auto fork = [&](std::int64_t at, std::uint64_t generation) {
    const std::string before = w.State();
    v1::ForkSequenceRequest request;
    request.mutable_parent()->set_sequence_id("a");
    request.mutable_parent()->set_generation(generation);
    request.set_sequence_id("child");
    request.set_request_id("r");
    request.set_at_length(at);
    v1::ForkSequenceResponse response;
    std::string got = CodeAndReason(
        w.client.stub().ForkSequence(TestClient::Context().get(), request, &response));
    CHECK(w.State() == before);
    return got;
  };
  const std::uint64_t generation = w.a.ref.generation();
  CHECK(fork(7, generation) == "FAILED_PRECONDITION/INCOMPLETE_TOKEN");
  CHECK(fork(-1, generation) == "INVALID_ARGUMENT/POSITION");
  CHECK(fork(3, 1) == "NOT_FOUND/SEQUENCE_GENERATION");

  const auto truncate = [&](std::uint64_t step_id, std::int64_t to) {
    const std::string before = w.State();
    v1::TruncateSequenceRequest request;
    *request.mutable_sequence() = w.a.ref;
    request.set_step_id(step_id);
    request.set_to_length(to);
    v1::TruncateSequenceResponse response;
    std::string got = CodeAndReason(
        w.client.stub().TruncateSequence(TestClient::Context().get(), request, &response));
    CHECK(w.State() == before);
    return got;
  };
  CHECK(truncate(0, 3) == "INVALID_ARGUMENT/STEP_ID");
  CHECK(truncate(12, -1) == "INVALID_ARGUMENT/POSITION");
  CHECK(truncate(10, 3) == "ABORTED/STALE_STEP");
  CHECK(truncate(11, 3) == "ABORTED/REPLAY_MISMATCH");

  v1::ListSequencesRequest list;
  v1::ListSequencesResponse listed;
  list.set_page_size(-1);
  CHECK(CodeAndReason(w.client.stub().ListSequences(TestClient::Context().get(), list, &listed)) ==
        "INVALID_ARGUMENT/PAGE");
  list.set_page_size(1001);
  CHECK(CodeAndReason(w.client.stub().ListSequences(TestClient::Context().get(), list, &listed)) ==
        "INVALID_ARGUMENT/PAGE");

  v1::GetSequenceRequest get;
  v1::GetSequenceResponse got;
  get.set_sequence_id("nobody");
  CHECK(CodeAndReason(w.client.stub().GetSequence(TestClient::Context().get(), get, &got)) ==
        "NOT_FOUND/SEQUENCE_NOT_FOUND");

  // Releasing an old generation is OK and does nothing.
  v1::ReleaseSequencesRequest release;
  release.add_sequences()->set_sequence_id("nobody");
  *release.add_sequences() = w.a.ref;
  release.mutable_sequences(1)->set_generation(1);
  v1::ReleaseSequencesResponse released;
  CHECK(w.client.stub().ReleaseSequences(TestClient::Context().get(), release, &released).ok());
  CHECK(released.released() == 0);

  w.client.Create("c");
  w.client.Create("d");
  v1::CreateSequenceResponse response;
  const grpc::Status full =
      w.client.stub().CreateSequence(TestClient::Context().get(), good, &response);
  CHECK(CodeAndReason(full) == "RESOURCE_EXHAUSTED/SEQUENCE_LIMIT");
  CHECK(ErrorOf(full).retry);
}

TEST_CASE("messages over the limit: gRPC's answer, an untouched server") {
  World w;
  const std::string before = w.State();
  auto step = w.Valid();
  step.mutable_query()->mutable_data()->resize(2 << 20);
  v1::DecodeStepResponse response;
  grpc::Status status = w.client.Call(step, &response);
  CHECK(CodeAndReason(status) == "RESOURCE_EXHAUSTED");
  CHECK(w.State() == before);

  const auto context = TestClient::Context();
  const auto stream = w.client.stub().DecodeStream(context.get());
  stream->Write(step);
  stream->WritesDone();
  CHECK(!stream->Read(&response));
  status = stream->Finish();
  CHECK(CodeAndReason(status) == "RESOURCE_EXHAUSTED");
  CHECK(w.State() == before);

  // In an append that would be complete without it.
  const auto append_context = TestClient::Context();
  v1::AppendKvResponse appended;
  const auto writer = w.client.stub().AppendKv(append_context.get(), &appended);
  writer->Write(w.client.Header(w.a, 12, 6, 2, 0, 1));
  writer->Write(w.client.Chunk(w.a, 0, 6, 0, 2));
  auto chunk = w.client.Chunk(w.a, 0, 6, 0, 2);
  chunk.mutable_chunk()->mutable_latents()->mutable_data()->resize(2 << 20);
  writer->Write(chunk);
  writer->WritesDone();
  CHECK(CodeAndReason(writer->Finish()) == "RESOURCE_EXHAUSTED");
  CHECK(w.State() == before);
}

TEST_CASE("compressed messages are refused before anything is decompressed") {
  World w;
  const std::string before = w.State();
  // Zeros: a thousandth of it on the wire, and more than a server takes when it is unpacked.
  auto step = w.Valid();
  step.mutable_query()->mutable_data()->resize(32 << 20);
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    v1::DecodeStepResponse response;
    const auto context = TestClient::Context();
    context->set_compression_algorithm(algorithm);
    const grpc::Status status = w.client.stub().DecodeStep(context.get(), step, &response);
    CHECK(CodeAndReason(status) == "UNIMPLEMENTED");
    const auto stream_context = TestClient::Context();
    stream_context->set_compression_algorithm(algorithm);
    const auto stream = w.client.stub().DecodeStream(stream_context.get());
    stream->Write(step);
    stream->WritesDone();
    CHECK(!stream->Read(&response));
    CHECK(CodeAndReason(stream->Finish()) == "UNIMPLEMENTED");
    CHECK(w.State() == before);
  }
}

// A unary call with arbitrary bytes as its request.
grpc::Status CallWithBytes(TestClient& client, const std::string& method,
                           const std::string& bytes) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(client.channel());
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::CompletionQueue queue;
  const auto context = TestClient::Context();
  const auto call = stub.PrepareUnaryCall(context.get(), method, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

TEST_CASE("bytes that do not decode, and methods that do not exist") {
  World w;
  const std::string before = w.State();
  const std::string service = "/dcp.v1.DecodeService/";
  std::mt19937_64 random(1);
  for (const char* method :
       {"GetServerInfo", "CreateSequence", "ForkSequence", "TruncateSequence", "ReleaseSequences",
        "GetSequence", "ListSequences", "GetLoad", "DecodeStep"}) {
    CAPTURE(method);
    // Field 1, length-delimited, longer than what follows.
    const grpc::Status status = CallWithBytes(w.client, service + method, "\x0a\x7fgarbage");
    CHECK(!status.ok());
    CHECK(ErrorOf(status).reason.empty());
    for (int i = 0; i < 20; ++i) {
      std::string bytes(random() % 64, '\0');
      for (char& c : bytes) c = static_cast<char>(random());
      static_cast<void>(CallWithBytes(w.client, service + method, bytes));
    }
  }
  CHECK(CodeAndReason(CallWithBytes(w.client, service + "Nothing", "")) == "UNIMPLEMENTED");
  CHECK(CodeAndReason(CallWithBytes(w.client, "/dcp.v2.Nothing/Nothing", "")) == "UNIMPLEMENTED");
  CHECK(w.State() == before);
}

TEST_CASE("garbage on the port") {
  World w;
  const std::string before = w.State();
  std::mt19937_64 random(2);
  for (int i = 0; i < 30; ++i) {
    std::string bytes;
    if (i == 0) {
      bytes = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    } else if (i == 1) {
      bytes = std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);  // TLS
    } else {
      if (i % 2 == 0) bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
      const std::size_t n = random() % 4000;
      for (std::size_t j = 0; j < n; ++j) bytes.push_back(static_cast<char>(random()));
    }
    const int fd = ConnectTo(w.server.port());
    send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  CHECK(w.State() == before);
  w.client.Append(w.a, 12, 6, 1);
  CHECK(w.server.Runs());
}

}  // namespace
}  // namespace dcp
