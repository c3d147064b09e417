// A rank that fails and a rank that does not come back, seen from outside.
#include <signal.h>

#include <catch2/catch.hpp>
#include <thread>

#include "tests/integration/health_client.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

constexpr const char* kService = "dcp.v1.DecodeService";

ServerOptions Faulty(const TestConfig& config, const std::string& fault) {
  return {.program = DCP_FAULTY_SERVER_PROGRAM,
          .config = config.Toml(),
          .arguments = {},
          .environment = {{"DCP_TEST_FAULT", fault}}};
}

TEST_CASE("a rank fails: the step answers RANK_FAILED, the group is rebuilt, sequences live on") {
  const std::string phase = GENERATE("write", "attend", "exchange", "merge");
  CAPTURE(phase);
  const TestConfig config;
  ServerProcess server(Faulty(config, "rank=1,phase=" + phase + ",kind=fail,step=3"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  client.Append(a, 1, 0, 3);  // the first two entries into the phase: a layer each
  const std::uint64_t epoch = client.Info().epoch();
  const std::int64_t free_blocks = client.Load().free_blocks();

  const v1::DecodeStepRequest step = client.Step(2, 0, {{&a, 3, 2}});
  v1::DecodeStepResponse response;
  const grpc::Status failed = client.Call(step, &response);
  CHECK(CodeAndReason(failed) == "ABORTED/RANK_FAILED");
  CHECK_THAT(ErrorOf(failed).message, Catch::Contains("rank 1") && Catch::Contains(phase));
  CHECK(client.Get(a).layer_lengths(0) == 3);
  CHECK(client.Load().free_blocks() == free_blocks);
  CHECK(client.Load().rank_failures() == 1);
  CHECK(client.Info().epoch() != epoch);
  CHECK(CheckHealth(client.channel(), kService) == ServingStatus::kServing);

  // The same step again, under the new epoch.
  CHECK(CodeAndReason(client.Call(step, &response)) == "OK");
  CHECK(client.Verify(0, {{&a, 3, 2}}, response) == "");
  v1::DecodeStepRequest old_epoch = client.Step(3, 0, {{&a, 5, 1}});
  old_epoch.set_expected_epoch(epoch);
  CHECK(CodeAndReason(client.Call(old_epoch, &response)) == "ABORTED/EPOCH_CHANGED");
  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{5000}) == 0);
}

TEST_CASE("a failed item of a stream does not end it") {
  const TestConfig config;
  const ServerProcess server(Faulty(config, "rank=0,phase=exchange,kind=fail,step=2"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const auto context = TestClient::Context();
  const auto stream = client.stub().DecodeStream(context.get());
  for (int i = 0; i < 3; ++i) {
    auto item = client.Step(i + 1, 0, {{&a, i == 2 ? 1 : i, 1}});
    item.set_tag(i);
    stream->Write(item);
  }
  stream->WritesDone();
  v1::DecodeStepResponse response;
  REQUIRE(stream->Read(&response));
  CHECK(client.Verify(0, {{&a, 0, 1}}, response) == "");
  REQUIRE(stream->Read(&response));
  CHECK(response.tag() == 1);
  CHECK(CodeAndReason(response.status()) == "ABORTED/RANK_FAILED");
  REQUIRE(stream->Read(&response));
  CHECK(client.Verify(0, {{&a, 1, 1}}, response) == "");
  CHECK(stream->Finish().ok());
}

TEST_CASE("a rank does not come back: NOT_SERVING, RANKS_DOWN, exit 70") {
  const TestConfig config{.rank_timeout_ms = 400};
  ServerProcess server(Faulty(config, "rank=1,phase=attend,kind=stall,step=3"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  client.Append(a, 1, 0, 3);
  const auto append_context = TestClient::Context();
  v1::AppendKvResponse appended;
  const auto open = client.stub().AppendKv(append_context.get(), &appended);
  open->Write(client.Header(a, 2, 3, 4, 1, 1));
  while (client.Load().open_appends() == 0) std::this_thread::sleep_for(Millis{2});

  v1::DecodeStepResponse response;
  TimePoint begin = Clock::now();
  const grpc::Status failed = client.Call(client.Step(2, 0, {{&a, 3, 1}}), &response);
  CHECK(CodeAndReason(failed) == "ABORTED/RANK_FAILED");
  CHECK_THAT(ErrorOf(failed).message, Catch::Contains("rank 1") && Catch::Contains("attend"));
  CHECK(Clock::now() - begin < Millis{3000});
  CHECK_THAT(CodeAndReason(open->Finish()),
             Catch::Contains("RANKS_DOWN") || Catch::Contains("RANK_FAILED"));

  begin = Clock::now();
  while (CheckHealth(client.channel(), kService) == ServingStatus::kServing) {
    REQUIRE(Clock::now() - begin < Millis{5000});
    std::this_thread::sleep_for(Millis{10});
  }
  CHECK(CheckHealth(client.channel(), kService) == ServingStatus::kNotServing);
  CHECK(CheckHealth(client.channel(), "") == ServingStatus::kNotServing);
  begin = Clock::now();
  CHECK(CodeAndReason(client.Call(client.Step(2, 0, {{&a, 3, 1}}), &response)) ==
        "UNAVAILABLE/RANKS_DOWN");
  v1::GetSequenceRequest get;
  get.set_sequence_id("a");
  v1::GetSequenceResponse got;
  CHECK(CodeAndReason(client.stub().GetSequence(TestClient::Context().get(), get, &got)) ==
        "UNAVAILABLE/RANKS_DOWN");
  CHECK(Clock::now() - begin < Millis{1000});
  client.Load();  // still tells how things are
  client.Info();

  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{10000}) == 70);
}

}  // namespace
}  // namespace dcp
