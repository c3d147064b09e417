#include "base/tensor.h"

#include <array>
#include <catch2/catch.hpp>
#include <limits>
#include <vector>

namespace dcp {
namespace {
constexpr std::array<std::int64_t, 2> kWanted{3, 5};

Reason Check(DType dtype, std::vector<std::int64_t> shape, std::size_t bytes) {
  const std::vector<std::byte> data(bytes);
  return CheckTensor("query", {.dtype = dtype, .shape = shape, .bytes = data}, DType::kBf16,
                     kWanted)
      .reason();
}
}  // namespace

TEST_CASE("a tensor must have the expected dtype, shape and byte size") {
  CHECK(Check(DType::kBf16, {3, 5}, 30) == Reason::kNone);
  CHECK(Check(DType::kF32, {3, 5}, 60) == Reason::kDtype);
  CHECK(Check(DType::kBf16, {15}, 30) == Reason::kShape);
  CHECK(Check(DType::kBf16, {3, 5, 1}, 30) == Reason::kShape);
  CHECK(Check(DType::kBf16, {5, 3}, 30) == Reason::kShape);
  CHECK(Check(DType::kBf16, {-3, -5}, 30) == Reason::kShape);
  CHECK(Check(DType::kBf16, {3, 0}, 0) == Reason::kShape);
  CHECK(Check(DType::kBf16, {}, 0) == Reason::kShape);
  CHECK(Check(DType::kBf16, {3, 5}, 29) == Reason::kByteSize);
  CHECK(Check(DType::kBf16, {3, 5}, 32) == Reason::kByteSize);
}

TEST_CASE("byte sizes are computed beyond 64 bits") {
  // 2^32 * 2^32 * 2 bytes is 0 modulo 2^64: an empty payload must not pass.
  const std::array<std::int64_t, 2> huge{1LL << 32, 1LL << 32};
  const TensorView tensor{.dtype = DType::kBf16, .shape = huge, .bytes = {}};
  const Status status = CheckTensor("x", tensor, DType::kBf16, huge);
  CHECK(status.reason() == Reason::kByteSize);
  CHECK(status.message().find("expected more than 18446744073709551615") != std::string::npos);
}

TEST_CASE("a message says what was given and what was expected, and stays short") {
  std::vector<std::int64_t> shape(100000, std::numeric_limits<std::int64_t>::max());
  const Status status = CheckTensor("query", {.dtype = DType::kBf16, .shape = shape, .bytes = {}},
                                    DType::kBf16, kWanted);
  CHECK(status.message().size() < 400);
  CHECK(status.message().find("[3, 5]") != std::string::npos);
}

}  // namespace dcp
