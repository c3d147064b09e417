// cuda_portable with its LSE converted to base 2: a second device backend with another contract,
// for tests that mix bases.
#pragma once

#include "kernels/attention_backend.h"

namespace dcp::test {

BackendEntry CudaPortableBase2();

}  // namespace dcp::test
