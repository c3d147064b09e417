// Tensors of the wire, written and read in place. Hosts are little-endian, as the wire is.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "base/bf16.h"
#include "dcp/v1/decode.pb.h"

namespace dcp {
static_assert(std::endian::native == std::endian::little);

// Shapes `tensor` and returns its bytes to fill, valid until `tensor` changes.
inline std::span<Bf16> MakeBf16(v1::Tensor& tensor, std::initializer_list<std::int64_t> shape) {
  std::size_t size = 1;
  tensor.clear_shape();
  for (const std::int64_t dim : shape) {
    tensor.add_shape(dim);
    size *= static_cast<std::size_t>(dim);
  }
  tensor.set_dtype(v1::DATA_TYPE_BF16);
  tensor.mutable_data()->resize(size * sizeof(Bf16));
  return {reinterpret_cast<Bf16*>(tensor.mutable_data()->data()), size};
}

// True when the tensor has this dtype, this shape and as many bytes.
inline bool HasForm(const v1::Tensor& tensor, v1::DataType dtype,
                    std::initializer_list<std::int64_t> shape) {
  std::size_t size = dtype == v1::DATA_TYPE_BF16 ? 2 : 4;
  if (tensor.dtype() != dtype || tensor.shape_size() != static_cast<int>(shape.size())) {
    return false;
  }
  int i = 0;
  for (const std::int64_t dim : shape) {
    if (tensor.shape(i++) != dim) return false;
    size *= static_cast<std::size_t>(dim);
  }
  return tensor.data().size() == size;
}

// Elements [begin, begin + out.size()) of a bf16 or fp32 tensor, as floats. The range must lie
// within the tensor's bytes.
inline void ReadFloats(const v1::Tensor& tensor, std::size_t begin, std::span<float> out) {
  if (tensor.dtype() == v1::DATA_TYPE_FP32) {
    std::memcpy(out.data(), tensor.data().data() + begin * sizeof(float), out.size_bytes());
    return;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    Bf16 x;
    std::memcpy(&x, tensor.data().data() + (begin + i) * sizeof(Bf16), sizeof(Bf16));
    out[i] = ToFloat(x);
  }
}

}  // namespace dcp
