// Runs a check with each instruction set that the machine has, through Highway's dispatch.
#pragma once

#include <hwy/targets.h>

#include <cstdint>

namespace dcp::test {

// The best instruction set first; the last one is the plain code that runs on any machine.
template <class F>
void ForEachTarget(F check) {
  // AVX-512 is never compiled, see kernels/hwy_targets.h.
  constexpr std::int64_t kSets[] = {0, HWY_AVX2, HWY_AVX2 | HWY_SSE4 | HWY_NEON};
  hwy::SetSupportedTargetsForTest(0);
  const std::int64_t all = hwy::SupportedTargets() & ~(HWY_AVX3 | HWY_AVX3_DL);
  for (const std::int64_t without : kSets) {
    const std::int64_t targets = all & ~without;
    if (targets == 0) continue;
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(targets);
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace dcp::test
