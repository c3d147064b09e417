// cpu_reference: the truth. Two-pass softmax, one row at a time, everything in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/attention_backend.h"
#include "kernels/worker_pool.h"

namespace dcp {
namespace {

constexpr int kMaxDv = 1024;  // as declared in backends.inc

class CpuReference final : public AttentionBackend {
 public:
  explicit CpuReference(const BackendSetup& setup)
      : geometry_(setup.geometry), pool_(setup.pool), row_task_([this](std::int64_t row) {
          AttendRow(static_cast<int>(row / geometry_.heads),
                    static_cast<int>(row % geometry_.heads));
        }) {}

  Status Run(const AttentionArgs& args) override {
    args_ = &args;
    const std::int64_t rows = std::int64_t{args.tokens} * geometry_.heads;
    if (pool_ != nullptr) {
      pool_->ParallelFor(rows, row_task_);
    } else {
      for (std::int64_t row = 0; row < rows; ++row) row_task_(row);
    }
    return Status::Ok();
  }

 private:
  const Bf16* Key(int entry, int key) const {
    const std::int32_t page =
        args_->block_table[entry * args_->block_table_stride + key / geometry_.page_tokens];
    return args_->kv + page * args_->page_stride +
           std::int64_t{key % geometry_.page_tokens} * geometry_.d_qk;
  }

  double Score(const Bf16* query, const Bf16* key) const {
    double dot = 0;
    for (int i = 0; i < geometry_.d_qk; ++i) dot += double{ToFloat(query[i])} * ToFloat(key[i]);
    return geometry_.softmax_scale * dot;
  }

  void AttendRow(int token, int head) const {
    const int entry =
        static_cast<int>(
            std::upper_bound(args_->entry_begin, args_->entry_begin + args_->entries + 1, token) -
            args_->entry_begin) -
        1;
    const Bf16* const query =
        args_->query + (std::int64_t{token} * geometry_.heads + head) * geometry_.d_qk;
    const int bound = args_->bound[token];
    double acc[kMaxDv] = {};
    if (bound == 0) {
      Write(token, head, acc, 1, -std::numeric_limits<double>::infinity());
      return;
    }
    double max = -std::numeric_limits<double>::infinity();
    for (int k = 0; k < bound; ++k) max = std::fmax(max, Score(query, Key(entry, k)));
    double sum = 0;
    for (int k = 0; k < bound; ++k) {
      const Bf16* const key = Key(entry, k);
      const double weight = std::exp(Score(query, key) - max);  // NaN if the score is, or all -inf
      sum += weight;
      for (int i = 0; i < geometry_.d_v; ++i) acc[i] += weight * ToFloat(key[i]);
    }
    Write(token, head, acc, sum, max + std::log(sum));
  }

  void Write(int token, int head, const double* acc, double sum, double lse) const {
    const PartialLayout& to = args_->partial;
    const std::int64_t row = std::int64_t{token} * to.heads_per_group + head % to.heads_per_group;
    const int group = head / to.heads_per_group;
    const auto lse_f32 = static_cast<float>(lse);
    std::memcpy(to.lse + group * to.lse_group_stride + row * 4, &lse_f32, sizeof(lse_f32));
    std::byte* const out =
        to.out + group * to.out_group_stride +
        row * geometry_.d_v * static_cast<std::int64_t>(SizeOf(geometry_.partial_dtype));
    for (int i = 0; i < geometry_.d_v; ++i) {
      const auto value = static_cast<float>(acc[i] / sum);
      if (geometry_.partial_dtype == DType::kBf16) {
        const Bf16 rounded = ToBf16(value);
        std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
      } else {
        std::memcpy(out + i * sizeof(value), &value, sizeof(value));
      }
    }
  }

  const AttentionGeometry geometry_;
  WorkerPool* const pool_;
  const std::function<void(std::int64_t)> row_task_;
  const AttentionArgs* args_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<AttentionBackend>> MakeCpuReference(const BackendSetup& setup) {
  return std::unique_ptr<AttentionBackend>(std::make_unique<CpuReference>(setup));
}

}  // namespace dcp
