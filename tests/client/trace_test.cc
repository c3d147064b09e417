#include "client/workload/trace.h"

#include <catch2/catch.hpp>
#include <sstream>

#include "client/workload/replay_plan.h"
#include "client/workload/trace_generator.h"

namespace dcp {
namespace {

using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

Result<std::vector<TraceRow>> Parse(const std::string& text, TraceFormat format,
                                    std::size_t max_rows = kAllRows) {
  std::istringstream in(text);
  return ParseTrace(in, "t", format, max_rows);
}

std::string MooncakeError(const std::string& line) {
  const std::string good =
      R"({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]})"
      "\n";
  return Parse(good + line + "\n", TraceFormat::kMooncake).status().message();
}

std::string AzureError(const std::string& line) {
  return Parse("TIMESTAMP,ContextTokens,GeneratedTokens\n" + line + "\n", TraceFormat::kAzure)
      .status()
      .message();
}

TEST_CASE("Mooncake rows", "[trace]") {
  const auto rows =
      Parse(R"({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]})"
            "\r\n\n"
            R"({"timestamp": 27.5, "input_length": 1, "output_length": 1, "hash_ids": []})",
            TraceFormat::kMooncake);
  REQUIRE(rows.ok());
  REQUIRE((*rows).size() == 2);
  CHECK((*rows)[0].input_length == 600);
  CHECK((*rows)[0].output_length == 5);
  CHECK((*rows)[0].hash_ids == std::vector<std::uint64_t>{1, 2});
  CHECK((*rows)[1].timestamp_ms == 27.5);
}

TEST_CASE("Malformed Mooncake rows are named by file and line", "[trace]") {
  const auto check = [](const std::string& line, const std::string& what) {
    const std::string message = MooncakeError(line);
    CHECK_THAT(message, StartsWith("t:2: "));
    CHECK_THAT(message, Contains(what));
  };
  check("{", "not JSON");
  check("[1]", "not a JSON object");
  check(R"({"input_length": 1, "output_length": 1})", "timestamp is missing");
  check(R"({"timestamp": "x", "input_length": 1, "output_length": 1})", "expected milliseconds");
  check(R"({"timestamp": -1, "input_length": 1, "output_length": 1})", "expected >= 0");
  check(R"({"timestamp": 0, "output_length": 1})", "input_length is missing");
  check(R"({"timestamp": 0, "input_length": 1.5, "output_length": 1})", "expected an integer");
  check(R"({"timestamp": 0, "input_length": 0, "output_length": 1})", "input_length is 0");
  check(R"({"timestamp": 0, "input_length": 1, "output_length": -4})", "output_length is -4");
  check(R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 5})",
        "not an array");
  check(R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-5]})",
        "hash id -5");
  check(R"({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]})",
        "at most 1");
}

TEST_CASE("Azure rows count time from the first", "[trace]") {
  const auto rows = Parse(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 23:59:59.5000000,374,44\r\n"
      "2023-11-17 00:00:01.2500000,396,109",
      TraceFormat::kAzure);
  REQUIRE(rows.ok());
  REQUIRE((*rows).size() == 2);
  CHECK((*rows)[0].timestamp_ms == 0);
  CHECK((*rows)[1].timestamp_ms == Approx(1750).margin(0.01));
  CHECK((*rows)[1].input_length == 396);
  CHECK((*rows)[1].output_length == 109);
  CHECK((*rows)[1].hash_ids.empty());
}

TEST_CASE("Malformed Azure rows are named by file and line", "[trace]") {
  CHECK_THAT(AzureError("2023-11-16 18:15:46.68,374"), StartsWith("t:2: expected 3 fields"));
  CHECK_THAT(AzureError("2023-11-16 18:15:46.68,374,1,1"), StartsWith("t:2: expected 3 fields"));
  CHECK_THAT(AzureError("2023-13-16 18:15:46.68,374,1"), StartsWith("t:2: TIMESTAMP"));
  CHECK_THAT(AzureError("yesterday,374,1"), StartsWith("t:2: TIMESTAMP"));
  CHECK_THAT(AzureError("2023-11-16 18:15:46.68,x,1"), StartsWith("t:2: ContextTokens is 'x'"));
  CHECK_THAT(AzureError("2023-11-16 18:15:46.68,3,0"), StartsWith("t:2: GeneratedTokens is 0"));
  CHECK_THAT(Parse("a,b\n", TraceFormat::kAzure).status().message(), StartsWith("t:1: header"));
}

TEST_CASE("Only the rows asked for are read", "[trace]") {
  const std::string good =
      R"({"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]})"
      "\n";
  const auto rows = Parse(good + good + "garbage\n", TraceFormat::kMooncake, 2);
  REQUIRE(rows.ok());
  CHECK((*rows).size() == 2);
  CHECK_THAT(Parse("\n", TraceFormat::kMooncake).status().message(), Contains("no rows"));
  CHECK_THAT(ReadTrace("/nonexistent", TraceFormat::kMooncake).status().message(),
             Contains("cannot be opened"));
}

TEST_CASE("Length scales", "[trace]") {
  const auto scale = [](const char* text) { return *LengthScale::Parse(text); };
  CHECK(scale("1/32").block_tokens() == 16);
  CHECK(scale("0.03125").block_tokens() == 16);
  CHECK(scale("1").block_tokens() == 512);
  CHECK(scale("3/512").block_tokens() == 3);
  CHECK(scale("2").block_tokens() == 1024);
  CHECK(scale("1/32").Apply(6758) == 211);
  CHECK(scale("1/32").Apply(3) == 1);
  CHECK(scale("1/32").Apply(16) == 1);
  CHECK(scale("1/32").Apply(48) == 2);
  CHECK(scale("1").Apply(12345) == 12345);
  // Whole blocks stay whole at any scale.
  CHECK(scale("3/512").Apply(512 * 7) == 21);
  for (const char* bad : {"", "0", "-1", "x", "1/0", "1/1024", "0.01", "1/3", "1/32x", "1e9"}) {
    INFO(bad);
    CHECK(!LengthScale::Parse(bad).ok());
  }
}

TEST_CASE("Formats by file name", "[trace]") {
  CHECK(GuessTraceFormat("a/b.csv") == TraceFormat::kAzure);
  CHECK(GuessTraceFormat("a/b.jsonl") == TraceFormat::kMooncake);
}

TEST_CASE("Generated traces are deterministic, readable and shared as asked", "[trace]") {
  for (const double share : {0.3, 0.5, 0.7}) {
    TraceOptions options;
    options.requests = 200;
    options.shared_share = share;
    options.fork_depth = 4;
    options.max_input = 30'000;
    std::ostringstream first, second;
    WriteMooncake(first, GenerateTrace(options));
    WriteMooncake(second, GenerateTrace(options));
    CHECK(first.str() == second.str());
    const auto rows = Parse(first.str(), TraceFormat::kMooncake);
    REQUIRE(rows.ok());
    CHECK((*rows).size() == 200);
    const ReplayPlan plan = PlanReplay(*rows, *LengthScale::Parse("1"));
    CHECK(plan.SharedShare() >= share - 0.1);
    CHECK(plan.fork_depth >= 3);
  }
}

}  // namespace
}  // namespace dcp
