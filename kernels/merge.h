// Merging partial attention results by their log-sum-exps: the only place where partials meet.
//
//   w_r = B^(lse_r - max) / sum_r B^(lse_r - max)     out = sum_r w_r * o_r     lse = max + log_B
//   sum
//
// Rank order is fixed and every multiply-add is an explicit fma, so each path and each replay gives
// the same bits. Which ranks take part is decided by `owned`, never by the bits of an LSE: a rank
// that owns no key of the row is never read (its buffers may hold anything); one that owns keys is
// always read, also at weight 0. A rank that owns keys but reports a non-finite LSE (its empty mark
// included) makes the row NaN. No rank owns keys: output 0, LSE -inf.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "base/tensor.h"
#include "kernels/lse.h"

namespace dcp {

inline constexpr int kMaxRanks = 64;

// One message per source rank, all of one shape: partial [tokens, heads, d_v] and lse
// [tokens, heads] of the heads merged here.
struct MergeSource {
  const std::byte* out;  // [tokens, heads, d_v] bf16 | f32
  const std::byte* lse;  // [tokens, heads] f32 in the declared base
};

struct MergeArgs {
  const MergeSource* sources = nullptr;  // [ranks]
  const std::int32_t* bounds = nullptr;  // [ranks, bounds_stride]: local keys token t sees there
  std::int64_t bounds_stride = 0;
  int ranks = 0;
  int tokens = 0;
  int heads = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
  DType output_dtype = DType::kBf16;
  std::byte* output = nullptr;           // (t, h, :) at t * output_token_stride + h * d_v elements
  std::int64_t output_token_stride = 0;  // elements
  float* lse = nullptr;                  // null: not wanted; (t, h) at t * lse_token_stride + h
  std::int64_t lse_token_stride = 0;
  LogBase lse_base = LogBase::kE;  // base of `lse`; the sources' base is the template parameter
};

// Returns the number of rows (token, head) with a fault: an owner's LSE non-finite, or a non-finite
// output.
template <LogBase B>
std::int64_t MergePartials(const MergeArgs& args);
extern template std::int64_t MergePartials<LogBase::kE>(const MergeArgs&);
extern template std::int64_t MergePartials<LogBase::kTwo>(const MergeArgs&);

// The weights of one row. `lse[r]` is read only where owned[r]; weight[r] is written only there.
template <LogBase B>
struct RowWeights {
  Lse<B> lse;  // merged; -inf when nobody owns a key
  bool any;    // some rank owns a key
  bool fault;  // an owner's LSE is not finite: every weight is NaN
};
template <LogBase B>
RowWeights<B> MergeWeights(int ranks, const bool* owned, const Lse<B>* lse, float* weight);
extern template RowWeights<LogBase::kE> MergeWeights<LogBase::kE>(int, const bool*,
                                                                  const Lse<LogBase::kE>*, float*);
extern template RowWeights<LogBase::kTwo> MergeWeights<LogBase::kTwo>(int, const bool*,
                                                                      const Lse<LogBase::kTwo>*,
                                                                      float*);

// ag_rs, first half: scales this rank's own partial in place by its weight in each row, for all
// heads, given the LSEs of all ranks; rows in which it owns no key become 0 and are not read.
struct ScaleArgs {
  std::byte* partial = nullptr;          // [groups][tokens, heads_per_group, d_v]
  std::int64_t group_stride = 0;         // bytes
  const std::byte* lse = nullptr;        // [ranks][groups][tokens, heads_per_group] f32, contiguous
  const std::int32_t* bounds = nullptr;  // as in MergeArgs
  std::int64_t bounds_stride = 0;
  int rank = 0;
  int ranks = 0;
  int groups = 0;
  int tokens = 0;
  int heads_per_group = 0;
  int d_v = 0;
  DType partial_dtype = DType::kBf16;
};
template <LogBase B>
void ScalePartial(const ScaleArgs& args);
extern template void ScalePartial<LogBase::kE>(const ScaleArgs&);
extern template void ScalePartial<LogBase::kTwo>(const ScaleArgs&);

}  // namespace dcp
