// Ranks on GPUs, on as many devices as there are: N ranks equal one, against the float64 truth, on
// data that discriminates and with NaN in every unused slot.
#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "tests/support/cluster.h"
#include "tests/support/gpu.h"
#include "tests/support/sizes.h"

namespace dcp::testing {
namespace {

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kA2a, ExchangeKind::kAgRs};

ClusterOptions Options(const RanksConfig& on, int ranks, int heads, int interleave,
                       ExchangeKind exchange) {
  return {.ranks = ranks,
          .heads = heads,
          .kv_lora_rank = 512,
          .rope_dim = 64,
          .page_tokens = 64,
          .interleave = interleave,
          .blocks = 40,
          .exchange = exchange,
          .timeout_ms = 20000,
          .on = on};
}

void RunLengths(ClusterOptions options, const std::string& backend,
                const std::set<std::int64_t>& lengths) {
  INFO(backend);
  options.backend = backend;
  Cluster cluster(options);
  std::uint64_t content = 1;
  for (const std::int64_t length : lengths) {
    const TestSequence sequence = cluster.Create("s" + std::to_string(length), content++);
    cluster.Append(sequence, 1, 0, length);
    std::int64_t start = length;
    std::uint64_t step_id = 2;
    for (const int count : {1, 2, 4, 8}) {
      for (int layer = 0; layer < options.layers; ++layer) {
        cluster.StepChecked({.step_id = step_id,
                             .layer = layer,
                             .items = {{&sequence, start, count}},
                             .output_dtype = count == 4 ? DType::kBf16 : DType::kF32,
                             .lse_base = count == 2 ? LogBase::kTwo : LogBase::kE});
      }
      start += count;
      ++step_id;
    }
    // Read below the length: later tokens exist and must not be seen.
    cluster.StepChecked({.items = {{&sequence, start - 7, 4}}, .write = false});
    cluster.Release(sequence);
  }
  CHECK(cluster.FreeBlocks() == options.blocks);
}

// With every backend that supports it.
void RunLengths(const ClusterOptions& options, const std::set<std::int64_t>& lengths) {
  for (const std::string& backend : CudaBackends(options)) RunLengths(options, backend, lengths);
}

std::set<std::int64_t> Lengths(int ranks) {
  if (SmallSizes()) return {0, ranks - 1, 65};
  return {0, 1, 2, ranks - 1, ranks, ranks + 1, 63, 64, 65, 130, 1000};
}

std::vector<int> RankCounts() {
  return SmallSizes() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 4, 6, 8};
}

std::vector<int> Interleaves() {
  return SmallSizes() ? std::vector<int>{16} : std::vector<int>{1, 2, 16, 64};
}

}  // namespace

TEST_CASE("N ranks on shared GPUs equal one rank") {
  for (const int ranks : RankCounts()) {
    for (const int interleave : Interleaves()) {
      for (const ExchangeKind exchange : kExchanges) {
        INFO("N " << ranks << " I " << interleave << " " << ExchangeName(exchange));
        RunLengths(Options(OnSharedDevices(ranks), ranks, 2 * ranks, interleave, exchange),
                   Lengths(ranks));
      }
    }
  }
}

TEST_CASE("N ranks on shared GPUs, all heads of the model, bf16 partials") {
  for (const int ranks : RankCounts()) {
    for (const ExchangeKind exchange : kExchanges) {
      INFO("N " << ranks << " " << ExchangeName(exchange));
      ClusterOptions options =
          Options(OnSharedDevices(ranks), ranks, ranks % 3 == 0 ? 96 : 128, 16, exchange);
      options.partial_dtype = DType::kBf16;
      RunLengths(options, {ranks - 1, 65, 700});
    }
  }
}

TEST_CASE("every geometry, pages of any size") {
  struct Geometry {
    int kv_lora_rank, rope_dim, page_tokens;
  };
  for (const Geometry g :
       {Geometry{512, 64, 16}, {512, 0, 1}, {256, 64, 256}, {128, 32, 3}, {64, 16, 64}}) {
    for (const ExchangeKind exchange : kExchanges) {
      ClusterOptions options = Options(OnSharedDevices(2), 2, 8, 1, exchange);
      options.kv_lora_rank = g.kv_lora_rank;
      options.rope_dim = g.rope_dim;
      options.page_tokens = g.page_tokens;
      options.blocks = 1200;
      INFO(g.kv_lora_rank << "+" << g.rope_dim << " page " << g.page_tokens);
      RunLengths(options, {1, 64, SmallSizes() ? 70 : 500});
    }
  }
}

TEST_CASE("one rank on one GPU: graphs equal the eager path bit for bit") {
  for (const ExchangeKind exchange : kExchanges) {
    ClusterOptions options = Options(OnOwnDevices(true), 1, 16, 1, exchange);
    for (const std::string& backend : CudaBackends(options)) {
      INFO(backend);
      options.backend = backend;
      std::vector<std::string> outputs[2];
      for (const bool graphs : {false, true}) {
        options.on.graphs = graphs;
        Cluster cluster(options);
        const TestSequence a = cluster.Create("a", 1);
        const TestSequence b = cluster.Create("b", 2);
        cluster.Append(a, 1, 0, 700);
        cluster.Append(b, 1, 0, 3);
        for (std::uint64_t i = 0; i < 20; ++i) {
          const auto at = static_cast<std::int64_t>(i);
          const DType dtype = i % 2 == 0 ? DType::kF32 : DType::kBf16;
          const StepSpec step{.step_id = 2 + i,
                              .items = {{&a, 700 + at, 1}, {&b, 3 + at, 1}},
                              .output_dtype = dtype};
          const auto reply = cluster.Step(step);
          REQUIRE(reply.ok());
          CHECK(cluster.Check(step, *reply).output <= cluster.OutputLimit(dtype));
          outputs[graphs ? 1 : 0].push_back(reply->output);
        }
      }
      CHECK(outputs[0] == outputs[1]);
    }
  }
}

TEST_CASE("what cannot run is refused with the reason") {
  ClusterOptions options = Options(OnSharedDevices(2), 2, 4, 1, ExchangeKind::kA2a);
  SECTION("graphs on shared devices") {
    options.on.graphs = true;
    const auto engine = Engine::Create(MakeConfig(options));
    REQUIRE(!engine.ok());
    CHECK(engine.status().reason() == Reason::kConfig);
    CHECK(engine.status().message().find("graph") != std::string::npos);
  }
  SECTION("a device that does not exist") {
    options.on.devices = {0, Devices()};
    const auto engine = Engine::Create(MakeConfig(options));
    REQUIRE(!engine.ok());
    CHECK(engine.status().reason() == Reason::kConfig);
    CHECK(engine.status().message().find("does not exist") != std::string::npos);
  }
  SECTION("more memory than there is") {
    options.blocks = 1'000'000'000;
    const auto engine = Engine::Create(MakeConfig(options));
    REQUIRE(!engine.ok());
    CHECK(engine.status().reason() == Reason::kKvCapacity);
    CHECK(engine.status().message().find("kv.blocks = 1000000000") != std::string::npos);
  }
  // Nothing is left behind: the next engine starts.
  options = Options(OnSharedDevices(2), 2, 4, 1, ExchangeKind::kA2a);
  CHECK(Engine::Create(MakeConfig(options)).ok());
}

}  // namespace dcp::testing
