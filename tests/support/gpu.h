// Where the ranks of a GPU test run.
#pragma once

#include <catch2/catch.hpp>

#include "base/cuda.h"
#include "runtime/config.h"

namespace dcp::testing {

inline int Devices() {
  cuda::SetUpEnvironment();
  const Result<int> count = cuda::DeviceCount();
  INFO(count.status().ToString());
  REQUIRE(count.ok());  // a GPU test without a GPU has failed
  return *count;
}

// Rank r on device r modulo their number; they exchange by copies and run eager.
inline RanksConfig OnSharedDevices(int ranks) {
  RanksConfig on{.device = RankDevice::kCuda, .share_devices = true};
  const int devices = Devices();
  for (int r = 0; r < ranks; ++r) on.devices.push_back(r % devices);
  return on;
}

// Rank r on device r; they exchange through NCCL.
inline RanksConfig OnOwnDevices(bool graphs) {
  Devices();
  return {.device = RankDevice::kCuda, .graphs = graphs};
}

}  // namespace dcp::testing
