#include "client/workload/truth.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

namespace dcp {
namespace {

std::vector<Bf16> Row(std::initializer_list<float> values) {
  std::vector<Bf16> row;
  for (const float v : values) row.push_back(ToBf16(v));
  return row;
}

TEST_CASE("Truth of two keys in closed form", "[truth]") {
  // Logits 0.5 * {2, 4} = {1, 2}; values are the first 2 dims.
  const std::vector<Bf16> query = Row({1, 1, 0});
  std::vector<Bf16> latents = Row({2, 0, 9});
  for (const Bf16 v : Row({0, 4, 9})) latents.push_back(v);
  const RowTruth truth = AttendRow({3, 2, 0.5}, query, latents);
  const double z = std::exp(1.0) + std::exp(2.0);
  CHECK(truth.lse == Approx(std::log(z)).epsilon(1e-14));
  CHECK(truth.output[0] == Approx(2 * std::exp(1.0) / z).epsilon(1e-14));
  CHECK(truth.output[1] == Approx(4 * std::exp(2.0) / z).epsilon(1e-14));
}

TEST_CASE("Truth of n equal keys", "[truth]") {
  // 9 dims, so that the vector loop has a remainder.
  const std::vector<Bf16> query = Row({1, 1, 1, 1, 1, 1, 1, 1, 1});
  std::vector<Bf16> latents;
  for (int i = 0; i < 1000; ++i) {
    for (const Bf16 v : Row({1, 2, 3, 4, 5, 6, 7, 8, 9})) latents.push_back(v);
  }
  const RowTruth truth = AttendRow({9, 9, 0.25}, query, latents);
  CHECK(truth.lse == Approx(45 * 0.25 + std::log(1000.0)).epsilon(1e-14));
  for (int i = 0; i < 9; ++i) CHECK(truth.output[static_cast<std::size_t>(i)] == Approx(i + 1));
}

TEST_CASE("Truth of large logits does not overflow", "[truth]") {
  std::vector<Bf16> latents = Row({1024});
  for (const Bf16 v : Row({1000})) latents.push_back(v);
  const RowTruth truth = AttendRow({1, 1, 100}, Row({1}), latents);
  CHECK(truth.lse == Approx(102400));
  CHECK(truth.output[0] == 1024);
}

TEST_CASE("Truth of nothing is 0 and -inf", "[truth]") {
  const RowTruth truth = AttendRow({2, 1, 1}, Row({1, 1}), {});
  CHECK(truth.lse == -std::numeric_limits<double>::infinity());
  CHECK(truth.output == std::vector<double>{0});
}

TEST_CASE("Relative error of a row", "[truth]") {
  const std::vector<double> truth = {3, 4};
  CHECK(RelativeError(std::vector<float>{3, 4}, truth) == 0);
  CHECK(RelativeError(std::vector<float>{3, 4.5}, truth) == Approx(0.1));
  CHECK(std::isnan(RelativeError(std::vector<float>{NAN, 4}, truth)));
  CHECK(RelativeError(std::vector<float>{3, 4}, std::vector<double>{0, 0}) == 5);
}

}  // namespace
}  // namespace dcp
