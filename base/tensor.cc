#include "base/tensor.h"

#include <algorithm>
#include <limits>

namespace dcp {
namespace {

std::string ShapeText(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i == 8) return text + ", ...]";  // the sender chooses the length; the message stays short
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

Status CheckTensor(std::string_view name, const TensorView& tensor, DType dtype,
                   std::span<const std::int64_t> shape) {
  const std::string field(name);
  if (tensor.dtype != dtype) {
    return Status(Reason::kDtype, field + " is " + std::string(DTypeName(tensor.dtype)) +
                                      ", expected " + std::string(DTypeName(dtype)));
  }
  if (!std::ranges::equal(tensor.shape, shape)) {
    return Status(Reason::kShape,
                  field + " is " + ShapeText(tensor.shape) + ", expected " + ShapeText(shape));
  }
  // `shape` is ours, but the product of two limits may still pass 64 bits.
  unsigned __int128 bytes = SizeOf(dtype);
  for (const std::int64_t dim : shape) bytes *= static_cast<std::uint64_t>(dim);
  if (bytes != tensor.bytes.size()) {
    constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
    const std::string expected = bytes > kMost ? "more than " + std::to_string(kMost)
                                               : std::to_string(static_cast<std::uint64_t>(bytes));
    return Status(Reason::kByteSize, field + " has " + std::to_string(tensor.bytes.size()) +
                                         " bytes, expected " + expected + " for " +
                                         ShapeText(shape) + " " + std::string(DTypeName(dtype)));
  }
  return Status::Ok();
}

}  // namespace dcp
