// What device kernels read of the running step, out of device memory: launches take only fixed
// addresses, so that a launch captured once in a graph serves every step.
#pragma once

#include <cstdint>

#include "base/tensor.h"
#include "kernels/lse.h"

namespace dcp {

struct DevicePageCopy {
  std::int32_t from;
  std::int32_t to;
};

// Lies at a fixed device address; the arrays it points to lie behind it, as large as the step
// needs, all uploaded in one copy. All pointers are device addresses.
struct DeviceStep {
  std::int32_t tokens = 0;
  std::int32_t entries = 0;
  std::int32_t copies = 0;
  std::int32_t table_stride = 0;                // pages of a row of block_table
  std::int64_t kv_offset = 0;                   // elements from the pool's base to the layer
  const std::int32_t* bounds = nullptr;         // [ranks, tokens] local keys token t sees on a rank
  const std::int32_t* block_table = nullptr;    // [entries, table_stride] pages
  const std::int64_t* slots = nullptr;          // [tokens] page * page_tokens + slot, -1: elsewhere
  const DevicePageCopy* page_copies = nullptr;  // [copies]
  const std::byte* plan = nullptr;              // what AttentionBackend::Plan wrote
  DType output_dtype = DType::kBf16;            // of the merged rows
  LogBase lse_base = LogBase::kE;               // of the merged LSE
  bool has_new_kv = false;
  std::int64_t faulty_rows = 0;  // the merge kernels count up here
};

}  // namespace dcp
