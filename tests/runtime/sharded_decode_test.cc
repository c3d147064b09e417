// N ranks equal one: every answer of every sharding against the float64 truth over the whole
// sequence, which knows of no ranks, on data that discriminates (client/workload/synthetic.h) and
// with NaN in every unused slot.
#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "tests/support/cluster.h"
#include "tests/support/serialising_port.h"

namespace dcp::testing {
namespace {

std::set<std::int64_t> Lengths(int ranks) {
  return {0, 1, 2, ranks - 1, ranks, ranks + 1, 63, 64, 65, 130, 1000};
}

// For each length: a sequence of that many tokens, then steps of 1, 2 and 4 tokens, each checked;
// then the same positions read again.
void RunLengths(const ClusterOptions& options) {
  Cluster cluster(options);
  std::uint64_t content = 1;
  for (const std::int64_t length : Lengths(options.ranks)) {
    const TestSequence sequence = cluster.Create("s" + std::to_string(length), content++);
    cluster.Append(sequence, 1, 0, length);
    std::int64_t start = length;
    std::uint64_t step_id = 2;
    for (const int count : {1, 2, 4}) {
      for (int layer = 0; layer < options.layers; ++layer) {
        cluster.StepChecked({.step_id = step_id,
                             .layer = layer,
                             .items = {{&sequence, start, count}},
                             .lse_base = count == 2 ? LogBase::kTwo : LogBase::kE});
      }
      start += count;
      ++step_id;
    }
    // Read below the length: later tokens exist and must not be seen.
    cluster.StepChecked({.items = {{&sequence, start - 7, 4}}, .write = false});
    if (length > 0) {
      cluster.StepChecked({.layer = options.layers - 1,
                           .items = {{&sequence, length / 2, 2}},
                           .write = false,
                           .output_dtype = DType::kBf16});
    }
    cluster.Release(sequence);
  }
  CHECK(cluster.FreeBlocks() == options.blocks);
}

ClusterOptions Options(int ranks, int interleave, ExchangeKind exchange, const char* backend) {
  return {.ranks = ranks,
          .heads = ranks * 2,
          .page_tokens = 64,
          .interleave = interleave,
          .blocks = 20,
          .exchange = exchange,
          .backend = backend};
}

}  // namespace

TEST_CASE("N ranks equal one rank") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int interleave : {1, 2, 16, 64}) {
      for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
        for (const char* backend : {"cpu_reference", "cpu_simd"}) {
          INFO("N " << ranks << " I " << interleave << " " << ExchangeName(exchange) << " "
                    << backend);
          RunLengths(Options(ranks, interleave, exchange, backend));
        }
      }
    }
  }
}

TEST_CASE("N ranks equal one rank with bf16 partials, every geometry") {
  struct Geometry {
    int kv_lora_rank, rope_dim;
  };
  for (const Geometry g : {Geometry{512, 64}, {512, 0}, {256, 64}, {128, 32}, {64, 16}}) {
    for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
      ClusterOptions options = Options(3, 16, exchange, "cpu_simd");
      options.partial_dtype = DType::kBf16;
      options.kv_lora_rank = g.kv_lora_rank;
      options.rope_dim = g.rope_dim;
      INFO(g.kv_lora_rank << "+" << g.rope_dim << " " << ExchangeName(exchange));
      RunLengths(options);
    }
  }
}

TEST_CASE("the same through a port that passes nothing but bytes") {
  for (const int ranks : {1, 3, 4}) {
    for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
      for (const char* backend : {"cpu_reference", "cpu_simd"}) {
        ClusterOptions options = Options(ranks, 2, exchange, backend);
        options.hooks.make_port = MakeSerialisingPort;
        RunLengths(options);
      }
    }
  }
}

TEST_CASE("the answer does not depend on what else is in the batch") {
  for (const ExchangeKind exchange : {ExchangeKind::kA2a, ExchangeKind::kAgRs}) {
    ClusterOptions options = Options(4, 16, exchange, "cpu_simd");
    options.blocks = 64;
    Cluster cluster(options);
    std::vector<TestSequence> sequences;
    StepSpec all{.write = false};
    for (const std::int64_t length : {1, 5, 64, 700, 1500, 3}) {
      sequences.push_back(cluster.Create("s" + std::to_string(length), 50 + sequences.size()));
      cluster.Append(sequences.back(), 1, 0, length);
    }
    for (const TestSequence& s : sequences) {
      all.items.push_back({&s, cluster.Info(s).layer_lengths[0] - 1, 1});
    }
    const auto together = cluster.Step(all);
    REQUIRE(together.ok());
    CHECK(cluster.Check(all, *together).output <= 1e-5);
    const std::size_t row_bytes = together->output.size() / sequences.size();
    for (std::size_t i = 0; i < all.items.size(); ++i) {
      const auto alone = cluster.Step({.items = {all.items[i]}, .write = false});
      REQUIRE(alone.ok());
      CHECK(alone->output == together->output.substr(i * row_bytes, row_bytes));
    }
  }
}

}  // namespace dcp::testing
