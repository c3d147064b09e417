// Vectors on device 0 and back, for tests.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstddef>
#include <span>
#include <vector>

#include "base/cuda.h"

namespace dcp::test {

inline void RequireOk(const Status& status) {
  INFO(status.ToString());
  REQUIRE(status.ok());
}

// The one stream of a test program.
inline const cuda::Stream& TestStream() {
  static const cuda::Stream kStream = [] {
    RequireOk(cuda::UseDevice(0));
    auto made = cuda::Stream::Create(0);
    RequireOk(made.status());
    return *std::move(made);
  }();
  return kStream;
}

inline cuda::DeviceBuffer DeviceBytes(std::size_t bytes) {
  auto buffer = cuda::DeviceBuffer::Create(0, std::max<std::size_t>(bytes, 1), "test");
  RequireOk(buffer.status());
  return *std::move(buffer);
}

template <class T>
cuda::DeviceBuffer ToDevice(const std::vector<T>& items) {
  cuda::DeviceBuffer buffer = DeviceBytes(items.size() * sizeof(T));
  const StreamRef stream = TestStream().ref();
  RequireOk(cuda::CopyAsync(buffer.data(), items.data(), items.size() * sizeof(T), stream));
  RequireOk(TestStream().Synchronize());
  return buffer;
}

template <class T>
std::vector<T> ToHost(const cuda::DeviceBuffer& buffer) {
  std::vector<T> items(buffer.size() / sizeof(T));
  const StreamRef stream = TestStream().ref();
  RequireOk(cuda::CopyAsync(items.data(), buffer.data(), items.size() * sizeof(T), stream));
  RequireOk(TestStream().Synchronize());
  return items;
}

}  // namespace dcp::test
