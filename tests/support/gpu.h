// Where the ranks of a GPU test run.
#pragma once

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "kernels/attention_backend.h"
#include "runtime/config.h"
#include "tests/support/cluster.h"

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

// Names of the table's lines for GPUs that support what the options ask for.
inline std::vector<std::string> CudaBackends(const ClusterOptions& options) {
  std::vector<std::string> names;
  for (const BackendEntry& entry : Backends()) {
    if (Supports(entry, MakeConfig(options).Geometry(), Arch::kCuda).ok()) {
      names.emplace_back(entry.name);
    }
  }
  REQUIRE(!names.empty());
  return names;
}

}  // namespace dcp::testing
