// What follows from a server's GetServerInfo for synthetic data and its checks.
#pragma once

#include "client/workload/row_check.h"
#include "client/workload/synthetic.h"
#include "dcp/v1/decode.pb.h"

namespace dcp {

inline SyntheticGeometry GeometryOf(const v1::GetServerInfoResponse& info) {
  return {info.model().heads(), info.model().kv_lora_rank() + info.model().rope_dim(),
          info.model().softmax_scale()};
}

// The limits of design §9.
inline RowLimits LimitsOf(const v1::GetServerInfoResponse& info, v1::DataType output) {
  const bool bf16_partials = info.attention().partial_dtype() != v1::DATA_TYPE_FP32;
  RowLimits limits;
  if (bf16_partials && info.exchange() == v1::EXCHANGE_ALGORITHM_AG_RS) {
    limits.output = 8e-3;
  } else if (!bf16_partials && output == v1::DATA_TYPE_FP32) {
    limits.output = 1e-5;
  }
  return limits;
}

}  // namespace dcp
