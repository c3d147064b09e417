// A rank port that gives its rank nothing but bytes: every message is copied into memory of its
// own, as if it had crossed a network, and the rank's outputs are copied back. A test that passes
// through it shows that the port's messages are complete.
#pragma once

#include "runtime/rank_port.h"

namespace dcp::testing {

Result<std::unique_ptr<RankPort>> MakeSerialisingPort(const RankSetup& setup);

}  // namespace dcp::testing
