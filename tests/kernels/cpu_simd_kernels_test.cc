#include "kernels/backends/cpu_simd_kernels.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

namespace dcp::simd {

TEST_CASE("Exp2 is exact to 2e-7 down to the smallest normal number") {
  std::vector<float> x;
  for (int i = 0; i <= 2'000'000; ++i) x.push_back(-126.0f * static_cast<float>(i) / 2'000'000);
  for (int i = 0; i <= 1'000'000; ++i) x.push_back(-1e-6f * static_cast<float>(i));
  std::vector<float> y(x.size());
  Exp2(x.data(), y.data(), x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double truth = std::exp2(double{x[i]});
    worst = std::max(worst, std::fabs(y[i] - truth) / truth);
  }
  CHECK(worst < 2e-7);
}

TEST_CASE("Exp2 at the edges") {
  const float inf = std::numeric_limits<float>::infinity();
  const float x[] = {0,       -0.0f, -1,   -126,
                     -126.5f, -1000, -inf, std::numeric_limits<float>::quiet_NaN()};
  float y[std::size(x)];
  Exp2(x, y, std::size(x));
  CHECK(y[0] == 1.0f);
  CHECK(y[1] == 1.0f);
  CHECK(y[2] == 0.5f);
  CHECK(y[3] == std::ldexp(1.0f, -126));
  CHECK(y[4] == 0.0f);
  CHECK(y[5] == 0.0f);
  CHECK(y[6] == 0.0f);
  CHECK(std::isnan(y[7]));
}

}  // namespace dcp::simd
