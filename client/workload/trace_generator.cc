#include "client/workload/trace_generator.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "client/workload/synthetic.h"

namespace dcp {
namespace {

// The standard library's distributions differ between implementations; these do not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : seed_(seed) {}
  double Unit() { return UnitInterval(HashWords(seed_, ++count_)); }
  double Between(double low, double high) { return low + (high - low) * Unit(); }
  double Exponential(double mean) { return -mean * std::log(1 - Unit()); }

 private:
  std::uint64_t seed_;
  std::uint64_t count_ = 0;
};

class Generator {
 public:
  explicit Generator(const TraceOptions& options) : options_(options), random_(options.seed) {
    for (std::int64_t i = 0; i < options.system_prompts; ++i) {
      const std::int64_t blocks = 1 + i % 2;
      prompts_.emplace_back();
      AddBlocks(prompts_.back(), blocks);
    }
  }

  std::vector<TraceRow> Run() {
    double begin_ms = 0;
    // About 3 requests a conversation.
    const double bursts = std::max(
        1.0, static_cast<double>(options_.requests) / 3.0 / static_cast<double>(options_.burst));
    for (std::int64_t i = 0; !Full(); ++i) {
      if (i > 0 && i % options_.burst == 0) {
        begin_ms += random_.Exponential(options_.duration_s * 1000.0 / bursts);
      }
      const std::int64_t turns =
          i % 3 == 0 ? options_.fork_depth : 1 + static_cast<std::int64_t>(random_.Between(0, 3));
      Conversation(begin_ms, turns);
    }
    std::stable_sort(rows_.begin(), rows_.end(), [](const TraceRow& a, const TraceRow& b) {
      return a.timestamp_ms < b.timestamp_ms;
    });
    return std::move(rows_);
  }

 private:
  using Ids = std::vector<std::uint64_t>;
  bool Full() const { return static_cast<std::int64_t>(rows_.size()) >= options_.requests; }

  void AddBlocks(Ids& ids, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) ids.push_back(next_id_++);
  }

  void Conversation(double now_ms, std::int64_t turns) {
    Ids context = prompts_[static_cast<std::size_t>(
        random_.Between(0, static_cast<double>(prompts_.size())))];
    for (std::int64_t turn = 0; turn < turns && !Full(); ++turn) {
      const auto shared = static_cast<std::int64_t>(context.size()) * kTraceBlockTokens;
      const double share = std::max(0.02, options_.shared_share);
      const double fresh =
          static_cast<double>(shared) * (1 - share) / share * random_.Between(0.8, 1.2);
      const std::int64_t input =
          std::min(options_.max_input, shared + std::max<std::int64_t>(1, std::llround(fresh)));
      if (input <= shared) return;  // the context is full
      TraceRow row;
      row.timestamp_ms = std::round(now_ms);
      row.input_length = input;
      row.output_length = Output();
      row.hash_ids = context;
      AddBlocks(row.hash_ids, (input + kTraceBlockTokens - 1) / kTraceBlockTokens -
                                  static_cast<std::int64_t>(context.size()));
      rows_.push_back(row);
      if (!Full() && random_.Unit() < options_.regenerate_share) {
        row.timestamp_ms += std::round(random_.Exponential(1000));
        row.output_length = Output();
        rows_.push_back(row);
      }
      context = row.hash_ids;
      if (input % kTraceBlockTokens != 0) context.pop_back();  // the answer changes that block
      now_ms += random_.Exponential(options_.duration_s * 100.0);
    }
  }

  std::int64_t Output() {
    const auto mean = static_cast<double>(options_.mean_output);
    return std::max<std::int64_t>(1, std::llround(mean * random_.Between(0.5, 1.5)));
  }

  TraceOptions options_;
  Random random_;
  std::uint64_t next_id_ = 0;
  std::vector<Ids> prompts_;
  std::vector<TraceRow> rows_;
};

}  // namespace

std::vector<TraceRow> GenerateTrace(const TraceOptions& options) {
  DCP_CHECK(options.requests >= 1 && options.fork_depth >= 1 && options.system_prompts >= 1);
  DCP_CHECK(options.shared_share >= 0 && options.shared_share <= 0.95);
  DCP_CHECK(options.max_input > 2 * kTraceBlockTokens && options.mean_output >= 1);
  DCP_CHECK(options.burst >= 1 && options.duration_s >= 0);
  return Generator(options).Run();
}

}  // namespace dcp
