// The truth of a row: softmax attention over the whole visible sequence in float64.
#pragma once

#include <span>
#include <vector>

#include "base/bf16.h"

namespace dcp {

struct RowTruth {
  std::vector<double> output;  // [d_v]; zeros when nothing is visible
  double lse = 0;              // base e; -inf when nothing is visible
};

struct TruthGeometry {
  int d_qk = 0;
  int d_v = 0;
  double softmax_scale = 0;
};

// Several rows that see the same tokens, which is cheaper than one at a time.
// queries: [rows, d_qk]; latents: [visible] pointers to [d_qk].
std::vector<RowTruth> AttendRows(const TruthGeometry& geometry, std::span<const Bf16> queries,
                                 std::span<const Bf16* const> latents);

// One row; latents: [visible, d_qk] contiguous.
RowTruth AttendRow(const TruthGeometry& geometry, std::span<const Bf16> query,
                   std::span<const Bf16> latents);

// ||output - truth|| / ||truth||; the plain norm of the output where the truth is zero. NaN when
// the output has a NaN: compare with !(error <= limit).
double RelativeError(std::span<const float> output, std::span<const double> truth);

}  // namespace dcp
