#include "base/status.h"

#include <catch2/catch.hpp>
#include <set>
#include <string>

namespace dcp {

TEST_CASE("a status has the code of its reason") {
  const Status status = Status(Reason::kLengthConflict, "length is 3").With("actual_length", "3");
  CHECK_FALSE(status.ok());
  CHECK(status.code() == StatusCode::kAborted);
  CHECK(status.ToString() == "ABORTED/LENGTH_CONFLICT: length is 3");
  CHECK(status.metadata() == Status::Metadata{{"actual_length", "3"}});
  CHECK(Status().ok());
  CHECK(Status().ToString() == "OK");
}

TEST_CASE("reason names are stable, unique and fit ErrorInfo") {
  std::set<std::string_view> names;
  for (const ReasonEntry& r : Reasons()) {
    CHECK(names.insert(r.name).second);
    CHECK(r.name.size() <= 63);
    CHECK(r.name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == std::string_view::npos);
    CHECK(ReasonName(r.reason) == r.name);
    CHECK(CodeOf(r.reason) == r.code);
    CHECK(CodeName(r.code) != "UNKNOWN");
  }
}

namespace {
Result<int> Half(int x) {
  if (x % 2 != 0) return Status(Reason::kShape, "odd");
  return x / 2;
}
Result<int> Quarter(int x) {
  DCP_ASSIGN_OR_RETURN(const int half, Half(x));
  return Half(half);
}
}  // namespace

TEST_CASE("results carry a value or an error through the macros") {
  CHECK(*Quarter(8) == 2);
  CHECK(Quarter(8).status().ok());
  CHECK(Quarter(6).status().reason() == Reason::kShape);
  CHECK_FALSE(Quarter(7).ok());
}

}  // namespace dcp
