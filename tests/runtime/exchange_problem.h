// A merge whose partials are given, and its run through every communicator of the program.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/exchange.h"

namespace dcp::testing {

// What each rank's attention is said to have produced.
struct Problem {
  ExchangeShape shape;
  int tokens = 1;
  LogBase base = LogBase::kE;
  std::vector<std::vector<float>> out;  // [ranks][tokens, heads, d_v]
  std::vector<std::vector<float>> lse;  // [ranks][tokens, heads] in `base`
  std::vector<std::int32_t> bounds;     // [ranks, tokens]

  std::size_t Row(int t, int h) const { return static_cast<std::size_t>(t * shape.heads + h); }
};

struct Answer {
  std::vector<float> out;  // [tokens, heads, d_v]
  std::vector<float> lse;  // [tokens, heads] base e
  std::int64_t faulty_rows = 0;
};

// Runs it on a thread per rank; fails the test on an error.
Answer RunExchangeProblem(ExchangeKind kind, const Problem& p);

// Writes rank r's partials where the exchange wants them, in host memory.
void FillPartials(const Problem& p, std::size_t r, const PartialLayout& layout);

}  // namespace dcp::testing
