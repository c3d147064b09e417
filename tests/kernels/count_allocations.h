// Replaces the program's operator new by one that counts.
#pragma once

#include <cstdint>

namespace dcp::test {

std::int64_t Allocations();  // so far, of all threads

}  // namespace dcp::test
