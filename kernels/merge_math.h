// The arithmetic of merging one row, shared by every place that merges: host vector code and device
// kernels. Bit-exact across them: IEEE add, multiply, divide and explicit fma only, nothing that a
// compiler may contract, no libm transcendental except the final logarithm.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/lse.h"
#include "kernels/merge.h"

namespace dcp::merge_math {

DCP_HD inline bool IsFinite(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

DCP_HD inline float QuietNaN() { return std::bit_cast<float>(0x7fc00000u); }

// B^x for finite x <= 0, within 2e-7 relative; 0 where 2^y < 2^-126.
template <LogBase B>
DCP_HD inline float Exp(float x) {
  float y = x;  // B^x = 2^(y + rest)
  float rest = 0;
  if constexpr (B == LogBase::kE) {
    constexpr float kLog2EHigh = 1.44269502162933349609375f;
    constexpr float kLog2ELow = 1.92596303e-8f;  // log2(e) - kLog2EHigh
    y = std::fma(x, kLog2EHigh, 0.0f);           // a plain product could be contracted below
    rest = std::fma(x, kLog2ELow, std::fma(x, kLog2EHigh, -y));
  }
  if (y < -126.0f) return 0.0f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(y)
  const float shifted = y + kMagic;
  const float f = (y - (shifted - kMagic)) + rest;
  // Minimax polynomial of 2^f on [-1/2, 1/2], relative error 2.6e-9.
  float p = 1.5594677e-4f;
  p = std::fma(p, f, 1.34066438e-3f);
  p = std::fma(p, f, 9.61769298e-3f);
  p = std::fma(p, f, 5.55031055e-2f);
  p = std::fma(p, f, 2.40226528e-1f);
  p = std::fma(p, f, 6.93147215e-1f);
  p = std::fma(p, f, 1.0f);
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000u);
}

// log_B(x) for x >= 1. In double, so that host and device round to the same float.
template <LogBase B>
DCP_HD inline float Log(float x) {
  return static_cast<float>(B == LogBase::kTwo ? std::log2(static_cast<double>(x))
                                               : std::log(static_cast<double>(x)));
}

// The definition behind MergeWeights in merge.h.
template <LogBase B>
DCP_HD inline RowWeights<B> Weights(int ranks, const bool* owned, const Lse<B>* lse,
                                    float* weight) {
  bool any = false;
  bool fault = false;
  float max = 0;
  for (int r = 0; r < ranks; ++r) {
    if (!owned[r]) continue;
    fault |= !IsFinite(lse[r].raw);
    if (!any || lse[r].raw > max) max = lse[r].raw;
    any = true;
  }
  if (!any) return {.lse = {-INFINITY}, .any = false, .fault = false};
  if (fault) {
    for (int r = 0; r < ranks; ++r) {
      if (owned[r]) weight[r] = QuietNaN();
    }
    return {.lse = {QuietNaN()}, .any = true, .fault = true};
  }
  float sum = 0;
  for (int r = 0; r < ranks; ++r) {
    if (!owned[r]) continue;
    weight[r] = Exp<B>(lse[r].raw - max);
    sum += weight[r];
  }
  for (int r = 0; r < ranks; ++r) {
    if (owned[r]) weight[r] = weight[r] / sum;
  }
  return {.lse = {max + Log<B>(sum)}, .any = true, .fault = false};
}

// One element, one rank: ranks in ascending order, acc starting from 0.
DCP_HD inline float Accumulate(float weight, float partial, float acc) {
  return std::fma(weight, partial, acc);
}

// What is stored: every NaN as the same one, since which NaN survives an fma depends on how the
// compiler orders its operands.
DCP_HD inline float Canonical(float x) { return x != x ? QuietNaN() : x; }

}  // namespace dcp::merge_math
