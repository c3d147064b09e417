// cuda_portable on the device. One thread block of 8 warps takes items of the plan. For each tile
// of 32 keys: warp w multiplies rows 16 (w / 2) .. by keys 16 (w % 2) .. into scores; the rows'
// maxima and weights go through shared memory; then every warp multiplies all weights by its own
// columns of the values (blocks of 16 columns: w, w + 8, ...), which are the first columns of the
// same keys.
//
// Nothing in a row's arithmetic depends on other rows: keys that it does not see have weight 0, a
// tile of such keys leaves its state as it is, bit by bit, and so does a chunk of them.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "base/cuda.h"
#include "kernels/backends/cuda_portable_kernels.h"
#include "kernels/backends/cuda_portable_plan.h"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/mma.cuh"

namespace dcp::portable {
namespace {

using device::Blocks4;

constexpr int kWarps = kThreads / 32;
constexpr int kKeysPerWarp = kTileKeys / kWarps;  // that a warp loads
constexpr int kRowTiles = kTileRows / 16;
constexpr int kColumnBlocks = 4;  // of 16 columns, per warp: d_v up to 512
// Rows in shared memory are 16 bytes longer than a multiple of 32, so that the eight rows of an 8x8
// block lie in different banks.
constexpr int kPad = 8;
constexpr int kWeightStride = kTileKeys + kPad;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kCombineThreads = 128;
constexpr int kCombineBlocksPerBlock = 8;  // combining blocks for each block of the first kernel

// At the start of shared memory; then come the query rows, two tiles of keys and the weights.
struct alignas(16) BlockState {
  PlanItem item;
  float half[2][kTileRows];  // over one half of the tile's keys: maxima, at the end of a chunk sums
  float rescale[kTileRows];  // of what was summed before this tile
  float max[kTileRows];      // of the chunk
  float folded_max[kTileRows];
  float folded_sum[kTileRows];
  float keep[kTileRows];  // factor of what was folded before this chunk
  float take[kTileRows];  // factor of this chunk
  std::int32_t bound[kTileRows];
  std::int32_t not_finite[kTileKeys];  // valid in tiles that not all rows see alike
  std::int32_t next_item;              // its index
};

// Functions and not members of a worker: constant addresses take no registers.
__device__ __forceinline__ std::byte* Shared() {
  extern __shared__ __align__(16) std::byte shared[];
  return shared;
}
__device__ __forceinline__ BlockState& State() { return *reinterpret_cast<BlockState*>(Shared()); }

__host__ __device__ constexpr int Stride(int d_qk) { return d_qk + kPad; }
__host__ __device__ constexpr int QueryBytes(int d_qk) { return kTileRows * Stride(d_qk) * 2; }
__host__ __device__ constexpr int KeyBytes(int d_qk) { return kTileKeys * Stride(d_qk) * 2; }
constexpr int kWeightBytes = kTileRows * kWeightStride * 2;

struct Fold {
  float max;
  float keep;
  float take;
};

// How the sums up to here and those of the next chunk become one. A chunk with no weight (-inf)
// keeps everything as it is.
__device__ Fold FoldMaxima(float folded, float next) {
  const float max = fmaxf(folded, next);
  const float reference = max == -INFINITY ? 0.0f : max;
  return {max, exp2f(folded - reference), exp2f(next - reference)};
}
__device__ float FoldValues(float folded, float next, const Fold& f) {
  return __fmaf_rn(next, f.take, __fmul_rn(folded, f.keep));
}

// A finished element; + 0 so that a zero has one sign.
__device__ float Normalized(float value, float inverse) { return __fmaf_rn(value, inverse, 0.0f); }

__device__ float NaturalLse(float max, float sum) {
  return (max + log2f(sum)) * static_cast<float>(kLn2);
}

__device__ const PlanHeader& Plan(const DeviceStep& step) {
  return *reinterpret_cast<const PlanHeader*>(step.plan);
}
__device__ const std::int32_t* Bounds(const DeviceStep& step) {
  return reinterpret_cast<const std::int32_t*>(step.plan + Plan(step).bounds_offset);
}

// Where row token * heads + head goes.
struct RowTarget {
  std::byte* out;
  float* lse;
};
__device__ RowTarget Target(const Params& p, int row) {
  const int token = row / p.heads;
  const int head = row % p.heads;
  const int group = head / p.partial.heads_per_group;
  const std::int64_t in_group =
      std::int64_t{token} * p.partial.heads_per_group + head % p.partial.heads_per_group;
  const int item_bytes = p.partial_dtype == DType::kBf16 ? 2 : 4;
  return {p.partial.out + group * p.partial.out_group_stride + in_group * p.d_v * item_bytes,
          reinterpret_cast<float*>(p.partial.lse + group * p.partial.lse_group_stride) + in_group};
}

// Two neighbouring elements; rows are only aligned to 4 bytes.
__device__ void StorePair(std::byte* row, int column, float a, float b, DType dtype) {
  if (dtype == DType::kBf16) {
    *reinterpret_cast<std::uint32_t*>(row + column * 2) = device::PackBf16(a, b);
  } else {
    float* const at = reinterpret_cast<float*>(row) + column;
    at[0] = a;
    at[1] = b;
  }
}

// Dims known when compiling, or 0, 0.
template <int kDqk, int kDv>
struct Dims {
  static __device__ int Qk(const Params& p) { return kDqk != 0 ? kDqk : p.d_qk; }
  static __device__ int V(const Params& p) { return kDv != 0 ? kDv : p.d_v; }
};

// One item: that in shared memory.
template <class D>
class Worker {
 public:
  __device__ Worker(const Params& params, const DeviceStep& step)
      : p_(params),
        table_(step.block_table + std::int64_t{item().entry} * step.table_stride),
        kv_(params.kv + step.kv_offset),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kTileRows) {
      State().bound[row] =
          row < item().rows ? Bounds(step)[(item().first_row + row) / params.heads] : 0;
    }
  }

  // Ends without a barrier: other threads may still read shared memory.
  __device__ void Run() {
    if (item().key_end > 0) {
      AllChunks();
    } else {
      __syncthreads();  // for the bounds
      ClearSums();
      Emit();
    }
  }

 private:
  __device__ static const PlanItem& item() { return State().item; }
  __device__ int d_qk() const { return D::Qk(p_); }
  __device__ int d_v() const { return D::V(p_); }
  __device__ int g() const { return lane_ / 4; }
  __device__ int t() const { return lane_ % 4; }
  __device__ int score_row() const { return warp_ / 2 * 16; }  // first of the warp's rows of scores
  __device__ int score_key() const { return warp_ % 2 * 16; }  // and first key
  __device__ bool scores() const { return score_row() < item().rows; }
  __device__ int Column(int j) const { return (warp_ + kWarps * j) * 16; }
  __device__ static std::uint32_t query() {
    return device::SharedAddress(Shared()) + static_cast<std::uint32_t>(sizeof(BlockState));
  }
  __device__ std::uint32_t keys(int buffer) const {
    return query() + QueryBytes(d_qk()) + buffer * KeyBytes(d_qk());
  }
  __device__ std::uint32_t weights() const { return keys(2); }

  __device__ void AllChunks() {
    LoadQuery();
    LoadKeys(item().key_begin, 0, TablePage(item().key_begin));
    device::CommitCopies();
    std::int32_t page = TablePage(item().key_begin + kTileKeys);
    std::int32_t chunk_end = ChunkEnd(item().key_begin);
    bool first_chunk = true;
    int buffer = 0;
    ClearSums();
    for (std::int32_t key = item().key_begin; key < item().key_end; key += kTileKeys) {
      const std::int32_t next = key + kTileKeys;
      device::WaitCopies<0>();
      __syncthreads();  // the tile has landed; nobody reads the other buffer and the weights
      if (next < item().key_end) {
        LoadKeys(next, buffer ^ 1, page);
        page = TablePage(next + kTileKeys);
      }
      device::CommitCopies();
      // Where rows see different keys of the tile, a value that is not finite would reach rows that
      // give it weight 0.
      const bool cut = item().min_bound < min(next, item().key_end);
      if (cut) {
        TakeOutNotFinite(buffer);
        __syncthreads();
      }
      Weigh(buffer, key, cut);
      if (item().rows <= 16) {
        AddValues<1>(buffer);
      } else if (item().rows <= 32) {
        AddValues<2>(buffer);
      } else {
        AddValues<kRowTiles>(buffer);
      }
      const bool last = next >= item().key_end;
      if (last || next == chunk_end) {
        FoldChunk(first_chunk, last);
        first_chunk = false;
        chunk_end = ChunkEnd(next);
      }
      buffer ^= 1;
    }
    Emit();
  }

  __device__ void LoadQuery() const {
    const Bf16* const from = p_.query + std::int64_t{item().first_row} * d_qk();
#pragma unroll 1
    for (int row = warp_; row < (item().rows + 15) / 16 * 16; row += kWarps) {
      const bool valid = row < item().rows;
      for (int i = lane_; i < d_qk() / 8; i += 32) {
        device::CopyAsync16(query() + (row * Stride(d_qk()) + i * 8) * 2,
                            valid ? from + std::int64_t{row} * d_qk() + i * 8 : p_.query, valid);
      }
    }
  }

  // Lanes 4i to 4i + 3 each look after one of the warp's keys of the tile at `key`.
  __device__ std::int32_t OwnKey(std::int32_t key) const {
    return key + warp_ * kKeysPerWarp + lane_ % kKeysPerWarp;
  }
  __device__ std::int32_t TablePage(std::int32_t key) const {
    const std::int32_t own = OwnKey(key);
    return own < item().key_end ? table_[own / p_.page_tokens] : 0;
  }

  // Keys from the item's end on become zeros; their pages are not read.
  __device__ void LoadKeys(std::int32_t key, int buffer, std::int32_t page) const {
    const std::int32_t own = OwnKey(key);
    const std::int64_t own_offset =
        page * p_.page_stride + std::int64_t{own % p_.page_tokens} * d_qk();
#pragma unroll 1
    for (int i = 0; i < kKeysPerWarp; ++i) {
      const std::int64_t offset = __shfl_sync(kAllLanes, own_offset, i);
      const int row = warp_ * kKeysPerWarp + i;
      const bool valid = key + row < item().key_end;
      const Bf16* const from = valid ? kv_ + offset : p_.kv;
      for (int j = lane_; j < d_qk() / 8; j += 32) {
        device::CopyAsync16(keys(buffer) + (row * Stride(d_qk()) + j * 8) * 2, from + j * 8, valid);
      }
    }
  }

  __device__ void ClearSums() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc_[i][j][n][c] = 0;
        }
      }
    }
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0;
  }

  // Zeroes value elements that are not finite and notes their keys.
  __device__ void TakeOutNotFinite(int buffer) {
#pragma unroll 1
    for (int i = 0; i < kKeysPerWarp; ++i) {
      const int row = warp_ * kKeysPerWarp + i;
      bool found = false;
#pragma unroll 1
      for (int j = lane_; j < d_v() / 2; j += 32) {
        auto* const pair = reinterpret_cast<std::uint32_t*>(
            Shared() + sizeof(BlockState) + QueryBytes(d_qk()) + buffer * KeyBytes(d_qk()) +
            (row * Stride(d_qk()) + j * 2) * 2);
        const std::uint32_t bits = *pair;
        std::uint32_t kept = bits;
        if ((bits & 0x7f80u) == 0x7f80u) kept &= 0xffff0000u;
        if ((bits & 0x7f800000u) == 0x7f800000u) kept &= 0x0000ffffu;
        if (kept != bits) {
          *pair = kept;
          found = true;
        }
      }
      found = __any_sync(kAllLanes, found);
      if (lane_ == 0) State().not_finite[row] = found;
    }
  }

  // Scores of the warp's 16 rows and 16 keys: s[n][c] at key 8n + 2t + c % 2, row g + c / 2 * 8.
  // Even and odd steps are summed apart: twice as many products in flight.
  __device__ void Score(int buffer, float (&s)[2][4]) const {
    const int stride = Stride(d_qk());
    const std::uint32_t q = query() + ((score_row() + lane_ % 16) * stride + lane_ / 16 * 8) * 2;
    const std::uint32_t k =
        keys(buffer) +
        ((score_key() + lane_ % 8 + lane_ / 16 * 8) * stride + lane_ / 8 % 2 * 8) * 2;
    float odd[2][4] = {};
    const int steps = d_qk() / 16;
#pragma unroll 3
    for (int i = 0; i < steps / 2; ++i) {
      const Blocks4 q0 = device::LoadBlocks(q + i * 64);
      const Blocks4 k0 = device::LoadBlocks(k + i * 64);
      const Blocks4 q1 = device::LoadBlocks(q + i * 64 + 32);
      const Blocks4 k1 = device::LoadBlocks(k + i * 64 + 32);
      device::MultiplyAdd(s[0], q0, k0.r[0], k0.r[1]);
      device::MultiplyAdd(s[1], q0, k0.r[2], k0.r[3]);
      device::MultiplyAdd(odd[0], q1, k1.r[0], k1.r[1]);
      device::MultiplyAdd(odd[1], q1, k1.r[2], k1.r[3]);
    }
    if (steps % 2 != 0) {
      const Blocks4 q0 = device::LoadBlocks(q + (steps - 1) * 32);
      const Blocks4 k0 = device::LoadBlocks(k + (steps - 1) * 32);
      device::MultiplyAdd(s[0], q0, k0.r[0], k0.r[1]);
      device::MultiplyAdd(s[1], q0, k0.r[2], k0.r[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += odd[n][c];
    }
  }

  // Scores, new maxima, weights of the tile, and the factors for what was summed before it.
  __device__ void Weigh(int buffer, std::int32_t key, bool cut) {
    float s[2][4] = {};
    if (scores()) {
      Score(buffer, s);
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int row = score_row() + g() + hi * 8;
        const std::int32_t bound = State().bound[row];
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int in_tile = score_key() + n * 8 + t() * 2 + c;
            float x = __fmul_rn(s[n][hi * 2 + c], p_.scale_log2);
            if (cut && State().not_finite[in_tile] != 0) x = NAN;
            if (key + in_tile >= bound) x = -INFINITY;
            s[n][hi * 2 + c] = x;
            top = fmaxf(top, x);  // ignores NaN, whose weight is NaN whatever the maximum
          }
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        if (t() == 0) State().half[warp_ % 2][row] = top;
      }
    }
    __syncthreads();
    if (scores()) {
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int row = score_row() + g() + hi * 8;
        const float top = fmaxf(max_[hi], fmaxf(State().half[0][row], State().half[1][row]));
        const float reference = top == -INFINITY ? 0.0f : top;
        const float rescale = top == max_[hi] ? 1.0f : exp2f(max_[hi] - top);
        max_[hi] = top;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float w0 = exp2f(s[n][hi * 2] - reference);
          const float w1 = exp2f(s[n][hi * 2 + 1] - reference);
          sum += w0 + w1;
          const int in_tile = score_key() + n * 8 + t() * 2;
          const std::uint32_t at = weights() + (row * kWeightStride + in_tile) * 2;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(device::PackBf16(w0, w1))
                       : "memory");
        }
        sum_[hi] = __fmaf_rn(sum_[hi], rescale, sum);
        if (t() == 0 && warp_ % 2 == 0) State().rescale[row] = rescale;
      }
    }
    __syncthreads();
  }

  template <int kTiles>
  __device__ void Rescale() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float low = State().rescale[i * 16 + g()];
      const float high = State().rescale[i * 16 + g() + 8];
      if (!__any_sync(kAllLanes, low != 1.0f || high != 1.0f)) continue;
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          acc_[i][j][n][0] *= low;
          acc_[i][j][n][1] *= low;
          acc_[i][j][n][2] *= high;
          acc_[i][j][n][3] *= high;
        }
      }
    }
  }

  // For the first kTiles tiles of 16 rows.
  template <int kTiles>
  __device__ void AddValues(int buffer) {
    Rescale<kTiles>();
    const std::uint32_t p = weights() + (lane_ % 16 * kWeightStride + lane_ / 16 * 8) * 2;
    const std::uint32_t v = keys(buffer) + (lane_ % 16 * Stride(d_qk()) + lane_ / 16 * 8) * 2;
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      Blocks4 w[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        w[i] = device::LoadBlocks(p + (i * 16 * kWeightStride + step * 16) * 2);
      }
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        if (Column(j) >= d_v()) continue;
        const Blocks4 x =
            device::LoadBlocksTransposed(v + (step * 16 * Stride(d_qk()) + Column(j)) * 2);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          device::MultiplyAdd(acc_[i][j][0], w[i], x.r[0], x.r[1]);
          device::MultiplyAdd(acc_[i][j][1], w[i], x.r[2], x.r[3]);
        }
      }
    }
  }

  // The chunk is complete: folds it into those before it and starts the next, or, after the last
  // one, leaves the result in the registers and in folded_max, folded_sum.
  __device__ void FoldChunk(bool first, bool last) {
    if (scores()) {
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int row = score_row() + g() + hi * 8;
        float sum = sum_[hi];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (t() == 0) {
          State().half[warp_ % 2][row] = sum;
          if (warp_ % 2 == 0) State().max[row] = max_[hi];
        }
      }
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x);
    if (row < item().rows) {
      const float sum = State().half[0][row] + State().half[1][row];
      if (first) {
        State().folded_max[row] = State().max[row];
        State().folded_sum[row] = sum;
      } else {
        const Fold fold = FoldMaxima(State().folded_max[row], State().max[row]);
        State().folded_max[row] = fold.max;
        State().folded_sum[row] = FoldValues(State().folded_sum[row], sum, fold);
        State().keep[row] = fold.keep;
        State().take[row] = fold.take;
      }
    }
    __syncthreads();
    if (!first) AddScratch();
    if (!last) {
      SaveScratch();
      ClearSums();
    }
  }

  // What was folded before lies in a part of the workspace that no other thread touches.
  __device__ float4* Scratch(int i, int j, int n) const {
    const int item = (i * kColumnBlocks + j) * 2 + n;
    return reinterpret_cast<float4*>(p_.scratch + std::size_t{blockIdx.x} * kScratchFloats) +
           item * kThreads + threadIdx.x;
  }

  __device__ void AddScratch() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int row = i * 16 + g();
      const Fold low{0, State().keep[row], State().take[row]};
      const Fold high{0, State().keep[row + 8], State().take[row + 8]};
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        if (Column(j) >= d_v() || i * 16 >= item().rows) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float4 folded = *Scratch(i, j, n);
          float(&acc)[4] = acc_[i][j][n];
          acc[0] = FoldValues(folded.x, acc[0], low);
          acc[1] = FoldValues(folded.y, acc[1], low);
          acc[2] = FoldValues(folded.z, acc[2], high);
          acc[3] = FoldValues(folded.w, acc[3], high);
        }
      }
    }
  }

  __device__ void SaveScratch() const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        if (Column(j) >= d_v() || i * 16 >= item().rows) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float(&acc)[4] = acc_[i][j][n];
          *Scratch(i, j, n) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        }
      }
    }
  }

  __device__ void Emit() const { item().slot_row < 0 ? EmitRows() : EmitSlots(); }

  __device__ void EmitSlots() const {
    const int own_row = static_cast<int>(threadIdx.x);
    if (own_row < item().rows) {
      p_.slot_max[item().slot_row + own_row] = State().folded_max[own_row];
      p_.slot_sum[item().slot_row + own_row] = State().folded_sum[own_row];
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int row = i * 16 + g() + hi * 8;
        if (row >= item().rows) continue;
        float* const to = p_.slots + std::int64_t{item().slot_row + row} * d_v() + t() * 2;
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          if (Column(j) >= d_v()) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            *reinterpret_cast<float2*>(to + Column(j) + n * 8) =
                make_float2(acc_[i][j][n][hi * 2], acc_[i][j][n][hi * 2 + 1]);
          }
        }
      }
    }
  }

  __device__ void EmitRows() const {
    const int own_row = static_cast<int>(threadIdx.x);
    if (own_row < item().rows) {
      *Target(p_, item().first_row + own_row).lse =
          State().bound[own_row] > 0
              ? NaturalLse(State().folded_max[own_row], State().folded_sum[own_row])
              : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int row = i * 16 + g() + hi * 8;
        if (row >= item().rows) continue;
        std::byte* const to = Target(p_, item().first_row + row).out;
        const bool empty = State().bound[row] == 0;
        const float inverse = empty ? 0.0f : __fdiv_rn(1.0f, State().folded_sum[row]);
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          if (Column(j) >= d_v()) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float a = Normalized(acc_[i][j][n][hi * 2], inverse);
            const float b = Normalized(acc_[i][j][n][hi * 2 + 1], inverse);
            StorePair(to, Column(j) + n * 8 + t() * 2, empty ? 0.0f : a, empty ? 0.0f : b,
                      p_.partial_dtype);
          }
        }
      }
    }
  }

  const Params& p_;
  const std::int32_t* const table_;
  const Bf16* const kv_;
  const int warp_;
  const int lane_;
  float acc_[kRowTiles][kColumnBlocks][2]
            [4];  // row 16i + g + c / 2 * 8, col Column(j) + 8n + 2t + c % 2
  float max_[2];  // of the chunk so far, rows g and g + 8 of the warp's scores
  float sum_[2];  // this thread's part
};

template <int kDqk, int kDv>
__global__ void __launch_bounds__(kThreads, 1) AttendKernel(const Params p) {
  using D = Dims<kDqk, kDv>;
  const DeviceStep& step = *p.step;
  const PlanHeader& plan = Plan(step);
  const auto* const items = reinterpret_cast<const PlanItem*>(step.plan + plan.items_offset);
  int index = static_cast<int>(blockIdx.x);
  if (index >= plan.items) return;
  if (threadIdx.x == 0) State().item = items[index];
  __syncthreads();
  while (true) {
    int next = 0;
    if (threadIdx.x == 0) next = static_cast<int>(gridDim.x) + atomicAdd(p.claimed, 1);
    Worker<D>(p, step).Run();
    __syncthreads();  // nobody reads this item's shared memory any more
    if (threadIdx.x == 0) {
      State().next_item = next;
      if (next < plan.items) State().item = items[next];
    }
    __syncthreads();
    if (State().next_item >= plan.items) return;
  }
}

// Folds four columns of the slots of a split tile's row.
struct FoldedRow {
  float max;
  float sum;
  float4 values;
};
__device__ FoldedRow FoldSlots(const Params& p, const PlanGroup& group, int row, int column) {
  std::int64_t slot = group.slot_row + row;
  const float* values = p.slots + slot * p.d_v + column;
  const std::int64_t stride = std::int64_t{group.rows} * p.d_v;
  FoldedRow folded{p.slot_max[slot], p.slot_sum[slot], *reinterpret_cast<const float4*>(values)};
#pragma unroll 4
  for (int i = 1; i < group.items; ++i) {
    slot += group.rows;
    values += stride;
    const float4 next = *reinterpret_cast<const float4*>(values);
    const Fold fold = FoldMaxima(folded.max, p.slot_max[slot]);
    folded.max = fold.max;
    folded.sum = FoldValues(folded.sum, p.slot_sum[slot], fold);
    folded.values.x = FoldValues(folded.values.x, next.x, fold);
    folded.values.y = FoldValues(folded.values.y, next.y, fold);
    folded.values.z = FoldValues(folded.values.z, next.z, fold);
    folded.values.w = FoldValues(folded.values.w, next.w, fold);
  }
  return folded;
}

// A thread block for each row of a split tile, in turn; four columns for each thread.
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(const Params p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.claimed = 0;
  const int column = static_cast<int>(threadIdx.x) * 4;
  if (column >= p.d_v) return;
  const DeviceStep& step = *p.step;
  const PlanHeader& plan = Plan(step);
  const auto* const groups = reinterpret_cast<const PlanGroup*>(step.plan + plan.groups_offset);
  const int units = plan.groups * kTileRows;
  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    const PlanGroup group = groups[unit / kTileRows];
    const int row = unit % kTileRows;
    if (row >= group.rows) continue;
    const RowTarget target = Target(p, group.first_row + row);
    if (Bounds(step)[(group.first_row + row) / p.heads] == 0) {
      StorePair(target.out, column, 0, 0, p.partial_dtype);
      StorePair(target.out, column + 2, 0, 0, p.partial_dtype);
      if (column == 0) *target.lse = -INFINITY;
      continue;
    }
    const FoldedRow folded = FoldSlots(p, group, row, column);
    const float inverse = __fdiv_rn(1.0f, folded.sum);
    StorePair(target.out, column, Normalized(folded.values.x, inverse),
              Normalized(folded.values.y, inverse), p.partial_dtype);
    StorePair(target.out, column + 2, Normalized(folded.values.z, inverse),
              Normalized(folded.values.w, inverse), p.partial_dtype);
    if (column == 0) *target.lse = NaturalLse(folded.max, folded.sum);
  }
}
static_assert(kCombineThreads * 4 >= kColumnBlocks * kWarps * 16);

// The kernel for these dims: known when compiling for those of DeepSeek and Kimi.
auto* KernelFor(int d_qk, int d_v) {
  return d_qk == 576 && d_v == 512 ? &AttendKernel<576, 512> : &AttendKernel<0, 0>;
}

}  // namespace

std::size_t SharedBytes(int d_qk) {
  return static_cast<std::size_t>(QueryBytes(d_qk) + 2 * KeyBytes(d_qk) + kWeightBytes) +
         sizeof(BlockState);
}

Status Prepare(int d_qk, int d_v) {
  return cuda::Check(
      cudaFuncSetAttribute(KernelFor(d_qk, d_v), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(SharedBytes(d_qk))),
      "cudaFuncSetAttribute");
}

Status Launch(const Params& params, int blocks, StreamRef stream) {
  const auto grid = static_cast<unsigned>(blocks);
  auto* const attend = KernelFor(params.d_qk, params.d_v);
  attend<<<grid, kThreads, SharedBytes(params.d_qk), cuda::Raw(stream)>>>(params);
  DCP_RETURN_IF_ERROR(cuda::CheckLaunch("cuda_portable attention"));
  CombineKernel<<<grid * kCombineBlocksPerBlock, kCombineThreads, 0, cuda::Raw(stream)>>>(params);
  return cuda::CheckLaunch("cuda_portable combine");
}

}  // namespace dcp::portable
