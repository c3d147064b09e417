// Compiled with -fmad=false: no product and sum becomes an fma that the host does not do.
#include <cuda_runtime.h>

#include <initializer_list>
#include <string>
#include <type_traits>

#include "base/bf16.h"
#include "base/cuda.h"
#include "kernels/merge_cuda.h"
#include "kernels/merge_math.h"

namespace dcp {
namespace {

constexpr int kWarps = 8;  // of a thread block; a warp does a row
constexpr int kThreads = kWarps * 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// What a warp knows of its row.
template <LogBase B>
struct RowSources {
  bool owned[kMaxRanks];
  Lse<B> lse[kMaxRanks];
  float weight[kMaxRanks];
  RowWeights<B> merged;
};

__device__ int Warp() { return static_cast<int>(threadIdx.x) / 32; }
__device__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ std::int64_t Row() { return std::int64_t{blockIdx.x} * kWarps + Warp(); }

// Elements i to i + kItems - 1 of a row.
template <class T, int kItems>
struct Pack {
  union {
    T items[kItems];
    std::uint32_t words[kItems * sizeof(T) / 4];
  };
};

template <class T, int kItems>
__device__ Pack<T, kItems> LoadPack(const std::byte* row, int i) {
  Pack<T, kItems> pack;
  const std::byte* const at = row + std::size_t(i) * sizeof(T);
  if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
    for (std::size_t k = 0; k < sizeof(pack) / 16; ++k) {
      const uint4 v = reinterpret_cast<const uint4*>(at)[k];
      pack.words[4 * k] = v.x;
      pack.words[4 * k + 1] = v.y;
      pack.words[4 * k + 2] = v.z;
      pack.words[4 * k + 3] = v.w;
    }
  } else {
#pragma unroll
    for (std::size_t k = 0; k < sizeof(pack) / 4; ++k) {
      pack.words[k] = reinterpret_cast<const std::uint32_t*>(at)[k];
    }
  }
  return pack;
}

template <class T, int kItems>
__device__ void StorePack(const Pack<T, kItems>& pack, std::byte* row, int i) {
  std::byte* const at = row + std::size_t(i) * sizeof(T);
  if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
    for (std::size_t k = 0; k < sizeof(pack) / 16; ++k) {
      reinterpret_cast<uint4*>(at)[k] = make_uint4(pack.words[4 * k], pack.words[4 * k + 1],
                                                   pack.words[4 * k + 2], pack.words[4 * k + 3]);
    }
  } else {
#pragma unroll
    for (std::size_t k = 0; k < sizeof(pack) / 4; ++k) {
      reinterpret_cast<std::uint32_t*>(at)[k] = pack.words[k];
    }
  }
}

__device__ float AsFloat(Bf16 x) { return ToFloat(x); }
__device__ float AsFloat(float x) { return x; }

// Stores floats as T. False if a reader will see something that is not finite.
template <class T, int kItems>
__device__ bool StoreFloats(const float (&x)[kItems], std::byte* row, int i) {
  Pack<T, kItems> pack;
  bool finite = true;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if constexpr (sizeof(T) == sizeof(Bf16)) {
      pack.items[k] = ToBf16(x[k]);
    } else {
      pack.items[k] = x[k];
    }
    finite &= merge_math::IsFinite(AsFloat(pack.items[k]));
  }
  StorePack(pack, row, i);
  return finite;
}

template <int kItems>
__device__ bool StoreOutput(const float (&x)[kItems], std::byte* output, std::int64_t row, int d_v,
                            int i, DType dtype) {
  if (dtype == DType::kBf16) {
    return StoreFloats<Bf16>(x, output + row * d_v * std::int64_t{sizeof(Bf16)}, i);
  }
  return StoreFloats<float>(x, output + row * d_v * std::int64_t{sizeof(float)}, i);
}

// Fills `row` for a token from its bounds [ranks, tokens] and the ranks' LSEs, which lie
// `rank_stride` bytes apart. Those of ranks without keys are loaded, so that no load waits for
// another, and not used.
template <LogBase B>
__device__ void GatherRow(RowSources<B>& row, const DeviceStep& step, int token, int ranks,
                          const std::byte* lse, std::int64_t rank_stride) {
  for (int r = Lane(); r < ranks; r += 32) {
    row.lse[r].raw = *reinterpret_cast<const float*>(lse + r * rank_stride);
    row.owned[r] = step.bounds[std::int64_t{r} * step.tokens + token] > 0;
  }
  __syncwarp();
  if (Lane() == 0) row.merged = merge_math::Weights<B>(ranks, row.owned, row.lse, row.weight);
  __syncwarp();
}

template <LogBase B>
__device__ float WantedLse(Lse<B> merged, LogBase base) {
  const float lse =
      base == LogBase::kE ? LseCast<LogBase::kE>(merged).raw : LseCast<LogBase::kTwo>(merged).raw;
  return merge_math::Canonical(lse);  // a cast makes another NaN here than on the host
}

// Adds the block's faulty rows; every thread calls it, the lanes of a warp with the same row.
__device__ void CountFaults(bool fault, std::int64_t* faults) {
  const int count = __syncthreads_count(fault && Lane() == 0);
  if (threadIdx.x == 0 && count > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(faults),
              static_cast<unsigned long long>(count));
  }
}

template <LogBase B, class In, int kItems>
__device__ bool MergeRow(const DeviceMergeArgs& args, const RowSources<B>& sources,
                         std::int64_t row) {
  const DeviceStep& step = *args.step;
  bool fault = sources.merged.fault;
  const std::byte* const in = args.out + row * args.d_v * std::int64_t{sizeof(In)};
  for (int i = Lane() * kItems; i < args.d_v; i += 32 * kItems) {
    float acc[kItems] = {};
    for (int r = 0; r < args.ranks && !sources.merged.fault; ++r) {
      if (!sources.owned[r]) continue;
      const auto pack = LoadPack<In, kItems>(in + r * args.message_stride, i);
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        acc[k] = merge_math::Accumulate(sources.weight[r], AsFloat(pack.items[k]), acc[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      acc[k] = sources.merged.fault ? merge_math::QuietNaN() : merge_math::Canonical(acc[k]);
    }
    fault |= !StoreOutput(acc, args.output, row, args.d_v, i, step.output_dtype);
  }
  if (args.merged_lse != nullptr && Lane() == 0) {
    args.merged_lse[row] = WantedLse(sources.merged.lse, step.lse_base);
  }
  return __any_sync(kAllLanes, fault);
}

template <LogBase B, class In, int kItems>
__global__ void __launch_bounds__(kThreads) MergeKernel(const DeviceMergeArgs args) {
  __shared__ RowSources<B> rows[kWarps];
  RowSources<B>& sources = rows[Warp()];
  const std::int64_t row = Row();
  bool fault = false;
  if (row < std::int64_t{args.step->tokens} * args.heads) {
    GatherRow(sources, *args.step, static_cast<int>(row / args.heads), args.ranks,
              args.lse + row * 4, args.message_stride);
    fault = MergeRow<B, In, kItems>(args, sources, row);
  }
  CountFaults(fault, args.faults);
}

template <LogBase B, class T, int kItems>
__device__ bool ScaleRow(const DeviceScaleArgs& args, RowSources<B>& sources, int group, int row) {
  const DeviceStep& step = *args.step;
  constexpr int kStride = 32 * kItems;
  const int first = Lane() * kItems;
  std::byte* const partial =
      args.partial + group * args.group_stride + row * (args.d_v * std::int64_t{sizeof(T)});
  // On their way while the weights are found; not looked at where this rank owns no key.
  constexpr int kAhead = 2;
  Pack<T, kItems> ahead[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    const int i = first + j * kStride;
    ahead[j] = i < args.d_v ? LoadPack<T, kItems>(partial, i) : Pack<T, kItems>{};
  }
  GatherRow(sources, step, row / args.heads_per_group, args.ranks,
            args.lse + group * args.lse_group_stride + std::int64_t{row} * 4, args.lse_rank_stride);
  const bool mine = sources.owned[args.rank];
  bool fault = false;
  for (int begin = first; begin < args.d_v; begin += kAhead * kStride) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = begin + j * kStride;
      if (i >= args.d_v) break;
      const Pack<T, kItems> pack = ahead[j];
      const int next = i + kAhead * kStride;
      if (next < args.d_v) ahead[j] = LoadPack<T, kItems>(partial, next);
      float x[kItems] = {};
      if (mine) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          x[k] = merge_math::Canonical(AsFloat(pack.items[k]) * sources.weight[args.rank]);
        }
      }
      fault |= !StoreFloats<T>(x, partial, i);
    }
  }
  if (group == args.rank && args.merged_lse != nullptr && Lane() == 0) {
    args.merged_lse[row] = WantedLse(sources.merged.lse, step.lse_base);
  }
  return __any_sync(kAllLanes, sources.merged.fault ? group == args.rank : fault);
}

// Four blocks on a multiprocessor are enough: for eight, ptxas spills on sm_100f.
template <LogBase B, class T, int kItems>
__global__ void __launch_bounds__(kThreads, 4) ScaleKernel(const DeviceScaleArgs args) {
  __shared__ RowSources<B> rows[kWarps];
  const unsigned group_rows = static_cast<unsigned>(args.step->tokens * args.heads_per_group);
  const unsigned at = blockIdx.x * kWarps + static_cast<unsigned>(Warp());
  bool fault = false;
  if (at < group_rows * static_cast<unsigned>(args.groups)) {
    fault = ScaleRow<B, T, kItems>(args, rows[Warp()], static_cast<int>(at / group_rows),
                                   static_cast<int>(at % group_rows));
  }
  CountFaults(fault, args.faults);
}

template <class In, class Out, int kItems>
__global__ void __launch_bounds__(kThreads) ConvertKernel(const DeviceConvertArgs args) {
  const std::int64_t row = Row();
  bool fault = false;
  if (row < args.rows) {
    const std::byte* const in = args.in + row * args.d_v * std::int64_t{sizeof(In)};
    std::byte* const out = args.out + row * args.d_v * std::int64_t{sizeof(Out)};
    bool counted = false;
    for (int i = Lane() * kItems; i < args.d_v; i += 32 * kItems) {
      const auto pack = LoadPack<In, kItems>(in, i);
      float x[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        x[k] = AsFloat(pack.items[k]);
        counted |= !merge_math::IsFinite(x[k]);
      }
      fault |= !StoreFloats<Out>(x, out, i);
    }
    fault = __any_sync(kAllLanes, fault) && !__any_sync(kAllLanes, counted);
  }
  CountFaults(fault, args.faults);
}

constexpr int kWide = 8;
constexpr int kNarrow = 2;

bool AllAligned16(int d_v, std::initializer_list<const void*> pointers,
                  std::initializer_list<std::int64_t> strides) {
  bool aligned = d_v % kWide == 0;
  for (const void* p : pointers) aligned &= reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
  for (const std::int64_t stride : strides) aligned &= stride % 16 == 0;
  return aligned;
}

Status CheckShape(int ranks, int d_v) {
  if (ranks >= 1 && ranks <= kMaxRanks && d_v % kNarrow == 0) return Status::Ok();
  return Status(Reason::kInternal,
                "merge of " + std::to_string(ranks) + " ranks with d_v = " + std::to_string(d_v) +
                    ": needs 1 to " + std::to_string(kMaxRanks) + " ranks and an even d_v");
}

unsigned Grid(std::int64_t rows) { return static_cast<unsigned>((rows + kWarps - 1) / kWarps); }

// Calls f(element, width) with the compile-time element type and width of the access.
template <class F>
void WithElements(DType dtype, bool wide, F&& f) {
  using Wide = std::integral_constant<int, kWide>;
  using Narrow = std::integral_constant<int, kNarrow>;
  if (dtype == DType::kBf16) {
    wide ? f(Bf16{}, Wide{}) : f(Bf16{}, Narrow{});
  } else {
    wide ? f(float{}, Wide{}) : f(float{}, Narrow{});
  }
}

}  // namespace

template <LogBase B>
Status MergePartialsCuda(const DeviceMergeArgs& args, StreamRef stream) {
  DCP_RETURN_IF_ERROR(CheckShape(args.ranks, args.d_v));
  const std::int64_t rows = std::int64_t{args.max_tokens} * args.heads;
  if (rows == 0) return Status::Ok();
  const bool wide = AllAligned16(args.d_v, {args.out, args.output}, {args.message_stride});
  WithElements(args.partial_dtype, wide, [&](auto element, auto width) {
    MergeKernel<B, decltype(element), width()>
        <<<Grid(rows), kThreads, 0, cuda::Raw(stream)>>>(args);
  });
  return cuda::CheckLaunch("MergePartials");
}

template <LogBase B>
Status ScalePartialCuda(const DeviceScaleArgs& args, StreamRef stream) {
  DCP_RETURN_IF_ERROR(CheckShape(args.ranks, args.d_v));
  const std::int64_t rows = std::int64_t{args.max_tokens} * args.heads_per_group * args.groups;
  if (rows == 0) return Status::Ok();
  const bool wide = AllAligned16(args.d_v, {args.partial}, {args.group_stride});
  WithElements(args.partial_dtype, wide, [&](auto element, auto width) {
    ScaleKernel<B, decltype(element), width()>
        <<<Grid(rows), kThreads, 0, cuda::Raw(stream)>>>(args);
  });
  return cuda::CheckLaunch("ScalePartial");
}

Status ConvertRowsCuda(const DeviceConvertArgs& args, StreamRef stream) {
  DCP_RETURN_IF_ERROR(CheckShape(1, args.d_v));
  if (args.rows == 0) return Status::Ok();
  const bool wide = AllAligned16(args.d_v, {args.in, args.out}, {});
  WithElements(args.in_dtype, wide, [&](auto in, auto width) {
    WithElements(args.out_dtype, wide, [&](auto out, auto) {
      ConvertKernel<decltype(in), decltype(out), width()>
          <<<Grid(args.rows), kThreads, 0, cuda::Raw(stream)>>>(args);
    });
  });
  return cuda::CheckLaunch("ConvertRows");
}

template Status MergePartialsCuda<LogBase::kE>(const DeviceMergeArgs&, StreamRef);
template Status MergePartialsCuda<LogBase::kTwo>(const DeviceMergeArgs&, StreamRef);
template Status ScalePartialCuda<LogBase::kE>(const DeviceScaleArgs&, StreamRef);
template Status ScalePartialCuda<LogBase::kTwo>(const DeviceScaleArgs&, StreamRef);

}  // namespace dcp
