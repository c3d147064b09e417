// sm90_dense on the device. One thread block on each multiprocessor takes the items of its list. A
// warp of its last warpgroup copies blocks of 64 keys into two stages of shared memory; the two
// other warpgroups, "groups" in here, each own half of the output's columns for all 64 rows of the
// tile.
//
// Key blocks 0, 2, .. of an item are group 0's, the others group 1's: the owner multiplies query by
// keys and makes weights; both groups multiply the weights by their columns of the values. The
// owner has its weights in registers, the other group reads them from shared memory. In the steady
// state:
//
//   group 0:  scores(j)   weights(j)  values(j)               values(j+1)   scores(j+2) ..
//   group 1:  scores(j+1)             values(j) weights(j+1)  values(j+1)   scores(j+3) ..
//
// so that one group's products run beside the other's weights. The parts of a stage, both halves of
// the values and what keys have beside them, are filled again as soon as each is no longer read.
//
// Weights are 2^(score - reference). The reference of a row follows its maximum only when that has
// grown by more than kSlack: until then nothing summed has to be rescaled, and weights stay far
// from the limits of f32 and bf16.
//
// The products take weights rounded to bf16, by up to 2^-8. Outputs are therefore divided by the
// sum of the rounded weights, so that a key with nearly all the weight gives its own values; the
// LSE is that of the weights before rounding.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "base/cuda.h"
#include "kernels/backends/sm90_dense_kernels.h"
#include "kernels/backends/sm90_dense_plan.h"
#include "kernels/backends/sm90_dense_rows.cuh"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/tensor_copy.cuh"
#include "kernels/device/warpgroup.cuh"
#include "kernels/device/wgmma.cuh"

namespace dcp::sm90 {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kStages = 2;
constexpr std::uint32_t kTileBytes = kBlockKeys * device::kTileColumns * 2;
constexpr int kValueTiles = kDv / device::kTileColumns;
constexpr int kMaxTiles = kValueTiles + 1;

// Parts of a stage: value tiles of group 0, of group 1, the tile beside the values.
enum Part { kLeft, kRight, kBeside, kParts };

// At the end of shared memory.
struct State {
  std::uint64_t full[kStages][kMaxTiles];  // a tile has landed
  std::uint64_t empty[kStages][kParts];    // a part is no longer read
  float reference[2][kTileRows];           // after the last block of either group
  float rescale[2][kTileRows];             // what that block changed
  float last_reference[2][kTileRows];
  float sum[2][kTileRows];      // of the weights of either group's blocks
  float rounded[2][kTileRows];  // of the same, as the products take them
  std::uint8_t not_finite[2][kBlockKeys];
};

}  // namespace

// Tiles of a row, and where things lie in shared memory, in bytes.
template <int kTilesOfRow>
struct Layout {
  static constexpr int kTiles = kTilesOfRow;
  static constexpr std::uint32_t kRowsBytes = kTiles * kTileBytes;
  static constexpr std::uint32_t kQuery = 0;
  static constexpr std::uint32_t kKeys = kRowsBytes;
  static constexpr std::uint32_t kWeights = (1 + kStages) * kRowsBytes;
  static constexpr std::uint32_t kState = kWeights + kTileBytes;
  static constexpr std::uint32_t kBytes = kState + sizeof(State);
  static_assert(kBytes <= 227 * 1024);  // what a thread block can have
};

namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Together no more than the kernel starts with, 168 for each thread: else it waits for ever.
constexpr int kProducerRegisters = 24;
constexpr int kGroupRegisters = 240;
static_assert(2 * kGroupRegisters + kProducerRegisters <= 3 * 168);
constexpr int kHalfTiles = kValueTiles / 2;
constexpr int kHalf = kDv / 2;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kSlack = 8;  // in powers of 2

// Numbers of named barriers.
enum Named { kWeightsReady = 1, kBothGroups = 3, kOwnGroup = 4 };

__device__ __forceinline__ std::byte* Shared() {
  extern __shared__ __align__(1024) std::byte shared[];
  return shared;
}
__device__ __forceinline__ std::uint32_t SharedBase() { return device::SharedAddress(Shared()); }

__device__ __forceinline__ PlanItem Item(const std::byte* plan, int index) {
  const auto* const from =
      reinterpret_cast<const int4*>(plan + sizeof(PlanHeader)) + std::int64_t{2} * index;
  const int4 a = __ldg(from);
  const int4 b = __ldg(from + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

template <class L>
struct Barriers {
  static __device__ __forceinline__ State& state() {
    return *reinterpret_cast<State*>(Shared() + L::kState);
  }
  static __device__ __forceinline__ std::uint32_t Full(int stage, int tile) {
    return SharedBase() + L::kState + (stage * kMaxTiles + tile) * 8;
  }
  static __device__ __forceinline__ std::uint32_t Empty(int stage, int part) {
    return SharedBase() + L::kState + (kStages * kMaxTiles + stage * kParts + part) * 8;
  }
  static __device__ void Init() {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int tile = 0; tile < kMaxTiles; ++tile) device::InitBarrier(Full(stage, tile), 1);
      // One arrival of each warp of the group that reads the part last.
      for (int part = 0; part < kParts; ++part) device::InitBarrier(Empty(stage, part), 4);
    }
    device::FenceBarrierInit();
  }
};

// One warp. Lane i copies tile i of every block.
template <class L>
class Producer {
  using B = Barriers<L>;

 public:
  __device__ Producer(const Params& p, const CUtensorMap* map)
      : p_(p), map_(map), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void Run() {
    const DeviceStep& step = *p_.step;
    const std::byte* const plan = step.plan;
    first_row_ = static_cast<std::int32_t>(step.kv_offset / (L::kTiles * device::kTileColumns));
    const int boxes_per_block = kBlockKeys / p_.box_keys;
    std::uint32_t block = 0;
    for (int i = static_cast<int>(blockIdx.x); i >= 0; i = item_.next) {
      item_ = Item(plan, i);
      if (item_.rows == 0) break;
      table_ = step.block_table + std::int64_t{item_.entry} * step.table_stride;
      const int boxes = (item_.key_end - item_.key_begin + p_.box_keys - 1) / p_.box_keys;
      // Lane l looks up the rows of boxes l, 32 + l, .., one round ahead.
      std::int32_t row = BoxRow(lane_);
      std::int32_t next_row = BoxRow(32 + lane_);
      for (int box = 0; box < boxes; box += boxes_per_block, ++block) {
        if (box > 0 && box % 32 == 0) {
          row = next_row;
          next_row = BoxRow(box + 32 + lane_);
        }
        CopyBlock(block, row, box, min(boxes_per_block, boxes - box));
      }
    }
  }

 private:
  __device__ std::int32_t BoxRow(int box) const {
    const std::int32_t key = item_.key_begin + box * p_.box_keys;
    if (key >= item_.key_end) return 0;
    return first_row_ + __ldg(table_ + key / p_.page_tokens) * p_.page_rows + key % p_.page_tokens;
  }

  __device__ void CopyBlock(std::uint32_t block, std::int32_t row, int box, int boxes) const {
    const int stage = static_cast<int>(block % kStages);
    const std::uint32_t parity = (block / kStages + 1) % 2;
    if (L::kTiles > kValueTiles) CopyPart(stage, parity, kBeside, row, box, boxes);
    CopyPart(stage, parity, kLeft, row, box, boxes);
    CopyPart(stage, parity, kRight, row, box, boxes);
  }

  __device__ void CopyPart(int stage, std::uint32_t parity, Part part, std::int32_t row, int box,
                           int boxes) const {
    device::WaitBarrier(B::Empty(stage, part), parity);
    const bool mine = lane_ < L::kTiles && lane_ / kHalfTiles == part;
    const std::uint32_t full = B::Full(stage, lane_);
    const std::uint32_t box_bytes = p_.box_keys * device::kTileColumns * 2;
    const std::uint32_t to = SharedBase() + L::kKeys + stage * L::kRowsBytes + lane_ * kTileBytes;
    if (mine) device::ArriveExpect(full, boxes * box_bytes);
    for (int i = 0; i < boxes; ++i) {
      const std::int32_t from = __shfl_sync(kAllLanes, row, (box + i) % 32);
      if (mine) {
        device::CopyBox(to + i * box_bytes, map_, lane_ * device::kTileColumns, from, full);
      }
    }
  }

  const Params& p_;
  const CUtensorMap* const map_;
  const int lane_;
  PlanItem item_;
  const std::int32_t* table_;
  std::int32_t first_row_;
};

// One warpgroup. A thread holds, of rows row() and row() + 8 of the tile, neighbouring columns 8 i
// + 2 t() and 8 i + 2 t() + 1 of scores and of its group's half of the output.
template <class L, int kGroup>
class Group {
  using B = Barriers<L>;
  static constexpr int kOther = 1 - kGroup;

 public:
  __device__ Group(const Params& p)
      : p_(p),
        warp_(static_cast<int>(threadIdx.x) % kGroupThreads / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void Run() {
    const std::byte* const plan = p_.step->plan;
    item_ = Item(plan, static_cast<int>(blockIdx.x));
    if (item_.rows == 0) return;
    const auto* const bounds = reinterpret_cast<const std::int32_t*>(
        plan + reinterpret_cast<const PlanHeader*>(plan)->bounds_offset);
    LoadQuery();
    std::uint32_t block = 0;
    while (true) {
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const int r = row() + hi * 8;
        bound_[hi] = r < item_.rows ? __ldg(bounds + (item_.first_row + r) / p_.heads) : 0;
        reference_[hi] = -INFINITY;
        sum_[hi] = 0;
        rounded_[hi] = 0;
      }
#pragma unroll
      for (float& x : out_) x = 0;
      device::WaitCopies<0>();
      device::FenceAsyncShared();
      device::SyncNamed(kBothGroups, 2 * kGroupThreads);
      for (std::int32_t key = item_.key_begin; key < item_.key_end; key += 2 * kBlockKeys) {
        const bool two = key + kBlockKeys < item_.key_end;
        Blocks(key, block, two);
        block += two ? 2 : 1;
      }
      ShareSums();
      // All scores are made: the query's place is free.
      device::SyncNamed(kBothGroups, 2 * kGroupThreads);
      const PlanItem done = item_;
      if (done.next >= 0) {
        item_ = Item(plan, done.next);
        LoadQuery();
      }
      Emit(done);
      if (done.next < 0) break;
    }
  }

 private:
  __device__ int t() const { return lane_ % 4; }
  __device__ int row() const { return warp_ * 16 + lane_ / 4; }

  // Group 0's block and, with `two`, group 1's behind it. One copy of the code for both cases: what
  // a launch executes only once it waits for, line by line.
  __device__ void Blocks(std::int32_t key, std::uint32_t block, bool two) {
    const int first = static_cast<int>(block % kStages);
    const std::uint32_t first_parity = block / kStages % 2;
    const int second = static_cast<int>((block + 1) % kStages);
    const std::uint32_t second_parity = (block + 1) / kStages % 2;
    float scores[32];
    std::uint32_t weights[4][4];
    float factor[2];
    if (kGroup == 0) {
      Score(scores, first, first_parity);
      Mask(scores, key, first);
      Weigh(scores, key == item_.key_begin, weights, factor);
      ShareWeights(weights);
      AddOwn(weights, factor, first);
      SumRounded(weights);
      Wait(first);
      if (!two) return;
      device::SyncNamed(kWeightsReady + kOther, 2 * kGroupThreads);
      AddOther(second);
      Wait(second);
    } else {
      if (two) {
        Score(scores, second, second_parity);
        Mask(scores, key + kBlockKeys, second);
      } else {
#pragma unroll
        for (float& x : scores) x = -INFINITY;  // makes no difference to any sum
      }
      device::SyncNamed(kWeightsReady + kOther, 2 * kGroupThreads);
      AddOther(first);
      Weigh(scores, false, weights, factor);
      Wait(first);
      if (!two) return;
      ShareWeights(weights);
      AddOwn(weights, factor, second);
      SumRounded(weights);
      Wait(second);
    }
  }

  // Both groups, each every second 16-byte piece. Rows beyond the tile's stay as they are: nothing
  // made of them is written anywhere.
  __device__ void LoadQuery() const {
    constexpr int kPieces = L::kTiles * 8;
    const Bf16* const from = p_.query + std::int64_t{item_.first_row} * p_.d_qk;
    const std::uint32_t to = SharedBase() + L::kQuery;
    const int count = item_.rows * kPieces;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 2 * kGroupThreads) {
      const int r = i / kPieces;
      const int piece = i % kPieces;
      device::CopyAsync16(to + piece / 8 * kTileBytes + r * 128 + (piece % 8 ^ r % 8) * 16,
                          from + i * 8, true);
    }
    device::CommitCopies();
  }

  __device__ void Score(float (&scores)[32], int stage, std::uint32_t parity) const {
    const std::uint64_t query = device::RowsOperand(SharedBase() + L::kQuery);
    const std::uint64_t keys = device::RowsOperand(SharedBase() + L::kKeys + stage * L::kRowsBytes);
#pragma unroll
    for (float& x : scores) x = 0;
    device::KeepBehind(scores);
#pragma unroll(L::kTiles == 9 ? 3 : 4)
    for (int i = 0; i < L::kTiles; ++i) {
      const int tile = i + kValueTiles < L::kTiles ? i + kValueTiles  // in the order of the copies
                                                   : i + kValueTiles - L::kTiles;
      device::WaitBarrier(B::Full(stage, tile), parity);
      device::FenceProducts();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const std::uint32_t at = (tile * kTileBytes + k * 32) / 16;
        device::MultiplyRows64(scores, query + at, keys + at);
      }
    }
    device::CommitProducts();
    device::WaitProducts<0>();
    device::KeepBehind(scores);
    if (L::kTiles > kValueTiles && lane_ == 0) device::Arrive(B::Empty(stage, kBeside));
  }

  // Turns scores into weights, as operands of products. factor: for what was summed before. Without
  // branches: products may be under way.
  __device__ void Weigh(float (&scores)[32], bool first, std::uint32_t (&weights)[4][4],
                        float (&factor)[2]) {
    State& state = B::state();
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      const int r = row() + hi * 8;
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        top = fmaxf(top, scores[i / 2 * 4 + hi * 2 + i % 2]);  // ignores NaN: its weight is NaN
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2)) * p_.scale_log2;
      const float before = first ? -INFINITY : state.reference[kOther][r];
      const float now = top > before + kSlack ? top : before;
      factor[hi] = Rescale(before, now);
      if (t() == 0) {
        state.reference[kGroup][r] = now;
        state.rescale[kGroup][r] = factor[hi];
      }
      const float minus = -Reference(now);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& x = scores[i / 2 * 4 + hi * 2 + i % 2];
        x = Exp2(__fmaf_rn(x, p_.scale_log2, minus));
        sum += x;
      }
      const float rescale = Rescale(reference_[hi], now);
      sum_[hi] = __fmaf_rn(sum_[hi], rescale, sum);
      rounded_[hi] *= rescale;
      reference_[hi] = now;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = device::PackBf16(scores[k * 8 + i * 2], scores[k * 8 + i * 2 + 1]);
      }
    }
  }

  // Beside the products that read the same registers. The branch is always taken: without it the
  // compiler puts these instructions between the products, which then start late.
  __device__ void SumRounded(const std::uint32_t (&weights)[4][4]) {
    if (item_.rows == 0) return;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::uint32_t pair = weights[i / 2][i % 2 * 2 + hi];
        sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
      }
      rounded_[hi] += sum;
    }
  }

  // For blocks with keys that some row does not see: their scores become -inf. 0 * NaN is NaN, so
  // keys behind the last one become zeros; and of keys that only some rows see, value elements that
  // are not finite become zeros and the key's scores NaN.
  __device__ void Mask(float (&scores)[32], std::int32_t key, int stage) {
    const std::int32_t end = min(key + kBlockKeys, item_.key_end);
    if (item_.min_bound >= end && end == key + kBlockKeys) return;
    State& state = B::state();
    std::byte* const keys = Shared() + L::kKeys + stage * L::kRowsBytes;
    const int thread = warp_ * 32 + lane_;
    const int shared_keys = max(item_.min_bound - key, 0);  // that all rows see
    const int seen_keys = end - key;
    for (int i = thread; i < (kBlockKeys - seen_keys) * kValueTiles * 8; i += kGroupThreads) {
      const int piece = i % (kValueTiles * 8);
      const int r = seen_keys + i / (kValueTiles * 8);
      *reinterpret_cast<uint4*>(keys + piece / 8 * kTileBytes + r * 128 + piece % 8 * 16) = uint4{};
    }
    for (int r = shared_keys + warp_; r < seen_keys; r += 4) {
      bool found = false;
#pragma unroll 1
      for (int i = lane_; i < kDv / 2; i += 32) {
        auto* const pair =
            reinterpret_cast<std::uint32_t*>(keys + i / 32 * kTileBytes + r * 128 + i % 32 * 4);
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
      if (lane_ == 0) state.not_finite[kGroup][r] = found ? 1 : 0;
    }
    device::FenceAsyncShared();
    device::SyncNamed(kOwnGroup + kGroup, kGroupThreads);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int in_block = i / 4 * 8 + t() * 2 + i % 2;
      if (in_block >= shared_keys && state.not_finite[kGroup][in_block] != 0) scores[i] = NAN;
      if (key + in_block >= bound_[i / 2 % 2]) scores[i] = -INFINITY;
    }
  }

  // Puts the weights where the other group's products read them.
  __device__ void ShareWeights(const std::uint32_t (&weights)[4][4]) const {
    const int r = lane_ % 16;
    const std::uint32_t to = SharedBase() + L::kWeights + (warp_ * 16 + r) * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      device::StoreBlocks(to + ((k * 2 + lane_ / 16) ^ r % 8) * 16, weights[k]);
    }
    device::FenceAsyncShared();
    device::ArriveNamed(kWeightsReady + kGroup, 2 * kGroupThreads);
  }

  __device__ std::uint64_t Values(int stage) const {
    return device::ColumnsOperand(
        SharedBase() + L::kKeys + stage * L::kRowsBytes + kGroup * kHalfTiles * kTileBytes,
        kTileBytes);
  }

  __device__ void ScaleOut(float low, float high) {
    if (!__any_sync(kAllLanes, low != 1.0f || high != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) out_[i] *= i / 2 % 2 == 0 ? low : high;
  }

  __device__ void AddOwn(const std::uint32_t (&weights)[4][4], const float (&factor)[2],
                         int stage) {
    ScaleOut(factor[0], factor[1]);
    const std::uint64_t values = Values(stage);
    device::KeepBehind(out_);
    device::FenceProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      device::MultiplyColumns256(out_, weights[k], values + k * (16 * 128 / 16));
    }
    device::CommitProducts();
  }

  __device__ void AddOther(int stage) {
    const State& state = B::state();
    ScaleOut(state.rescale[kOther][row()], state.rescale[kOther][row() + 8]);
    const std::uint64_t values = Values(stage);
    const std::uint64_t weights = device::RowsOperand(SharedBase() + L::kWeights);
    device::KeepBehind(out_);
    device::FenceProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      device::MultiplyColumns256(out_, weights + k * (32 / 16), values + k * (16 * 128 / 16));
    }
    device::CommitProducts();
  }

  // Until the products with the values of `stage` are done.
  __device__ void Wait(int stage) {
    device::WaitProducts<0>();
    device::KeepBehind(out_);
    if (lane_ == 0) device::Arrive(B::Empty(stage, kGroup == 0 ? kLeft : kRight));
  }

  __device__ static float SumOfFour(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }

  __device__ void ShareSums() {
    State& state = B::state();
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      const float sum = SumOfFour(sum_[hi]);
      const float rounded = SumOfFour(rounded_[hi]);
      if (t() == 0) {
        state.sum[kGroup][row() + hi * 8] = sum;
        state.rounded[kGroup][row() + hi * 8] = rounded;
        state.last_reference[kGroup][row() + hi * 8] = reference_[hi];
      }
    }
  }

  __device__ void Emit(const PlanItem& item) {
    const State& state = B::state();
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      const int r = row() + hi * 8;
      const bool valid = r < item.rows;
      const float reference0 = state.last_reference[0][r];
      const float reference1 = state.last_reference[1][r];
      const bool empty = bound_[hi] == 0;
      const float reference = empty ? -INFINITY : fmaxf(reference0, reference1);
      const float scale0 = Rescale(reference0, reference);
      const float scale1 = Rescale(reference1, reference);
      const float sum = __fmaf_rn(state.sum[0][r], scale0, state.sum[1][r] * scale1);
      const float rounded = __fmaf_rn(state.rounded[0][r], scale0, state.rounded[1][r] * scale1);
      const bool writes_row = valid && kGroup == 0 && t() == 0;
      if (item.slot_row >= 0) {
        const std::int64_t slot = std::int64_t{item.slot_row} + r;
        if (writes_row) {
          p_.slot_max[slot] = reference;
          p_.slot_sum[slot] = empty ? 0.0f : sum;
        }
        // As if the weights had not been rounded, so that slots add up. A row may see no key of the
        // item.
        const float factor = rounded > 0 ? sum / rounded : 1.0f;
        StoreFloats<true>(p_.slots + slot * kDv, hi, factor, valid);
        continue;
      }
      const RowTarget to = Target(p_, item.first_row + r);
      const float factor = empty ? 0.0f : 1.0f / rounded;
      if (writes_row) *to.lse = empty ? -INFINITY : reference + log2f(sum);
      auto* const pairs = reinterpret_cast<std::uint32_t*>(to.out);
      auto* const floats = reinterpret_cast<float*>(to.out);
      if (p_.partial_dtype == DType::kBf16) {
        p_.wide_stores ? StoreBf16<true>(pairs, hi, factor, valid)
                       : StoreBf16<false>(pairs, hi, factor, valid);
      } else {
        p_.wide_stores ? StoreFloats<true>(floats, hi, factor, valid)
                       : StoreFloats<false>(floats, hi, factor, valid);
      }
    }
  }

  // Lanes of even and odd t() trade pairs of neighbouring 8-column blocks, so that each has four
  // columns in a row.
  template <bool kWide>
  __device__ void StoreFloats(float* to, int hi, float factor, bool valid) const {
    to += kGroup * kHalf;
    const bool odd = t() % 2 != 0;
#pragma unroll
    for (int i = 0; i < kHalf / 8; i += 2) {
      const float x0 = out_[i * 4 + hi * 2] * factor;
      const float x1 = out_[i * 4 + hi * 2 + 1] * factor;
      const float y0 = out_[i * 4 + 4 + hi * 2] * factor;
      const float y1 = out_[i * 4 + 4 + hi * 2 + 1] * factor;
      if (kWide) {
        const float other0 = __shfl_xor_sync(kAllLanes, odd ? x0 : y0, 1);
        const float other1 = __shfl_xor_sync(kAllLanes, odd ? x1 : y1, 1);
        const float4 four =
            odd ? make_float4(other0, other1, y0, y1) : make_float4(x0, x1, other0, other1);
        if (valid) {
          *reinterpret_cast<float4*>(to + (i + (odd ? 1 : 0)) * 8 + t() / 2 * 4) = four;
        }
      } else if (valid) {
        to[i * 8 + t() * 2] = x0;
        to[i * 8 + t() * 2 + 1] = x1;
        to[i * 8 + 8 + t() * 2] = y0;
        to[i * 8 + 8 + t() * 2 + 1] = y1;
      }
    }
  }

  // Four lanes trade four 8-column blocks: each has one block in a row.
  template <bool kWide>
  __device__ void StoreBf16(std::uint32_t* to, int hi, float factor, bool valid) const {
    to += kGroup * kHalf / 2;
#pragma unroll
    for (int i = 0; i < kHalf / 8; i += 4) {
      std::uint32_t x[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int at = (i + b) * 4 + hi * 2;
        x[b] = device::PackBf16(out_[at] * factor, out_[at + 1] * factor);
      }
      if (kWide) {
        Trade(x[0], x[1], 1);
        Trade(x[2], x[3], 1);
        Trade(x[0], x[2], 2);
        Trade(x[1], x[3], 2);
        if (valid) {
          *reinterpret_cast<uint4*>(to + (i + t()) * 4) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      } else if (valid) {
#pragma unroll
        for (int b = 0; b < 4; ++b) to[(i + b) * 4 + t()] = x[b];
      }
    }
  }

  // A step of transposing: `high` of the lane without `bit` for `low` of the lane with it.
  __device__ void Trade(std::uint32_t& low, std::uint32_t& high, int bit) const {
    const bool has = (t() & bit) != 0;
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, has ? low : high, bit);
    (has ? low : high) = other;
  }

  const Params& p_;
  const int warp_;
  const int lane_;
  PlanItem item_;
  std::int32_t bound_[2];
  float reference_[2];  // of sum_
  float sum_[2];        // of this thread's weights, of its group's blocks
  float rounded_[2];    // of the same, as the products take them
  float out_[kHalf / 2];
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class L>
__global__ void __launch_bounds__(kThreads, 1)
    Attend(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x == 0) {
    device::PrefetchTensorMap(&map);
    Barriers<L>::Init();
  }
  __syncthreads();
  device::LetDependentsStart();
  if (threadIdx.x < kGroupThreads) {
    device::TakeRegisters<kGroupRegisters>();
    Group<L, 0>(p).Run();
  } else if (threadIdx.x < 2 * kGroupThreads) {
    device::TakeRegisters<kGroupRegisters>();
    Group<L, 1>(p).Run();
  } else {
    device::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x < 2 * kGroupThreads + 32) Producer<L>(p, &map).Run();
  }
#endif
}

template <class F>
auto WithLayout(int d_qk, F f) {
  return d_qk == kDv ? f(Layout<kValueTiles>()) : f(Layout<kMaxTiles>());
}

}  // namespace

Status Prepare(int d_qk) {
  return WithLayout(d_qk, [](auto layout) {
    using L = decltype(layout);
    return cuda::Check(
        cudaFuncSetAttribute(Attend<L>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes),
        "cudaFuncSetAttribute");
  });
}

Status Launch(const Params& params, const Bf16* kv, int blocks, StreamRef stream) {
  constexpr std::int64_t kRows = std::int64_t{1} << 31;  // more than any GPU's memory has
  DCP_ASSIGN_OR_RETURN(const CUtensorMap map,
                       device::MakeRowTensorMap(kv, kRows, params.d_qk, params.box_keys));
  DCP_RETURN_IF_ERROR(WithLayout(params.d_qk, [&](auto layout) {
    using L = decltype(layout);
    Attend<L>
        <<<static_cast<unsigned>(blocks), kThreads, L::kBytes, cuda::Raw(stream)>>>(params, map);
    return cuda::CheckLaunch("sm90_dense");
  }));
  return LaunchMerge(params, blocks, stream);
}

}  // namespace dcp::sm90
