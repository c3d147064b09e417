#include "client/workload/row_check.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <numbers>

namespace dcp {
namespace {

constexpr int kHeads = 4;
constexpr int kLayer = 1;
constexpr double kScale = 0.1;

// A right answer for one token, to be broken.
struct Answer {
  Synthetic synthetic{{kHeads, 80, kScale}, 11};
  Content content{7, {{1, 20}, {2, 20}}};
  std::int64_t position = 50;
  std::vector<float> output;
  std::vector<float> lse;

  Answer() {
    std::vector<Bf16> latents(80 * static_cast<std::size_t>(position + 1));
    synthetic.Latents(content, kLayer, 0, latents);
    for (int h = 0; h < kHeads; ++h) {
      std::vector<Bf16> query(80);
      synthetic.Query(content, kLayer, position, h, query);
      const RowTruth truth = AttendRow({80, 64, kScale}, query, latents);
      for (const double v : truth.output) output.push_back(static_cast<float>(v));
      lse.push_back(static_cast<float>(truth.lse));
    }
  }

  // Head 0 is left out, so that rows and heads differ in number.
  RowCheckResult Check(bool base_two = false, std::size_t cache_bytes = 1 << 20) {
    RowChecker checker(synthetic, 64, {}, cache_bytes);
    AnsweredToken token;
    token.content = &content;
    token.layer = kLayer;
    token.position = position;
    token.heads = {1, 2, 3};
    token.output = std::span(output).subspan(64);
    token.lse = std::span(lse).subspan(1);
    token.lse_base_two = base_two;
    return checker.Check(token);
  }
};

TEST_CASE("Right rows pass", "[row_check]") {
  Answer answer;
  const RowCheckResult result = answer.Check();
  CHECK(result.rows == 3);
  CHECK(result.wrong == 0);
  CHECK(result.max_output_error < 1e-6);
  CHECK(answer.Check(false, 1).wrong == 0);  // a cache of one chunk
}

TEST_CASE("Base 2 is read as base 2", "[row_check]") {
  Answer answer;
  CHECK(answer.Check(/*base_two=*/true).wrong == 3);
  for (float& v : answer.lse) v *= std::numbers::log2e_v<float>;
  CHECK(answer.Check(/*base_two=*/true).wrong == 0);
  CHECK(answer.Check().wrong == 3);
}

TEST_CASE("Wrong rows fail", "[row_check]") {
  Answer answer;
  SECTION("NaN") { answer.output[64] = NAN; }
  SECTION("an output off by 1 %") {
    for (std::size_t i = 64; i < 128; ++i) answer.output[i] *= 1.01f;
  }
  SECTION("an LSE off by 1e-3") { answer.lse[1] += 1e-3f; }
  SECTION("a NaN LSE") { answer.lse[1] = NAN; }
  CHECK(answer.Check().wrong == 1);
}

TEST_CASE("The answer of a neighbour fails", "[row_check]") {
  Answer answer;
  SECTION("swapped heads") {
    std::swap_ranges(answer.output.begin() + 64, answer.output.begin() + 128,
                     answer.output.begin() + 128);
    CHECK(answer.Check().wrong == 2);
  }
  SECTION("another position") {
    answer.position = 49;
    CHECK(answer.Check().wrong == 3);
  }
}

}  // namespace
}  // namespace dcp
