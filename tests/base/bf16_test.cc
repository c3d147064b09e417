#include "base/bf16.h"

#include <catch2/catch.hpp>
#include <cmath>

namespace dcp {

TEST_CASE("bf16 rounds to nearest even") {
  CHECK(ToBf16(1.0f).bits == 0x3f80);
  // 1 + 2^-8 lies half way between 1 and 1 + 2^-7: the even one wins.
  CHECK(ToBf16(1.0f + 0x1p-8f).bits == 0x3f80);
  CHECK(ToBf16(1.0f + 0x1p-7f + 0x1p-8f).bits == 0x3f82);
  CHECK(ToBf16(1.0f + 0x1p-8f + 0x1p-20f).bits == 0x3f81);
  CHECK(ToFloat(ToBf16(-INFINITY)) == -INFINITY);
  CHECK(ToFloat(ToBf16(3.4e38f)) == INFINITY);  // past the largest bf16
}

TEST_CASE("every bf16 survives the round trip, NaN stays NaN") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Bf16 x{static_cast<std::uint16_t>(bits)};
    const float f = ToFloat(x);
    if (std::isnan(f)) {
      CHECK(std::isnan(ToFloat(ToBf16(f))));
    } else {
      REQUIRE(ToBf16(f) == x);
    }
  }
  // A NaN whose payload sits in the lower half must not become an infinity.
  CHECK(std::isnan(ToFloat(ToBf16(std::bit_cast<float>(0x7f800001u)))));
}

}  // namespace dcp
