// Health and reflection of a server at work; rank_fault_test and shutdown_test see them change.
#include <catch2/catch.hpp>
#include <thread>

#include "tests/integration/health_client.h"
#include "tests/integration/test_client.h"

namespace dcp {
namespace {

TEST_CASE("health: the server, the service, and a service that is not there") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  CHECK(CheckHealth(client.channel(), "") == ServingStatus::kServing);
  CHECK(CheckHealth(client.channel(), "dcp.v1.DecodeService") == ServingStatus::kServing);
  CHECK(CheckHealth(client.channel(), "dcp.v1.Nothing") == ServingStatus::kError);
}

TEST_CASE("reflection lists the services") {
  const TestConfig config;
  const ServerProcess server(config);
  TestClient client(server.address(), config);
  const std::string services = ListServices(client.channel(), "v1alpha");
  CHECK_THAT(services, Catch::Contains("dcp.v1.DecodeService"));
  CHECK_THAT(services, Catch::Contains("grpc.health.v1.Health"));
}

// Hidden: takes 45 s.
TEST_CASE("a client that pings every 10 s while idle is not sent away", "[.long]") {
  // Three pings in a row that come too fast make gRPC close the connection ("too_many_pings").
  const TestConfig config;
  const ServerProcess server(config);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  const auto channel =
      grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), arguments);
  REQUIRE(CheckHealth(channel, "") == ServingStatus::kServing);
  std::this_thread::sleep_for(std::chrono::seconds(45));
  CHECK(channel->GetState(false) == GRPC_CHANNEL_READY);
  CHECK(CheckHealth(channel, "") == ServingStatus::kServing);
  CHECK(server.Log().find("too_many_pings") == std::string::npos);
}

}  // namespace
}  // namespace dcp
