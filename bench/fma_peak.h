// The floating-point peak of this machine, now: what a benchmark's FLOP rate is compared with.
#pragma once

namespace dcp::bench {

struct FmaPeak {
  double gflops = 0;
  double flop_per_tsc_cycle = 0;  // per thread; 0 where there is no time stamp counter
};

// Runs independent f32 fmas on the calling thread; returns the FLOP done.
double RunFmas(int rounds);

// The best of several short runs of independent f32 fmas on `threads` threads at once.
FmaPeak MeasureFmaPeak(int threads);

}  // namespace dcp::bench
