// Attention problems with known answers: inputs that discriminate, a float64 softmax written apart
// from every backend, and a way to run a backend on them that surrounds its inputs with poison.
#pragma once

#include <catch2/catch.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"

namespace dcp::test {

struct Dims {
  int d_qk;
  int d_v;
};

// What a program checks; defined by one of host_backends.cc and cuda_backends.cc, which it links.
std::span<const BackendEntry> BackendsUnderTest();

inline bool Serves(const BackendEntry& entry, Dims dims, int page_tokens) {
  const AttentionGeometry geometry{.heads = 1,
                                   .d_qk = dims.d_qk,
                                   .d_v = dims.d_v,
                                   .page_tokens = page_tokens,
                                   .softmax_scale = 1};
  return Supports(entry, geometry, entry.caps.arch).ok();
}

// Calls f(entry) for each of them that can serve these dims, in pages of 16 and of 64 keys at
// least.
template <class F>
void ForEachBackend(Dims dims, F f) {
  int served = 0;
  for (const BackendEntry& entry : BackendsUnderTest()) {
    if (!Serves(entry, dims, 16) || !Serves(entry, dims, 64)) continue;
    INFO("backend " << entry.name << ", dims " << dims.d_qk << "/" << dims.d_v);
    f(entry);
    ++served;
  }
  REQUIRE(served > 0);
}

// Tokens of each entry, and how many local keys each of them sees.
using Bounds = std::vector<std::vector<int>>;

struct ProblemSpec {
  int heads = 16;
  int d_qk = 576;
  int d_v = 512;
  Bounds bounds;
  double offset = 4;       // common part of all logits, in nats
  double query_scale = 1;  // other than 1: any logits, without the promise below
  unsigned seed = 1;
};

// Every row that sees at least 3 keys gives at least 5 % of its weight to its last key and 5 % to
// one earlier key, and would give 5 % to the key just beyond its bound; the constructor checks it.
class AttentionProblem {
 public:
  struct Row {
    double lse;  // base e
    std::vector<double> out;
  };

  explicit AttentionProblem(const ProblemSpec& spec);

  int tokens() const { return static_cast<int>(bound.size()); }
  const Row& row(int token, int head) const { return rows_[token * heads + head]; }
  // Recomputes the answers after query, keys or bounds were changed by hand.
  void Solve();

  // Part of the same problem: one entry's one token with only the keys it sees; some heads.
  AttentionProblem OnlyToken(int token) const;
  AttentionProblem OnlyHeads(int first, int count) const;

  int heads;
  int d_qk;
  int d_v;
  double softmax_scale;
  std::vector<std::int32_t> entry_begin;
  std::vector<std::int32_t> bound;
  std::vector<Bf16> query;              // [tokens, heads, d_qk]
  std::vector<std::vector<Bf16>> keys;  // per entry [largest bound, d_qk]

 private:
  Row SolveRow(int entry, int token, int head) const;
  void CheckDiscriminates(int planted, int entry) const;

  std::vector<Row> rows_;
};

struct RunOptions {
  int page_tokens = 16;
  DType partial_dtype = DType::kF32;
  int head_groups = 1;
  WorkerPool* pool = nullptr;
  int repeat = 1;  // on one backend object; the last result counts
};

// [tokens, heads, ...] whatever the layout that the backend wrote.
struct Partial {
  std::vector<float> out;
  std::vector<float> lse;
};

AttentionGeometry GeometryOf(const AttentionProblem& problem, const RunOptions& options);

// Device backends are made for device 0 and reached through StagedAttention. Unused slots and pages
// are NaN, block tables end in garbage, outputs start as junk.
Partial RunBackend(const BackendEntry& entry, const AttentionProblem& problem,
                   const RunOptions& options);

// Empty if the partial is right within the limits of docs/design.md §9; else what is wrong. Device
// backends round weights to bf16, whatever they write.
std::string Mismatch(const BackendEntry& entry, const AttentionProblem& problem,
                     const Partial& partial, DType partial_dtype);

// Rows of `part`, compared bit by bit with the rows of `whole` that start at (token, head).
bool SameBits(const AttentionProblem& part_problem, const Partial& part,
              const AttentionProblem& whole_problem, const Partial& whole, int token, int head);

}  // namespace dcp::test
