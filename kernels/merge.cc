#include "kernels/hwy_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/merge.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include <cstring>

#include "base/check.h"
#include "kernels/merge.h"
#include "kernels/merge_math.h"

HWY_BEFORE_NAMESPACE();
namespace dcp {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 8>;
using U32 = hn::Repartition<std::uint32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Elements are stored at byte addresses (`p` + element i); messages need not be aligned.
template <class T>
HWY_INLINE float LoadOne(const std::byte* p, int i) {
  T x;
  std::memcpy(&x, p + i * sizeof(T), sizeof(T));
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    return ToFloat(x);
  } else {
    return x;
  }
}

// Returns what a reader will see, so that a value that rounds to infinity is noticed.
template <class T>
HWY_INLINE float StoreOne(float x, std::byte* p, int i) {
  x = merge_math::Canonical(x);
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    const Bf16 rounded = ToBf16(x);
    std::memcpy(p + i * sizeof(T), &rounded, sizeof(T));
    return ToFloat(rounded);
  } else {
    std::memcpy(p + i * sizeof(T), &x, sizeof(T));
    return x;
  }
}

template <class T>
HWY_INLINE VF LoadVec(const std::byte* p, int i) {
  const std::byte* const at = p + i * sizeof(T);
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    const auto bits = hn::LoadU(U16(), reinterpret_cast<const std::uint16_t*>(at));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
  } else {
    return hn::LoadU(F32(), reinterpret_cast<const float*>(at));
  }
}

// StoreOne for a vector.
template <class T>
HWY_INLINE VF StoreVec(VF x, std::byte* p, int i) {
  const U32 d;
  std::byte* const at = p + i * sizeof(T);
  x = hn::IfThenElse(hn::Ne(x, x), hn::BitCast(F32(), hn::Set(d, 0x7fc00000u)), x);
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    const VU bits = hn::BitCast(d, x);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
    const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff))));
    hn::StoreU(hn::TruncateTo(U16(), rounded), U16(), reinterpret_cast<std::uint16_t*>(at));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(rounded));
  } else {
    hn::StoreU(x, F32(), reinterpret_cast<float*>(at));
    return x;
  }
}

// out = sum of weight[i] * source[i], in order. Returns false if some element is not finite.
template <class In, class Out>
bool CombineRow(int count, const std::byte* const* source, const float* weight, int d_v,
                std::byte* out) {
  int i = 0;
  bool finite = true;
  // Only with fma instructions has the vector code the bits of the scalar code.
  if constexpr (HWY_NATIVE_FMA != 0) {
    const F32 d;
    VF poison = hn::Zero(d);  // becomes NaN if an element is not finite
    for (; i + kLanes <= d_v; i += kLanes) {
      VF acc = hn::Zero(d);
      for (int r = 0; r < count; ++r) {
        acc = hn::MulAdd(hn::Set(d, weight[r]), LoadVec<In>(source[r], i), acc);
      }
      poison = hn::MulAdd(StoreVec<Out>(acc, out, i), hn::Zero(d), poison);
    }
    finite = hn::AllTrue(d, hn::Eq(poison, poison));
  }
  for (; i < d_v; ++i) {
    float acc = 0;
    for (int r = 0; r < count; ++r) {
      acc = merge_math::Accumulate(weight[r], LoadOne<In>(source[r], i), acc);
    }
    finite &= merge_math::IsFinite(StoreOne<Out>(acc, out, i));
  }
  return finite;
}

template <class T>
void ScaleRow(float weight, int d_v, std::byte* row) {
  const F32 d;
  int i = 0;
  for (; i + kLanes <= d_v; i += kLanes) {
    StoreVec<T>(hn::Mul(LoadVec<T>(row, i), hn::Set(d, weight)), row, i);
  }
  for (; i < d_v; ++i) StoreOne<T>(LoadOne<T>(row, i) * weight, row, i);
}

template <class T>
void FillNaN(int d_v, std::byte* out) {
  for (int i = 0; i < d_v; ++i) StoreOne<T>(merge_math::QuietNaN(), out, i);
}

template <LogBase B, class In, class Out>
std::int64_t MergeRows(const MergeArgs& args) {
  std::int64_t faults = 0;
  bool owned[kMaxRanks];
  Lse<B> lse[kMaxRanks];
  float weight[kMaxRanks];
  const std::byte* source[kMaxRanks];
  for (int t = 0; t < args.tokens; ++t) {
    for (int r = 0; r < args.ranks; ++r) owned[r] = args.bounds[r * args.bounds_stride + t] > 0;
    for (int h = 0; h < args.heads; ++h) {
      const std::int64_t row = std::int64_t{t} * args.heads + h;
      for (int r = 0; r < args.ranks; ++r) {
        if (owned[r]) std::memcpy(&lse[r], args.sources[r].lse + row * 4, sizeof(lse[r]));
      }
      const RowWeights<B> merged = merge_math::Weights<B>(args.ranks, owned, lse, weight);
      std::byte* const out =
          args.output + (t * args.output_token_stride + std::int64_t{h} * args.d_v) *
                            static_cast<std::int64_t>(sizeof(Out));
      if (merged.fault) {
        FillNaN<Out>(args.d_v, out);
        ++faults;
      } else {
        int owners = 0;
        for (int r = 0; r < args.ranks; ++r) {
          if (!owned[r]) continue;
          weight[owners] = weight[r];
          source[owners++] =
              args.sources[r].out + row * args.d_v * static_cast<std::int64_t>(sizeof(In));
        }
        if (!CombineRow<In, Out>(owners, source, weight, args.d_v, out)) ++faults;
      }
      if (args.lse != nullptr) {
        args.lse[t * args.lse_token_stride + h] = WithLogBase(args.lse_base, [&](auto base) {
          return LseCast<decltype(base)::value>(merged.lse).raw;
        });
      }
    }
  }
  return faults;
}

template <LogBase B>
std::int64_t MergeDtypes(const MergeArgs& args) {
  const bool bf16_out = args.output_dtype == DType::kBf16;
  if (args.partial_dtype == DType::kBf16) {
    return bf16_out ? MergeRows<B, Bf16, Bf16>(args) : MergeRows<B, Bf16, float>(args);
  }
  return bf16_out ? MergeRows<B, float, Bf16>(args) : MergeRows<B, float, float>(args);
}

template <LogBase B, class T>
void ScaleRows(const ScaleArgs& args) {
  bool owned[kMaxRanks];
  Lse<B> lse[kMaxRanks];
  float weight[kMaxRanks];
  const std::int64_t row_bytes = args.d_v * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t rows = std::int64_t{args.tokens} * args.heads_per_group;
  for (int t = 0; t < args.tokens; ++t) {
    for (int r = 0; r < args.ranks; ++r) owned[r] = args.bounds[r * args.bounds_stride + t] > 0;
    for (int g = 0; g < args.groups; ++g) {
      for (int h = 0; h < args.heads_per_group; ++h) {
        const std::int64_t row = std::int64_t{t} * args.heads_per_group + h;
        std::byte* const partial = args.partial + g * args.group_stride + row * row_bytes;
        if (!owned[args.rank]) {
          std::memset(partial, 0, static_cast<std::size_t>(row_bytes));
          continue;
        }
        for (int r = 0; r < args.ranks; ++r) {
          if (!owned[r]) continue;
          const std::int64_t item = (std::int64_t{r} * args.groups + g) * rows + row;
          std::memcpy(&lse[r], args.lse + item * 4, sizeof(lse[r]));
        }
        merge_math::Weights<B>(args.ranks, owned, lse, weight);
        ScaleRow<T>(weight[args.rank], args.d_v, partial);
      }
    }
  }
}

template <LogBase B>
void ScaleDtypes(const ScaleArgs& args) {
  args.partial_dtype == DType::kBf16 ? ScaleRows<B, Bf16>(args) : ScaleRows<B, float>(args);
}

// Highway's tables take plain functions.
std::int64_t MergeE(const MergeArgs& args) { return MergeDtypes<LogBase::kE>(args); }
std::int64_t MergeTwo(const MergeArgs& args) { return MergeDtypes<LogBase::kTwo>(args); }
void ScaleE(const ScaleArgs& args) { ScaleDtypes<LogBase::kE>(args); }
void ScaleTwo(const ScaleArgs& args) { ScaleDtypes<LogBase::kTwo>(args); }

}  // namespace HWY_NAMESPACE
}  // namespace dcp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dcp {

HWY_EXPORT(MergeE);
HWY_EXPORT(MergeTwo);
HWY_EXPORT(ScaleE);
HWY_EXPORT(ScaleTwo);

template <LogBase B>
std::int64_t MergePartials(const MergeArgs& args) {
  DCP_CHECK(args.ranks >= 1 && args.ranks <= kMaxRanks);
  if constexpr (B == LogBase::kE) {
    return HWY_DYNAMIC_DISPATCH(MergeE)(args);
  } else {
    return HWY_DYNAMIC_DISPATCH(MergeTwo)(args);
  }
}

template <LogBase B>
RowWeights<B> MergeWeights(int ranks, const bool* owned, const Lse<B>* lse, float* weight) {
  return merge_math::Weights<B>(ranks, owned, lse, weight);
}

template <LogBase B>
void ScalePartial(const ScaleArgs& args) {
  DCP_CHECK(args.ranks >= 1 && args.ranks <= kMaxRanks);
  if constexpr (B == LogBase::kE) {
    HWY_DYNAMIC_DISPATCH(ScaleE)(args);
  } else {
    HWY_DYNAMIC_DISPATCH(ScaleTwo)(args);
  }
}

template std::int64_t MergePartials<LogBase::kE>(const MergeArgs&);
template std::int64_t MergePartials<LogBase::kTwo>(const MergeArgs&);
template RowWeights<LogBase::kE> MergeWeights<LogBase::kE>(int, const bool*,
                                                           const Lse<LogBase::kE>*, float*);
template RowWeights<LogBase::kTwo> MergeWeights<LogBase::kTwo>(int, const bool*,
                                                               const Lse<LogBase::kTwo>*, float*);
template void ScalePartial<LogBase::kE>(const ScaleArgs&);
template void ScalePartial<LogBase::kTwo>(const ScaleArgs&);

}  // namespace dcp
#endif  // HWY_ONCE
