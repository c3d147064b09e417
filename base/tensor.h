// A tensor as it arrives from outside: dtype, shape and bytes, none of them trusted yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace dcp {

enum class DType : std::uint8_t { kBf16, kF32 };

constexpr std::size_t SizeOf(DType dtype) { return dtype == DType::kBf16 ? 2 : 4; }
constexpr std::string_view DTypeName(DType dtype) { return dtype == DType::kBf16 ? "bf16" : "f32"; }

// Non-owning; row-major, little-endian, no strides.
struct TensorView {
  DType dtype = DType::kBf16;
  std::span<const std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// Checks dtype, rank, dims and byte size (in 128-bit arithmetic) against what is expected.
// Errors: DTYPE, SHAPE, BYTE_SIZE; `name` is the field's name in messages.
Status CheckTensor(std::string_view name, const TensorView& tensor, DType dtype,
                   std::span<const std::int64_t> shape);

}  // namespace dcp
