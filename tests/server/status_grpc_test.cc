#include "server/status_grpc.h"

#include <catch2/catch.hpp>

#include "google/rpc/error_details.pb.h"

namespace dcp {
namespace {

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status details;
  REQUIRE(details.ParseFromString(status.error_details()));
  return details;
}

TEST_CASE("OK is OK") { CHECK(ToGrpc(Status::Ok()).ok()); }

TEST_CASE("every reason becomes its code and an ErrorInfo") {
  for (const ReasonEntry& entry : Reasons()) {
    CAPTURE(std::string(entry.name));
    const grpc::Status status =
        ToGrpc(Status(entry.reason, "what was wrong").With("actual_length", "17"));
    CHECK(static_cast<int>(status.error_code()) == static_cast<int>(entry.code));
    CHECK(status.error_message() == "what was wrong");

    const google::rpc::Status details = Details(status);
    CHECK(details.code() == static_cast<int>(entry.code));
    CHECK(details.message() == "what was wrong");
    REQUIRE(details.details_size() >= 1);
    google::rpc::ErrorInfo info;
    REQUIRE(details.details(0).UnpackTo(&info));
    CHECK(info.reason() == entry.name);
    CHECK(info.domain() == "dcp");
    CHECK(info.metadata().at("actual_length") == "17");
  }
}

TEST_CASE("only overload and capacity say when to retry") {
  for (const ReasonEntry& entry : Reasons()) {
    CAPTURE(std::string(entry.name));
    google::rpc::Status details;
    Encode(Status(entry.reason, "x"), &details);
    const bool expected = entry.reason == Reason::kOverloaded ||
                          entry.reason == Reason::kKvCapacity ||
                          entry.reason == Reason::kSequenceLimit;
    REQUIRE(details.details_size() == (expected ? 2 : 1));
    if (!expected) continue;
    google::rpc::RetryInfo retry;
    REQUIRE(details.details(1).UnpackTo(&retry));
    CHECK(retry.retry_delay().seconds() == 0);
    CHECK(retry.retry_delay().nanos() > 0);
  }
}

TEST_CASE("a long message is cut between characters, so that it fits into trailers") {
  std::string text(1023, 'a');
  for (int i = 0; i < 1000; ++i) text += "\xc3\xa4";  // ä: two bytes
  const grpc::Status status = ToGrpc(Status(Reason::kSequenceId, text).With("id", text));
  CHECK(status.error_message() == std::string(1023, 'a') + "...");
  CHECK(status.error_message().size() + status.error_details().size() < 4096);
}

}  // namespace
}  // namespace dcp
