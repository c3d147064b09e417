// Start and end of the program: flags, bad configurations, ports in use, signals.
#include <signal.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/integration/health_client.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

using Catch::Contains;

ServerOptions Faulty(const TestConfig& config, const std::string& fault) {
  return {.program = DCP_FAULTY_SERVER_PROGRAM,
          .config = config.Toml(),
          .arguments = {},
          .environment = {{"DCP_TEST_FAULT", fault}}};
}

// A step on its own thread, which a fault keeps in flight.
struct StepInFlight {
  StepInFlight(TestClient& client, const TestSequence& sequence)
      : thread([&client, this, request = client.Step(1, 0, {{&sequence, 0, 1}})] {
          status = client.Call(request, &response);
        }) {
    std::this_thread::sleep_for(Millis{200});
  }
  grpc::Status status;
  v1::DecodeStepResponse response;
  std::thread thread;
};

TEST_CASE("--help and --version") {
  const ProgramResult help = RunServerProgram({"--help"});
  CHECK(help.exit == 0);
  CHECK_THAT(help.output, Contains("--config") && Contains("--listen") && Contains("--log-level"));
  const ProgramResult version = RunServerProgram({"--version"});
  CHECK(version.exit == 0);
  CHECK_THAT(version.output, Contains("dcp-server 0."));
}

TEST_CASE("bad flags and configurations: exit 2 and a message") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/c.toml";
  const auto with = [&](const std::string& config, std::vector<std::string> more = {}) {
    std::ofstream(path) << config;
    more.insert(more.begin(), {"--config", path});
    const ProgramResult result = RunServerProgram(more);
    CHECK(result.exit == 2);
    return result.output;
  };
  CHECK(RunServerProgram({}).exit == 2);
  CHECK(RunServerProgram({"--config", "/nonexistent"}).exit == 2);
  CHECK(RunServerProgram({"--nonsense"}).exit == 2);
  TestConfig config;
  config.heads = 3;
  CHECK_THAT(with(config.Toml()), Contains("model.heads = 3") && Contains(path + ":"));
  CHECK_THAT(with(TestConfig{.server = "thread = 3\n"}.Toml()), Contains("server.thread = 3"));
  const std::string good = TestConfig().Toml();
  CHECK_THAT(with(good, {"--listen", "nowhere"}), Contains("nowhere") || Contains("host:port"));
  CHECK_THAT(with(good, {"--log-level", "loud"}), Contains("--log-level"));
}

TEST_CASE("what cannot start: exit 1 and a message") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/c.toml";
  std::ofstream(path) << TestConfig().Toml();
  const ServerProcess server;
  ProgramResult result = RunServerProgram({"--config", path, "--listen", server.address()});
  CHECK(result.exit == 1);
  CHECK_THAT(result.output, Contains("cannot listen") && Contains(server.address()));

  const std::string socket = "unix:" + folder.path() + "/socket";
  const ServerProcess local(ServerOptions{.listen = socket});
  CHECK(local.address() == socket);
  result = RunServerProgram({"--config", path, "--listen", socket});
  CHECK(result.exit == 1);
  CHECK_THAT(result.output, Contains("another process listens"));
  const TestConfig config;
  TestClient(socket, config).Info();  // which goes on

  std::ofstream(path) << TestConfig{.backend = "no_such_backend"}.Toml();
  result = RunServerProgram({"--config", path, "--listen", "127.0.0.1:0"});
  CHECK(result.exit == 1);
  CHECK_THAT(result.output, Contains("no_such_backend"));
}

TEST_CASE("JSON logs are one object per line") {
  TestConfig config;
  std::string text = config.Toml();
  text.replace(text.find("[log]"), std::string::npos,
               "[log]\nlevel = \"info\"\nformat = \"json\"\n");
  const ServerProcess server(ServerOptions{.config = text});
  std::istringstream log(server.Log());
  int lines = 0;
  for (std::string line; std::getline(log, line); ++lines) {
    CHECK(line.starts_with("{\"time\":\"20"));
    CHECK(line.ends_with("\"}"));
  }
  CHECK(lines > 5);
}

TEST_CASE("SIGTERM, SIGINT and SIGHUP: an idle server exits 0 at once, its socket is gone") {
  const int signal = GENERATE(SIGTERM, SIGINT, SIGHUP);
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/socket";
  ServerProcess server(ServerOptions{.listen = "unix:" + path});
  CHECK(std::ifstream(path).fail());  // a socket, not a file
  server.Signal(signal);
  CHECK(server.WaitForExit(Millis{3000}) == 0);
  // And can be started again in the same place.
  ServerProcess again(ServerOptions{.listen = "unix:" + path});
  CHECK(again.Runs());
}

TEST_CASE("SIGTERM: what is in flight finishes, new calls answer DRAINING, streams end, exit 0") {
  const TestConfig config;
  ServerProcess server(Faulty(config, "rank=0,phase=attend,kind=delay,step=1,ms=1500"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  const TestSequence b = client.Create("b");
  const auto idle_context = TestClient::Context();
  const auto idle = client.stub().DecodeStream(idle_context.get());
  const auto no_header_context = TestClient::Context();
  v1::AppendKvResponse appended;
  const auto no_header = client.stub().AppendKv(no_header_context.get(), &appended);
  const auto open_context = TestClient::Context();
  const auto open = client.stub().AppendKv(open_context.get(), &appended);
  open->Write(client.Header(b, 1, 0, 4, 0, 2));
  while (client.Load().open_appends() == 0) std::this_thread::sleep_for(Millis{2});

  StepInFlight step(client, a);
  server.Signal(SIGTERM);
  std::this_thread::sleep_for(Millis{200});
  CHECK(CheckHealth(client.channel(), "") == ServingStatus::kNotServing);
  CHECK(CheckHealth(client.channel(), "dcp.v1.DecodeService") == ServingStatus::kNotServing);
  v1::DecodeStepResponse response;
  CHECK(CodeAndReason(client.Call(client.Step(1, 0, {{&b, 0, 1}}), &response)) ==
        "UNAVAILABLE/DRAINING");
  auto item = client.Step(1, 0, {{&b, 0, 1}});
  item.set_tag(8);
  idle->Write(item);
  REQUIRE(idle->Read(&response));
  CHECK(response.tag() == 8);
  CHECK(CodeAndReason(response.status()) == "UNAVAILABLE/DRAINING");

  step.thread.join();
  CHECK(CodeAndReason(step.status) == "OK");
  CHECK(client.Verify(0, {{&a, 0, 1}}, step.response) == "");
  CHECK(!idle->Read(&response));
  CHECK(CodeAndReason(idle->Finish()) == "UNAVAILABLE/DRAINING");
  CHECK(CodeAndReason(no_header->Finish()) == "UNAVAILABLE/DRAINING");
  CHECK(CodeAndReason(open->Finish()) == "UNAVAILABLE/DRAINING");
  CHECK(server.WaitForExit(Millis{3000}) == 0);
}

TEST_CASE("a second signal ends the process at once") {
  const TestConfig config{.rank_timeout_ms = 20000};
  ServerProcess server(Faulty(config, "rank=0,phase=attend,kind=stall,step=1"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  StepInFlight step(client, a);
  server.Signal(SIGTERM);
  CHECK(!server.WaitForExit(Millis{500}));
  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{1000}) == 128 + SIGTERM);
  step.thread.join();
  CHECK(CodeAndReason(step.status) == "UNAVAILABLE");
}

TEST_CASE("the drain's bound passes: exit 70") {
  const TestConfig config{.server = "drain_timeout_ms = 1000\n", .rank_timeout_ms = 20000};
  ServerProcess server(Faulty(config, "rank=0,phase=attend,kind=stall,step=1"));
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  StepInFlight step(client, a);
  const TimePoint begin = Clock::now();
  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{2000}) == 70);
  CHECK(Clock::now() - begin < Millis{1500});
  step.thread.join();
  CHECK(!step.status.ok());
}

TEST_CASE("a client that does not read its answers does not hold up the end") {
  const TestConfig config{.server = "drain_timeout_ms = 2000\n", .limits = "max_inflight = 64\n"};
  ServerProcess server(config);
  TestClient client(server.address(), config);
  const TestSequence a = client.Create("a");
  client.Append(a, 1, 0, 8);
  const auto context = TestClient::Context();
  const auto stream = client.stub().DecodeStream(context.get());
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    const auto read = client.Step(0, 0, {{&a, 0, 8}}, false);
    while (!stop && stream->Write(read)) {
    }
  });
  std::this_thread::sleep_for(Millis{1000});
  server.Signal(SIGTERM);
  CHECK(server.WaitForExit(Millis{3000}) == 0);
  stop = true;
  writer.join();
  v1::DecodeStepResponse response;
  while (stream->Read(&response)) {
  }
  CHECK(!stream->Finish().ok());
}

}  // namespace
}  // namespace dcp
