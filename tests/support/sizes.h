// How much a test that walks many sizes walks.
#pragma once

#include <cstdlib>

namespace dcp::testing {

// DCP_TEST_SMALL is set: a few sizes of every kind, for tools that make programs many times slower.
inline bool SmallSizes() { return std::getenv("DCP_TEST_SMALL") != nullptr; }

}  // namespace dcp::testing
