#include "kernels/hwy_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/backends/cpu_simd_kernels.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/backends/cpu_simd_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace dcp::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 8>;
using U32 = hn::Repartition<std::uint32_t, F32>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
constexpr int kGroupVecs = kGroupRows / kLanes;
// Accumulators of a micro-kernel: with two more operands, a broadcast and a mask they fill the 16
// registers of AVX2.
constexpr int kAccumulators = 12;
constexpr int kMaxRowBlock = kAccumulators / 2;  // value kernel: two vectors per row
// Dims between two flushes of a score accumulator. Short chains keep the rounding error of a
// 576-term dot product near that of 96 terms.
constexpr int kSegmentPairs = 48;
constexpr int kLinePairs = 16;  // pairs of dims in a cache line

// A lane holds dims (2i, 2i + 1) as bf16: the low half is the even one.
HWY_INLINE VF EvenDims(VU pairs) { return hn::BitCast(F32(), hn::ShiftLeft<16>(pairs)); }
HWY_INLINE VF OddDims(VU pairs) {
  return hn::BitCast(F32(), hn::And(pairs, hn::Set(U32(), 0xffff0000u)));
}

// Into the second-level cache: the first one is full with queries.
HWY_INLINE void Prefetch(const Bf16* p) { __builtin_prefetch(p, 0, 2); }

HWY_INLINE VU LoadPairs(const Bf16* p) {
  return hn::LoadU(U32(), reinterpret_cast<const std::uint32_t*>(p));
}

HWY_INLINE VU BroadcastPair(const Bf16* p) {
  std::uint32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return hn::Set(U32(), pair);
}

// 2^x for x <= 0: 2^round(x) from the exponent bits, times a minimax polynomial on [-1/2, 1/2].
// NaN stays NaN.
HWY_INLINE VF Exp2Vec(VF x) {
  const F32 d;
  const VF magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: the sum's low bits are round(x)
  const VF shifted = hn::Add(x, magic);
  const VF f = hn::Sub(x, hn::Sub(shifted, magic));
  VF y = hn::Set(d, 1.5594677e-4f);
  y = hn::MulAdd(y, f, hn::Set(d, 1.34066438e-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 9.61769298e-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 5.55031055e-2f));
  y = hn::MulAdd(y, f, hn::Set(d, 2.40226528e-1f));
  y = hn::MulAdd(y, f, hn::Set(d, 6.93147215e-1f));
  y = hn::MulAdd(y, f, hn::Set(d, 1.0f));
  const VU one = hn::Set(U32(), 0x3f800000u);
  const VU power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(U32(), shifted)), one);
  y = hn::Mul(y, hn::BitCast(d, power));
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, -126.0f)), hn::Zero(d), y);
}

// One dim of a pair: acc[k] += query[p] * key[k][p].
template <VF (*kDim)(VU), int kKeys, int kVecs>
HWY_INLINE void AddDims(const Bf16* const (&key)[kKeys], const std::uint32_t* query, int p,
                        VF (&acc)[kKeys][kVecs]) {
  VF q[kVecs];
#pragma GCC unroll 16
  for (int v = 0; v < kVecs; ++v) {
    q[v] = kDim(hn::Load(U32(), query + p * kGroupRows + v * kLanes));
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
    const VF dim = kDim(BroadcastPair(key[k] + 2 * p));
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) acc[k][v] = hn::MulAdd(dim, q[v], acc[k][v]);
  }
}

// scores[k][0 : kVecs * kLanes] = query . keys[k], unscaled. Meanwhile fetches the kKeys keys after
// these, which are the first to be touched of their tile: the hardware does not follow pages.
template <int kKeys, int kVecs>
HWY_NOINLINE void ScoreBlock(const Bf16* const* keys, const std::uint32_t* query, int pairs,
                             float* HWY_RESTRICT scores) {
  const F32 d;
  const Bf16* key[kKeys];
  for (int k = 0; k < kKeys; ++k) key[k] = keys[k];
  for (int begin = 0; begin < pairs; begin += kSegmentPairs) {
    const int end = std::min(begin + kSegmentPairs, pairs);
    for (int k = kKeys; k < 2 * kKeys; ++k) {
      for (int p = begin; p < end; p += kLinePairs) Prefetch(keys[k] + 2 * p);
    }
    VF acc[kKeys][kVecs];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[k][v] = hn::Zero(d);
    }
    // Even and odd dims in two loops: both at once would need more than 16 registers.
    for (int p = begin; p < end; ++p) AddDims<EvenDims>(key, query, p, acc);
    for (int p = begin; p < end; ++p) AddDims<OddDims>(key, query, p, acc);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) {
        float* const s = scores + k * kGroupRows + v * kLanes;
        hn::Store(begin == 0 ? acc[k][v] : hn::Add(hn::Load(d, s), acc[k][v]), d, s);
      }
    }
  }
}

// The block of kKeys keys where possible, then one smaller block for the rest.
template <int kKeys, int kVecs>
HWY_INLINE void ScoreRest(const Bf16* const* keys, int count, const std::uint32_t* query, int pairs,
                          float* scores) {
  if constexpr (kKeys > 0) {
    if (count == kKeys) return ScoreBlock<kKeys, kVecs>(keys, query, pairs, scores);
    ScoreRest<kKeys - 1, kVecs>(keys, count, query, pairs, scores);
  }
}

template <int kVecs>
void ScoreTile(const Bf16* const* keys, int count, const std::uint32_t* query, int pairs,
               float* scores) {
  constexpr int kKeys = std::max(1, kAccumulators / kVecs);
  int k = 0;
  for (; k + kKeys <= count; k += kKeys) {
    ScoreBlock<kKeys, kVecs>(keys + k, query, pairs, scores + k * kGroupRows);
  }
  ScoreRest<kKeys - 1, kVecs>(keys + k, count - k, query, pairs, scores + k * kGroupRows);
}

// Turns the scores of `count` keys, the first of which is key `begin`, into weights 2^(s - max),
// updates max and sum, and writes what the accumulators must be scaled by. With kMasked, rows see
// their own number of keys and the others' weights are undefined to them.
template <bool kMasked>
void SoftmaxTile(const RowGroup& group, int begin, int count, float scale_log2, float* scores,
                 RowState& state, float* rescale) {
  const F32 d;
  const VF scale = hn::Set(d, scale_log2);
  const VF neg_inf = hn::Set(d, -INFINITY);
  for (int lane = 0; lane < group.rows; lane += kLanes) {
    VF visible = hn::Zero(d);  // keys of this tile that the row sees, as a float: they are few
    if constexpr (kMasked) {
      float n[kGroupRows];
      for (int i = 0; i < kLanes; ++i) {
        n[i] = static_cast<float>(std::clamp(group.bounds[lane + i] - begin, 0, count));
      }
      visible = hn::LoadU(d, n);
    }
    VF top = neg_inf;
    for (int k = 0; k < count; ++k) {
      VF s = hn::Load(d, scores + k * kGroupRows + lane);
      if constexpr (kMasked) {
        s = hn::IfThenElse(hn::Lt(hn::Set(d, static_cast<float>(k)), visible), s, neg_inf);
      }
      top = hn::Max(top, s);
    }
    const VF old_max = hn::Load(d, state.max + lane);
    const VF max = hn::Max(old_max, hn::Mul(top, scale));
    // -inf - -inf is NaN: a row that has seen no key yet subtracts 0 instead.
    const VF shift = hn::IfThenElse(hn::Eq(max, neg_inf), hn::Zero(d), max);
    VF sum = hn::Zero(d);
    for (int k = 0; k < count; ++k) {
      float* const s = scores + k * kGroupRows + lane;
      // One rounding: the exponent is exact near the maximum however large the logits are.
      VF weight = Exp2Vec(hn::MulSub(hn::Load(d, s), scale, shift));
      if constexpr (kMasked) {
        weight = hn::IfThenElseZero(hn::Lt(hn::Set(d, static_cast<float>(k)), visible), weight);
      }
      hn::Store(weight, d, s);
      sum = hn::Add(sum, weight);
    }
    const VF factor = Exp2Vec(hn::Sub(old_max, shift));
    hn::Store(factor, d, rescale + lane);
    hn::Store(max, d, state.max + lane);
    hn::Store(hn::MulAdd(hn::Load(d, state.sum + lane), factor, sum), d, state.sum + lane);
  }
}

// acc[r][two vectors] = acc * rescale[r] + sum over keys of weights[k][r] * value(k); without
// `rescale` the sum starts from zero.
template <int kRows>
HWY_INLINE void ValueBlock(const Bf16* const* keys, int count, int dim, const float* weights,
                           const float* rescale, float* HWY_RESTRICT acc, std::size_t stride) {
  const F32 d;
  VF even[kRows];
  VF odd[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (rescale == nullptr) {
      even[r] = hn::Zero(d);
      odd[r] = hn::Zero(d);
    } else {
      const VF factor = hn::Set(d, rescale[r]);
      even[r] = hn::Mul(hn::Load(d, acc + r * stride), factor);
      odd[r] = hn::Mul(hn::Load(d, acc + r * stride + kLanes), factor);
    }
  }
  for (int k = 0; k < count; ++k) {
    const VU pairs = LoadPairs(keys[k] + dim);
    const VF value_even = EvenDims(pairs);
    const VF value_odd = OddDims(pairs);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const VF w = hn::Set(d, weights[k * kGroupRows + r]);
      even[r] = hn::MulAdd(w, value_even, even[r]);
      odd[r] = hn::MulAdd(w, value_odd, odd[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    hn::Store(even[r], d, acc + r * stride);
    hn::Store(odd[r], d, acc + r * stride + kLanes);
  }
}

template <int kRows>
HWY_INLINE void ValueRows(int rows, const Bf16* const* keys, int count, int dim,
                          const float* weights, const float* rescale, float* acc,
                          std::size_t stride) {
  if (rows == kRows) {
    return ValueBlock<kRows>(keys, count, dim, weights, rescale, acc, stride);
  }
  if constexpr (kRows > 1) {
    ValueRows<kRows - 1>(rows, keys, count, dim, weights, rescale, acc, stride);
  }
}

// acc = acc * rescale + weights x values. Keys that only some rows of a block see are added row by
// row, so that a NaN in one of them reaches nobody else.
void ValueTile(const RowGroup& group, const Bf16* const* keys, int begin, int count, int d_v,
               const float* weights, const float* rescale, float* acc) {
  const int blocks = (group.rows + kMaxRowBlock - 1) / kMaxRowBlock;
  const auto stride = static_cast<std::size_t>(d_v);
  int first[kGroupRows + 1];  // first row of each block
  int common[kGroupRows];     // keys that all rows of a block see
  int visible[kGroupRows];    // keys that a row sees
  for (int r = 0; r < group.rows; ++r) visible[r] = std::clamp(group.bounds[r] - begin, 0, count);
  for (int b = 0; b <= blocks; ++b) first[b] = b * group.rows / blocks;
  for (int b = 0; b < blocks; ++b) {
    common[b] = *std::min_element(visible + first[b], visible + first[b + 1]);
  }
  for (int dim = 0; dim < d_v; dim += 2 * kLanes) {
    for (int b = 0; b < blocks; ++b) {
      const int r = first[b];
      ValueRows<kMaxRowBlock>(first[b + 1] - r, keys, common[b], dim, weights + r,
                              rescale == nullptr ? nullptr : rescale + r, acc + r * stride + dim,
                              stride);
    }
  }
  alignas(64) static constexpr float kOne[1] = {1.0f};
  for (int b = 0; b < blocks; ++b) {
    for (int r = first[b]; r < first[b + 1]; ++r) {
      if (visible[r] == common[b]) continue;
      for (int dim = 0; dim < d_v; dim += 2 * kLanes) {
        ValueBlock<1>(keys + common[b], visible[r] - common[b], dim,
                      weights + common[b] * kGroupRows + r, kOne, acc + r * stride + dim, stride);
      }
    }
  }
}

void AttendChunk(const AttendArgs& args, int begin, int end, RowState& state) {
  const RowGroup& group = *args.group;
  const KeyPages& pages = args.pages;
  std::fill_n(state.max, kGroupRows, -INFINITY);
  std::fill_n(state.sum, kGroupRows, 0.0f);
  alignas(64) float rescale[kGroupRows];
  end = std::min(end, group.max_bound);
  // Ends in copies of the last key, for prefetching.
  const Bf16* chunk_keys[kChunkKeys + kAccumulators];
  int page = begin / pages.page_tokens;
  int slot = begin % pages.page_tokens;
  for (int k = 0; k < end - begin; ++k) {
    chunk_keys[k] = pages.kv + pages.table[page] * pages.page_stride +
                    static_cast<std::int64_t>(slot) * args.d_qk;
    if (++slot == pages.page_tokens) {
      slot = 0;
      ++page;
    }
  }
  if (end > begin)
    std::fill_n(chunk_keys + (end - begin), kAccumulators, chunk_keys[end - begin - 1]);
  for (int tile = begin; tile < end; tile += kTileKeys) {
    const Bf16* const* const keys = chunk_keys + (tile - begin);
    const int count = std::min(kTileKeys, end - tile);
    if (group.rows > kLanes) {
      ScoreTile<kGroupVecs>(keys, count, args.query, args.d_qk / 2, args.scores);
    } else {
      ScoreTile<1>(keys, count, args.query, args.d_qk / 2, args.scores);
    }
    if (group.min_bound >= tile + count) {
      SoftmaxTile<false>(group, tile, count, args.scale_log2, args.scores, state, rescale);
    } else {
      SoftmaxTile<true>(group, tile, count, args.scale_log2, args.scores, state, rescale);
    }
    ValueTile(group, keys, tile, count, args.d_v, args.scores, tile == begin ? nullptr : rescale,
              state.acc);
  }
}

void MergeChunk(const RowGroup& group, int begin, int d_v, const RowState& chunk, RowState& into) {
  const F32 d;
  const VF neg_inf = hn::Set(d, -INFINITY);
  alignas(64) float keep[kGroupRows];
  alignas(64) float add[kGroupRows];
  alignas(64) float max[kGroupRows];
  for (int lane = 0; lane < group.rows; lane += kLanes) {
    const VF a = hn::Load(d, into.max + lane);
    const VF b = hn::Load(d, chunk.max + lane);
    const VF top = hn::Max(a, b);
    const VF shift = hn::IfThenElse(hn::Eq(top, neg_inf), hn::Zero(d), top);
    hn::Store(top, d, max + lane);
    hn::Store(Exp2Vec(hn::Sub(a, shift)), d, keep + lane);
    hn::Store(Exp2Vec(hn::Sub(b, shift)), d, add + lane);
  }
  for (int r = 0; r < group.rows; ++r) {
    if (group.bounds[r] <= begin) continue;
    into.max[r] = max[r];
    const VF keep_r = hn::Set(d, keep[r]);
    const VF add_r = hn::Set(d, add[r]);
    const VF sum =
        hn::MulAdd(hn::Set(d, chunk.sum[r]), add_r, hn::Mul(hn::Set(d, into.sum[r]), keep_r));
    into.sum[r] = hn::GetLane(sum);
    const float* const from = chunk.acc + static_cast<std::size_t>(r) * d_v;
    float* const to = into.acc + static_cast<std::size_t>(r) * d_v;
    for (int i = 0; i < d_v; i += kLanes) {
      const VF kept = hn::Mul(hn::Load(d, to + i), keep_r);
      hn::Store(hn::MulAdd(hn::Load(d, from + i), add_r, kept), d, to + i);
    }
  }
}

// Every NaN becomes the same one: which of two NaNs survives an operation is no property of the
// row.
HWY_INLINE VF OneNaN(VF x) {
  const U32 d;
  const VF quiet = hn::BitCast(F32(), hn::Set(d, 0x7fc00000u));
  return hn::IfThenElse(hn::Ne(x, x), quiet, x);
}

// bf16 bits of x in the upper half, rounded to nearest even; x is finite, infinite or OneNaN's.
HWY_INLINE VU RoundToBf16(VF x) {
  const U32 d;
  const VU bits = hn::BitCast(d, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff)));
}

void WriteRow(const float* acc, float inverse, int d_v, DType dtype, std::byte* out) {
  const F32 d;
  const U32 du;
  const VF factor = hn::Set(d, inverse);
  for (int dim = 0; dim < d_v; dim += 2 * kLanes) {
    const VF even = OneNaN(hn::Mul(hn::Load(d, acc + dim), factor));
    const VF odd = OneNaN(hn::Mul(hn::Load(d, acc + dim + kLanes), factor));
    if (dtype == DType::kBf16) {
      const VU pairs = hn::Or(hn::ShiftRight<16>(RoundToBf16(even)),
                              hn::And(RoundToBf16(odd), hn::Set(du, 0xffff0000u)));
      hn::StoreU(pairs, du, reinterpret_cast<std::uint32_t*>(out) + dim / 2);
    } else {
      hn::StoreInterleaved2(even, odd, d, reinterpret_cast<float*>(out) + dim);
    }
  }
}

void Exp2(const float* x, float* y, std::size_t n) {
  const F32 d;
  float in[kLanes];
  float out[kLanes];
  for (std::size_t i = 0; i < n; i += kLanes) {
    const std::size_t m = std::min<std::size_t>(kLanes, n - i);
    std::fill_n(in, kLanes, 0.0f);
    std::copy_n(x + i, m, in);
    hn::StoreU(Exp2Vec(hn::LoadU(d, in)), d, out);
    std::copy_n(out, m, y + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dcp::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dcp::simd {

HWY_EXPORT(AttendChunk);
HWY_EXPORT(MergeChunk);
HWY_EXPORT(WriteRow);
HWY_EXPORT(Exp2);

void PackQueries(const Bf16* query, int rows, int d_qk, std::uint32_t* packed) {
  for (int p = 0; p < d_qk / 2; ++p) {
    for (int r = 0; r < kGroupRows; ++r) {
      std::uint32_t pair = 0;
      if (r < rows) std::memcpy(&pair, query + r * d_qk + 2 * p, sizeof(pair));
      packed[p * kGroupRows + r] = pair;
    }
  }
}

void AttendChunk(const AttendArgs& args, int begin, int end, RowState& state) {
  HWY_DYNAMIC_DISPATCH(AttendChunk)(args, begin, end, state);
}

void MergeChunk(const RowGroup& group, int begin, int d_v, const RowState& chunk, RowState& into) {
  HWY_DYNAMIC_DISPATCH(MergeChunk)(group, begin, d_v, chunk, into);
}

void WriteRows(const RowGroup& group, int d_v, const RowState& state, DType dtype,
               std::byte* const* out, std::byte* const* lse) {
  for (int r = 0; r < group.rows; ++r) {
    float row_lse = -INFINITY;
    if (group.bounds[r] == 0) {
      std::memset(out[r], 0, static_cast<std::size_t>(d_v) * SizeOf(dtype));
    } else {
      HWY_DYNAMIC_DISPATCH(WriteRow)
      (state.acc + static_cast<std::size_t>(r) * d_v, 1.0f / state.sum[r], d_v, dtype, out[r]);
      row_lse = state.max[r] + std::log2(state.sum[r]);
      if (std::isnan(row_lse)) row_lse = std::numeric_limits<float>::quiet_NaN();
    }
    std::memcpy(lse[r], &row_lse, sizeof(row_lse));
  }
}

void Exp2(const float* x, float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(Exp2)(x, y, n); }

}  // namespace dcp::simd
#endif  // HWY_ONCE
