// Which Highway targets the SIMD sources are compiled for. Include before every Highway header.
//
// The micro-kernels are shaped for 16 registers of at most 8 floats. Wider vectors would need their
// own shapes, so AVX-512 machines run the AVX2 code; scalable vectors cannot be array elements.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
