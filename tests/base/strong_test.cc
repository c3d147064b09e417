#include "base/strong.h"

#include <catch2/catch.hpp>
#include <concepts>

namespace dcp {
namespace {
template <class A, class B>
concept Addable = requires(A a, B b) {
  a + b;
};
}  // namespace

TEST_CASE("units do not mix") {
  STATIC_REQUIRE(Addable<Tokens, Tokens>);
  STATIC_REQUIRE_FALSE(Addable<Tokens, Pages>);
  STATIC_REQUIRE_FALSE(Addable<Tokens, int>);
  STATIC_REQUIRE_FALSE(std::convertible_to<int, Tokens>);
  STATIC_REQUIRE_FALSE(std::convertible_to<Tokens, int>);
  STATIC_REQUIRE_FALSE(std::convertible_to<GlobalPos, LocalPos>);
  CHECK((Tokens(3) + Tokens(4)).value() == 7);
  CHECK(Tokens(3) < Tokens(4));
}

}  // namespace dcp
