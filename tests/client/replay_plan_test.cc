#include "client/workload/replay_plan.h"

#include <catch2/catch.hpp>

namespace dcp {
namespace {

TraceRow Row(double ms, std::int64_t input, std::int64_t output, std::vector<std::uint64_t> ids) {
  return {ms, input, output, std::move(ids)};
}

LengthScale Scale(const char* text) { return *LengthScale::Parse(text); }

// Every prefix's content must be the beginning of its users' contents.
void CheckContents(const ReplayPlan& plan) {
  for (const RequestPlan& r : plan.requests) {
    std::int64_t fork = r.fork_length;
    for (int i = r.prefix; i >= 0; i = plan.prefixes[static_cast<std::size_t>(i)].parent) {
      const PrefixPlan& prefix = plan.prefixes[static_cast<std::size_t>(i)];
      REQUIRE(fork <= prefix.length);
      REQUIRE(prefix.fork_length <= prefix.length);
      for (std::int64_t p = 0; p < fork; ++p) REQUIRE(prefix.content.At(p) == r.content.At(p));
      fork = std::min(fork, prefix.fork_length);
    }
  }
}

TEST_CASE("Requests that share nothing do not fork", "[plan]") {
  const ReplayPlan plan =
      PlanReplay({Row(0, 1000, 64, {1, 2}), Row(5, 700, 64, {3, 4})}, Scale("1/32"));
  CHECK(plan.prefixes.empty());
  REQUIRE(plan.requests.size() == 2);
  CHECK(plan.requests[0].prefix == -1);
  CHECK(plan.requests[0].input == 31);
  CHECK(plan.requests[0].output == 2);
  CHECK(plan.requests[0].fork_length == 0);
  CHECK(plan.fork_depth == 0);
  CHECK(plan.requests[0].content.At(40) != plan.requests[1].content.At(40));
}

TEST_CASE("Shared chains become a tree of prefixes where requests part", "[plan]") {
  //  1 - 2 - 3 - 4 - private        (a)
  //          3 - 4 - 5 - private    (b, c)
  //  1 - 2 - 6                      (d)
  //  7                              (e)
  const ReplayPlan plan = PlanReplay(
      {
          Row(0, 2500, 32, {1, 2, 3, 4, 100}),
          Row(1, 3000, 32, {1, 2, 3, 4, 5, 101}),
          Row(2, 3000, 32, {1, 2, 3, 4, 5, 102}),
          Row(3, 1500, 32, {1, 2, 6}),
          Row(4, 500, 32, {7}),
      },
      Scale("1/32"));
  REQUIRE(plan.prefixes.size() == 3);
  const PrefixPlan& two = plan.prefixes[0];
  CHECK(two.parent == -1);
  CHECK(two.length == 32);
  CHECK(two.users == 4);
  const PrefixPlan& four = plan.prefixes[1];
  CHECK(four.parent == 0);
  CHECK(four.fork_length == 32);
  CHECK(four.length == 64);
  CHECK(four.users == 3);
  const PrefixPlan& five = plan.prefixes[2];
  CHECK(five.parent == 1);
  CHECK(five.fork_length == 64);
  CHECK(five.length == 80);
  CHECK(five.users == 2);
  CHECK(five.depth == 2);
  CHECK(plan.requests[0].prefix == 1);
  CHECK(plan.requests[0].fork_length == 64);
  CHECK(plan.requests[1].prefix == 2);
  CHECK(plan.requests[3].prefix == 0);
  CHECK(plan.requests[4].prefix == -1);
  CHECK(plan.fork_depth == 3);
  // Forked tokens less those that a prefix brought in first.
  CHECK(plan.shared_input_tokens == 64 + 80 + 80 + 32 - (32 + 32 + 16));
  CheckContents(plan);
}

TEST_CASE("Equal inputs share all but the token that the first step appends", "[plan]") {
  const ReplayPlan plan = PlanReplay(
      {Row(0, 700, 32, {1, 2}), Row(1, 700, 32, {1, 2}), Row(2, 1024, 32, {1, 3})}, Scale("1/32"));
  // 700 / 32 is 22: one block of 16 and a partial one of 6.
  REQUIRE(plan.prefixes.size() == 2);
  CHECK(plan.prefixes[1].length == 22);
  CHECK(plan.requests[0].fork_length == 21);
  CHECK(plan.requests[1].fork_length == 21);
  CHECK(plan.requests[2].fork_length == 16);
  CheckContents(plan);
  CHECK(plan.requests[0].content.At(21) == plan.requests[1].content.At(21));
  CHECK(plan.requests[0].content.At(22) != plan.requests[1].content.At(22));
}

TEST_CASE("Inputs of one token do not fork but use the prefix up", "[plan]") {
  const ReplayPlan plan =
      PlanReplay({Row(0, 3, 3, {1}), Row(1, 3, 3, {1}), Row(2, 600, 3, {1, 2})}, Scale("1/32"));
  REQUIRE(plan.prefixes.size() == 1);
  CHECK(plan.prefixes[0].users == 3);
  CHECK(plan.requests[0].prefix == 0);
  CHECK(plan.requests[0].fork_length == 0);
  CHECK(plan.requests[0].output == 1);
  CHECK(plan.requests[2].fork_length == 16);
  CheckContents(plan);
}

TEST_CASE("A scaled input may have fewer blocks than hash ids", "[plan]") {
  // 513 tokens are two blocks; scaled, 16 tokens are one.
  const ReplayPlan plan =
      PlanReplay({Row(0, 513, 32, {1, 2}), Row(0, 513, 32, {1, 2})}, Scale("1/32"));
  REQUIRE(plan.prefixes.size() == 1);
  CHECK(plan.prefixes[0].length == 16);
  CHECK(plan.requests[0].fork_length == 15);
  CheckContents(plan);
}

TEST_CASE("One id under two parents is two prefixes", "[plan]") {
  const ReplayPlan plan = PlanReplay({Row(0, 1024, 32, {1, 9}), Row(0, 1024, 32, {2, 9}),
                                      Row(0, 1024, 32, {1, 9}), Row(0, 1024, 32, {2, 9})},
                                     Scale("1/32"));
  CHECK(plan.prefixes.size() == 2);
  CheckContents(plan);
}

TEST_CASE("Requests are ordered by time", "[plan]") {
  const ReplayPlan plan =
      PlanReplay({Row(9, 10, 1, {}), Row(3, 10, 1, {}), Row(3, 10, 1, {})}, Scale("1"));
  CHECK(plan.requests[0].index == 1);
  CHECK(plan.requests[1].index == 2);
  CHECK(plan.requests[2].index == 0);
}

}  // namespace
}  // namespace dcp
