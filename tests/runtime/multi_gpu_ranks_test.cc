// Two ranks on two GPUs through NCCL: eager and as graphs, against the float64 truth and each
// other; and ranks that fail or stall in the middle of an exchange. Needs two devices.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/support/cluster.h"
#include "tests/support/gpu.h"
#include "tests/support/sizes.h"

namespace dcp::testing {
namespace {

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kA2a, ExchangeKind::kAgRs};

ClusterOptions Options(bool graphs, ExchangeKind exchange, int heads = 8) {
  ClusterOptions options{.ranks = 2,
                         .heads = heads,
                         .kv_lora_rank = 512,
                         .rope_dim = 64,
                         .page_tokens = 64,
                         .interleave = 1,
                         .blocks = 200,
                         .exchange = exchange,
                         .timeout_ms = 20000,
                         .on = OnOwnDevices(graphs)};
  REQUIRE(Devices() >= 2);
  return options;
}

// Sequences of mixed lengths and what is done to them: the same in every run.
class Story {
 public:
  explicit Story(const ClusterOptions& options) : cluster_(options) {
    for (const std::int64_t length : {0, 1, 2, 63, 64, 127, 500, 1000}) {
      sequences_.push_back(cluster_.Create("s" + std::to_string(length), sequences_.size() + 1));
      lengths_.push_back(length);
      cluster_.Append(sequences_.back(), step_id_, 0, length);
    }
  }

  // Steps of every batch size, permuted, with lengths that cross an owner change, page tables that
  // change and eager writes between. Returns all output bytes.
  std::vector<std::string> Play() {
    std::vector<std::string> outputs;
    std::mt19937 random(3);
    for (int round = 0; round < (SmallSizes() ? 4 : 12); ++round) {
      ++step_id_;
      std::vector<std::size_t> order(sequences_.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      order.resize(1 + static_cast<std::size_t>(round) % order.size());
      const int count = 1 << (round % 3);
      for (int layer = 0; layer < 2; ++layer) {
        const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBf16;
        StepSpec step{.step_id = step_id_, .layer = layer, .output_dtype = dtype};
        for (const std::size_t i : order) {
          step.items.push_back({&sequences_[i], lengths_[i], count});
        }
        const auto reply = cluster_.Step(step);
        INFO(reply.status().ToString());
        REQUIRE(reply.ok());
        CHECK(cluster_.Check(step, *reply).output <= cluster_.OutputLimit(dtype));
        outputs.push_back(reply->output);
      }
      for (const std::size_t i : order) lengths_[i] += count;
      if (round % 4 == 3) Replace(static_cast<std::size_t>(round) % sequences_.size());
    }
    return outputs;
  }

  Cluster& cluster() { return cluster_; }

 private:
  // A sequence goes and another takes its pages: a large eager write between two replays.
  void Replace(std::size_t i) {
    cluster_.Release(sequences_[i]);
    sequences_[i] = cluster_.Create("r" + std::to_string(step_id_), 100 + step_id_);
    lengths_[i] = 300;
    cluster_.Append(sequences_[i], step_id_, 0, lengths_[i]);
  }

  Cluster cluster_;
  std::vector<TestSequence> sequences_;
  std::vector<std::int64_t> lengths_;
  std::uint64_t step_id_ = 1;
};

}  // namespace

TEST_CASE("two GPUs through NCCL: graphs equal the eager path bit for bit, and the truth") {
  for (const ExchangeKind exchange : kExchanges) {
    for (const DType partial : {DType::kF32, DType::kBf16}) {
      ClusterOptions options = Options(true, exchange);
      options.partial_dtype = partial;
      for (const std::string& backend : CudaBackends(options)) {
        INFO(ExchangeName(exchange) << " " << DTypeName(partial) << " " << backend);
        options.backend = backend;
        std::vector<std::string> outputs[2];
        for (const bool graphs : {false, true}) {
          options.on.graphs = graphs;
          outputs[graphs ? 1 : 0] = Story(options).Play();
        }
        CHECK(outputs[0] == outputs[1]);
      }
    }
  }
}

TEST_CASE("two GPUs through NCCL, 128 heads") {
  for (const ExchangeKind exchange : kExchanges) {
    ClusterOptions options = Options(true, exchange, 128);
    options.partial_dtype = DType::kBf16;
    for (const std::string& backend : CudaBackends(options)) {
      INFO(ExchangeName(exchange) << " " << backend);
      options.backend = backend;
      Story(options).Play();
    }
  }
}

TEST_CASE("the first step of a process in every bucket") {
  ClusterOptions options = Options(true, ExchangeKind::kA2a);
  const std::vector<int> batches =
      SmallSizes() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 8, 17, 64, 128};
  for (const int batch : batches) {
    options.blocks = 300;
    Cluster cluster(options);
    std::vector<TestSequence> sequences;
    sequences.reserve(static_cast<std::size_t>(batch));
    StepSpec step{.step_id = 2};
    for (int i = 0; i < batch; ++i) {
      sequences.push_back(cluster.Create("s" + std::to_string(i), static_cast<std::uint64_t>(i)));
      cluster.Append(sequences.back(), 1, 0, i);
      step.items.push_back({&sequences.back(), i, 1});
    }
    cluster.StepChecked(step);
  }
}

TEST_CASE("the same step fifty times gives the same bits") {
  const std::vector<std::string> backends = CudaBackends(Options(true, ExchangeKind::kA2a, 128));
  for (std::size_t i = 0; i < 2 * backends.size(); ++i) {
    const bool graphs = i % 2 == 0;
    ClusterOptions options = Options(graphs, ExchangeKind::kA2a, 128);
    options.backend = backends[i / 2];
    INFO(options.backend << (graphs ? ", graphs" : ", eager"));
    Cluster cluster(options);
    const TestSequence a = cluster.Create("a", 1);
    const TestSequence b = cluster.Create("b", 2);
    cluster.Append(a, 1, 0, 5000);
    cluster.Append(b, 1, 0, 77);
    const StepSpec step{.items = {{&a, 4999, 1}, {&b, 70, 4}}, .write = false};
    const auto first = cluster.Step(step);
    REQUIRE(first.ok());
    CHECK(cluster.Check(step, *first).output <= cluster.OutputLimit(DType::kF32));
    for (int run = 0; run < (SmallSizes() ? 3 : 50); ++run) {
      const auto again = cluster.Step(step);
      REQUIRE(again.ok());
      CHECK(again->output == first->output);
      CHECK(again->lse == first->lse);
    }
  }
}

}  // namespace dcp::testing
