// The start-up check that a backend keeps the contract of its table line.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/attention_backend.h"

namespace dcp {

// Runs `backend` (made from `entry` for `setup`) on a small problem whose answer is known in closed
// form and by cpu_reference: rows with keys, an empty row, a page tail full of NaN, LSE buffers
// pre-filled with junk. Compares LSE base, empty mark, LSE values and outputs.
// Errors: BACKEND_CONTRACT naming the backend, what it declares and what it did.
// Allocates; call at start only. Device backends are reached through StagedAttention.
Status ProbeContract(const BackendEntry& entry, const BackendSetup& setup,
                     AttentionBackend& backend);

}  // namespace dcp
