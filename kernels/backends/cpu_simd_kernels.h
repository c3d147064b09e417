// The vector code of cpu_simd, one function per step, each picking the CPU's instruction set at run
// time. cpu_simd.cc decides what is computed where; here is only arithmetic on one row group.
//
// A row group is up to kGroupRows consecutive (token, head) rows of one entry. Keys are read as
// bf16 straight from their pages: a 32-bit lane holds two neighbouring dims, which a shift and a
// mask turn into two floats, so there is no conversion pass and no f32 copy of the KV.
//   scores  rows lie in vector lanes, a key's dims are broadcast:  S[key][row]
//   values  dims lie in vector lanes, weights are broadcast:       acc[row][dim]
//
// The bits of a row depend on its own query, keys and bound only: every row has its own chain of
// fmas, in key order, that starts anew at each multiple of kChunkKeys; no instruction on behalf of
// this row ever reads a key beyond its bound, except to compute scores that are then dropped.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "base/tensor.h"

namespace dcp::simd {

inline constexpr int kGroupRows = 16;
inline constexpr int kTileKeys = 64;    // keys between two updates of the running maximum
inline constexpr int kChunkKeys = 512;  // keys that may be computed apart and merged
static_assert(kChunkKeys % kTileKeys == 0);

// Softmax state of a row group over some keys. `acc` is not normalised, and within 16 dims its
// order is private to the kernels.
struct RowState {
  alignas(64) float max[kGroupRows];  // of scale * log2(e) * q.k
  alignas(64) float sum[kGroupRows];  // of 2^(score - max)
  float* acc;                         // [kGroupRows, d_v] f32, 64-byte aligned
};

struct RowGroup {
  int rows;                            // used rows, 1..kGroupRows
  alignas(64) int bounds[kGroupRows];  // visible keys; unused rows repeat the largest
  int min_bound;
  int max_bound;
};

// The pages of one entry in one layer.
struct KeyPages {
  const Bf16* kv;
  std::int64_t page_stride;
  const std::int32_t* table;
  int page_tokens;
};

struct AttendArgs {
  const std::uint32_t* query;  // packed by PackQueries
  float* scores;               // scratch, [kTileKeys, kGroupRows], 64-byte aligned
  const RowGroup* group;
  KeyPages pages;
  int d_qk;
  int d_v;
  float scale_log2;  // softmax_scale * log2(e)
};

// query [rows, d_qk] bf16 -> packed [d_qk / 2, kGroupRows] pairs of dims; unused rows are zero.
void PackQueries(const Bf16* query, int rows, int d_qk, std::uint32_t* packed);

// `state` = attention over the keys [begin, min(end, max_bound)); begin is a multiple of
// kChunkKeys, end - begin at most kChunkKeys. Rows without a key there get max -inf, sum 0, acc 0.
void AttendChunk(const AttendArgs& args, int begin, int end, RowState& state);

// into = into and `chunk`, whose keys start at `begin`; a row that sees none of them stays as it
// is.
void MergeChunk(const RowGroup& group, int begin, int d_v, const RowState& chunk, RowState& into);

// Normalises and writes rows: out[i] -> [d_v] bf16 | f32, lse[i] -> base-2 LSE. Rows with no keys
// get output 0 and LSE -inf.
void WriteRows(const RowGroup& group, int d_v, const RowState& state, DType dtype,
               std::byte* const* out, std::byte* const* lse);

// y[i] = 2^x[i] for x[i] <= 0, as AttendChunk computes it; 0 below -126. For tests.
void Exp2(const float* x, float* y, std::size_t n);

}  // namespace dcp::simd
