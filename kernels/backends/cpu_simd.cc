// cpu_simd: what is computed where. The arithmetic is in cpu_simd_kernels.cc.
//
// The rows of an entry form groups of kGroupRows, the keys of a group chunks of kChunkKeys. A group
// is done by one worker, chunk after chunk, unless its share of the step is so large that workers
// would wait for it: then its chunks are spread over workers, in waves of as many as there are
// slots, and merged in order after each wave. Both ways do the same operations in the same order,
// so the result does not depend on the number of threads or on the rest of the batch.
#include <hwy/aligned_allocator.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "kernels/backends/cpu_simd_kernels.h"
#include "kernels/worker_pool.h"

namespace dcp {
namespace {

using simd::kChunkKeys;
using simd::kGroupRows;

constexpr int kSlotsPerWorker = 16;
// A group is split if its chunks are more than 1 / (kShares * workers) of the step.
constexpr int kShares = 4;
// Below this many keys (summed over groups) waking workers costs more than it saves.
constexpr std::int64_t kInlineKeys = 96;
constexpr std::int64_t kGroupOverheadKeys = 16;  // packing and writing a group, in keys

template <class T>
using Aligned = hwy::AlignedFreeUniquePtr<T[]>;

struct Group {
  simd::RowGroup rows;
  int entry;
  std::int64_t first_row;  // token * heads + head, in the step
  int split;               // index among the split groups, -1: not split
  int chunks() const { return (rows.max_bound + kChunkKeys - 1) / kChunkKeys; }
};

struct Piece {  // one chunk of a split group
  int group;
  int chunk;
};

class CpuSimd final : public AttentionBackend {
 public:
  explicit CpuSimd(const BackendSetup& setup)
      : geometry_(setup.geometry),
        pool_(setup.pool),
        max_tokens_(setup.max_tokens),
        workers_(setup.pool == nullptr ? 1 : setup.pool->width()),
        slots_(workers_ == 1 ? 0 : workers_ * kSlotsPerWorker),
        max_split_(workers_ == 1 ? 0 : workers_ * kShares),
        query_items_(static_cast<std::size_t>(geometry_.d_qk / 2) * kGroupRows),
        acc_items_(static_cast<std::size_t>(geometry_.d_v) * kGroupRows) {
    const int groups_per_token = (geometry_.heads + kGroupRows - 1) / kGroupRows;
    groups_.resize(static_cast<std::size_t>(max_tokens_) * groups_per_token);
    whole_.reserve(groups_.size());
    pieces_.reserve(static_cast<std::size_t>(slots_));
    split_.reserve(static_cast<std::size_t>(max_split_));
    states_.resize(static_cast<std::size_t>(2 * workers_ + slots_ + max_split_));
    const auto workers = static_cast<std::size_t>(workers_);
    query_ = hwy::AllocateAligned<std::uint32_t>(workers * query_items_);
    scores_ = hwy::AllocateAligned<float>(workers * kScoreItems);
    acc_ = hwy::AllocateAligned<float>(states_.size() * acc_items_);
    for (std::size_t i = 0; i < states_.size(); ++i) states_[i].acc = acc_.get() + i * acc_items_;
    wave_task_ = [this](std::int64_t worker) { WaveWork(static_cast<int>(worker)); };
    merge_task_ = [this](std::int64_t split) { MergeWave(static_cast<int>(split)); };
  }

  Status Run(const AttentionArgs& args) override {
    if (args.tokens > max_tokens_) {
      return Status(Reason::kInternal, "cpu_simd: step of " + std::to_string(args.tokens) +
                                           " tokens, made for " + std::to_string(max_tokens_));
    }
    args_ = &args;
    std::int64_t work = 0;
    std::int64_t total_chunks = 0;
    MakeGroups(work, total_chunks);
    ChooseSplit(total_chunks);

    const bool alone = workers_ == 1 || work <= kInlineKeys;
    int chunk = 0;
    std::size_t in_chunk = 0;  // split groups that have a piece of `chunk` already
    bool more = true;
    while (more) {
      more = FillWave(chunk, in_chunk);
      whole_in_wave_ = more ? 0 : static_cast<std::int64_t>(whole_.size());
      next_.store(0, std::memory_order_relaxed);
      const auto items = static_cast<std::int64_t>(pieces_.size()) + whole_in_wave_;
      const std::int64_t width = alone ? 1 : std::min<std::int64_t>(workers_, items);
      if (width == 1) {
        WaveWork(0);
      } else {
        pool_->ParallelFor(width, wave_task_);
      }
      if (!pieces_.empty()) {
        pool_->ParallelFor(static_cast<std::int64_t>(split_.size()), merge_task_);
      }
    }
    return Status::Ok();
  }

 private:
  static constexpr std::size_t kScoreItems = std::size_t{simd::kTileKeys} * kGroupRows;

  void MakeGroups(std::int64_t& work, std::int64_t& total_chunks) {
    num_groups_ = 0;
    const int heads = geometry_.heads;
    for (int e = 0; e < args_->entries; ++e) {
      const std::int64_t begin = std::int64_t{args_->entry_begin[e]} * heads;
      const std::int64_t end = std::int64_t{args_->entry_begin[e + 1]} * heads;
      for (std::int64_t row = begin; row < end; row += kGroupRows) {
        Group& group = groups_[num_groups_++];
        group.entry = e;
        group.first_row = row;
        group.split = -1;
        simd::RowGroup& rows = group.rows;
        rows.rows = static_cast<int>(std::min<std::int64_t>(kGroupRows, end - row));
        for (int r = 0; r < rows.rows; ++r) rows.bounds[r] = args_->bound[(row + r) / heads];
        rows.max_bound = *std::max_element(rows.bounds, rows.bounds + rows.rows);
        rows.min_bound = *std::min_element(rows.bounds, rows.bounds + rows.rows);
        std::fill(rows.bounds + rows.rows, rows.bounds + kGroupRows, rows.max_bound);
        work += rows.max_bound + kGroupOverheadKeys;
        total_chunks += group.chunks();
      }
    }
  }

  void ChooseSplit(std::int64_t total_chunks) {
    whole_.clear();
    split_.clear();
    for (int g = 0; g < num_groups_; ++g) {
      Group& group = groups_[g];
      if (workers_ > 1 && group.chunks() > 1 &&
          std::int64_t{group.chunks()} * workers_ * kShares > total_chunks) {
        group.split = static_cast<int>(split_.size());
        split_.push_back(g);
      } else {
        whole_.push_back(g);
      }
    }
  }

  // Collects pieces, chunk by chunk over all split groups (groups of one entry then read the same
  // keys at about the same time), until the slots are full. False: none are left after these.
  bool FillWave(int& chunk, std::size_t& in_chunk) {
    pieces_.clear();
    int most = 0;
    for (const int g : split_) most = std::max(most, groups_[g].chunks());
    for (; chunk < most; ++chunk, in_chunk = 0) {
      for (; in_chunk < split_.size(); ++in_chunk) {
        if (chunk >= groups_[split_[in_chunk]].chunks()) continue;
        if (pieces_.size() == static_cast<std::size_t>(slots_)) return true;
        pieces_.push_back({split_[in_chunk], chunk});
      }
    }
    return false;
  }

  simd::RowState& WorkerState(int worker, int i) { return states_[2 * worker + i]; }
  simd::RowState& SlotState(std::size_t i) { return states_[2 * workers_ + i]; }
  simd::RowState& SplitState(int split) { return states_[2 * workers_ + slots_ + split]; }

  void WaveWork(int worker) {
    const auto num_pieces = static_cast<std::int64_t>(pieces_.size());
    while (true) {
      const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i < num_pieces) {
        const Piece& piece = pieces_[i];
        const Group& group = groups_[piece.group];
        const simd::AttendArgs attend = Prepare(group, worker);
        const int begin = piece.chunk * kChunkKeys;
        simd::AttendChunk(attend, begin, begin + kChunkKeys, SlotState(i));
      } else if (i < num_pieces + whole_in_wave_) {
        AttendWhole(groups_[whole_[i - num_pieces]], worker);
      } else {
        return;
      }
    }
  }

  void AttendWhole(const Group& group, int worker) {
    simd::RowState& state = WorkerState(worker, 0);
    if (group.rows.max_bound > 0) {
      const simd::AttendArgs attend = Prepare(group, worker);
      simd::AttendChunk(attend, 0, kChunkKeys, state);
      simd::RowState& chunk = WorkerState(worker, 1);
      for (int c = 1; c < group.chunks(); ++c) {
        simd::AttendChunk(attend, c * kChunkKeys, (c + 1) * kChunkKeys, chunk);
        simd::MergeChunk(group.rows, c * kChunkKeys, geometry_.d_v, chunk, state);
      }
    }
    Write(group, state);
  }

  void MergeWave(int split) {
    const int index = split_[split];
    const Group& group = groups_[index];
    simd::RowState& state = SplitState(split);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (pieces_[i].group != index) continue;
      const int chunk = pieces_[i].chunk;
      if (chunk == 0) {
        // Swapping instead of copying: the slot takes the old buffer.
        std::swap(state, SlotState(i));
      } else {
        simd::MergeChunk(group.rows, chunk * kChunkKeys, geometry_.d_v, SlotState(i), state);
      }
      if (chunk == group.chunks() - 1) Write(group, state);
    }
  }

  simd::AttendArgs Prepare(const Group& group, int worker) {
    std::uint32_t* const query = query_.get() + worker * query_items_;
    simd::PackQueries(args_->query + group.first_row * geometry_.d_qk, group.rows.rows,
                      geometry_.d_qk, query);
    return {.query = query,
            .scores = scores_.get() + worker * kScoreItems,
            .group = &group.rows,
            .pages = {.kv = args_->kv,
                      .page_stride = args_->page_stride,
                      .table = args_->block_table + group.entry * args_->block_table_stride,
                      .page_tokens = geometry_.page_tokens},
            .d_qk = geometry_.d_qk,
            .d_v = geometry_.d_v,
            .scale_log2 = static_cast<float>(geometry_.softmax_scale * kLog2E)};
  }

  void Write(const Group& group, const simd::RowState& state) {
    const PartialLayout& to = args_->partial;
    const std::int64_t row_bytes =
        geometry_.d_v * static_cast<std::int64_t>(SizeOf(geometry_.partial_dtype));
    std::byte* out[kGroupRows];
    std::byte* lse[kGroupRows];
    for (int r = 0; r < group.rows.rows; ++r) {
      const std::int64_t token = (group.first_row + r) / geometry_.heads;
      const auto head = static_cast<int>((group.first_row + r) % geometry_.heads);
      const std::int64_t row = token * to.heads_per_group + head % to.heads_per_group;
      const int head_group = head / to.heads_per_group;
      out[r] = to.out + head_group * to.out_group_stride + row * row_bytes;
      lse[r] = to.lse + head_group * to.lse_group_stride + row * 4;
    }
    simd::WriteRows(group.rows, geometry_.d_v, state, geometry_.partial_dtype, out, lse);
  }

  const AttentionGeometry geometry_;
  WorkerPool* const pool_;
  const int max_tokens_;
  const int workers_;
  const int slots_;
  const int max_split_;
  const std::size_t query_items_;
  const std::size_t acc_items_;
  Aligned<std::uint32_t> query_;        // [workers][d_qk / 2, kGroupRows]
  Aligned<float> scores_;               // [workers][kTileKeys, kGroupRows]
  Aligned<float> acc_;                  // [states][kGroupRows, d_v]
  std::vector<simd::RowState> states_;  // two per worker, one per slot, one per split group

  // The running step.
  const AttentionArgs* args_ = nullptr;
  std::vector<Group> groups_;
  int num_groups_ = 0;
  std::vector<int> whole_;
  std::vector<int> split_;
  std::vector<Piece> pieces_;  // of this wave; piece i goes to slot i
  std::int64_t whole_in_wave_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::function<void(std::int64_t)> wave_task_;
  std::function<void(std::int64_t)> merge_task_;
};

}  // namespace

Result<std::unique_ptr<AttentionBackend>> MakeCpuSimd(const BackendSetup& setup) {
  return std::unique_ptr<AttentionBackend>(std::make_unique<CpuSimd>(setup));
}

}  // namespace dcp
