// GPU ranks that fail or stall in the middle of a step, eager and inside a replayed graph: an error
// that names the rank, within the bound, and an engine that serves again or says that it is down.
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cluster.h"
#include "tests/support/gpu.h"

namespace dcp::testing {
namespace {

constexpr RankPhase kPhases[] = {RankPhase::kWrite, RankPhase::kAttend, RankPhase::kExchange,
                                 RankPhase::kMerge};

struct Placement {
  const char* name;
  int ranks;
  RanksConfig on;
};

// Through NCCL as well where every rank can have a device.
std::vector<Placement> Placements() {
  std::vector<Placement> placements{{"two ranks on shared devices, eager", 2, OnSharedDevices(2)},
                                    {"one rank, eager", 1, OnOwnDevices(false)},
                                    {"one rank, graph", 1, OnOwnDevices(true)}};
  if (Devices() >= 2) {
    placements.push_back({"two ranks through NCCL, eager", 2, OnOwnDevices(false)});
    placements.push_back({"two ranks through NCCL, graph", 2, OnOwnDevices(true)});
  }
  return placements;
}

ClusterOptions Options(const Placement& p, int timeout_ms) {
  return {.ranks = p.ranks,
          .heads = 8,
          .kv_lora_rank = 512,
          .rope_dim = 64,
          .page_tokens = 64,
          .blocks = 40,
          .timeout_ms = timeout_ms,
          .on = p.on};
}

void CheckNames(const Status& status, int rank) {
  INFO(status.ToString());
  CHECK(status.reason() == Reason::kRankFailed);
  CHECK(status.message().find("rank " + std::to_string(rank)) != std::string::npos);
}

}  // namespace

TEST_CASE("a GPU rank that fails: an error that names it, and the group serves again") {
  for (const Placement& placement : Placements()) {
    for (const RankPhase phase : kPhases) {
      INFO(placement.name << ", " << PhaseName(phase));
      const int last = placement.ranks - 1;
      auto armed = std::make_shared<std::atomic<bool>>(false);
      ClusterOptions options = Options(placement, 10000);
      options.hooks.rank_fault = [armed, phase, last](int rank, RankPhase at) {
        if (rank == last && at == phase && armed->exchange(false)) {
          return Status(Reason::kInternal, "injected");
        }
        return Status::Ok();
      };
      Cluster cluster(options);
      const TestSequence s = cluster.Create("s", 1);
      cluster.Append(s, 1, 0, 100);
      armed->store(true);
      const auto failed = cluster.Step({.step_id = 2, .items = {{&s, 100, 1}}});
      REQUIRE(!failed.ok());
      CheckNames(failed.status(), last);
      CHECK(cluster.engine().state() == EngineState::kServing);
      cluster.StepChecked({.step_id = 3, .items = {{&s, 100, 1}}});
    }
  }
}

TEST_CASE("a GPU rank that stalls: an error within the bound, and the engine says it is down") {
  for (const Placement& placement : Placements()) {
    for (const RankPhase phase : kPhases) {
      INFO(placement.name << ", " << PhaseName(phase));
      struct Gate {
        std::atomic<bool> armed{false}, open{false};
      };
      const int last = placement.ranks - 1;
      auto gate = std::make_shared<Gate>();
      ClusterOptions options = Options(placement, 1500);
      options.hooks.rank_fault = [gate, phase, last](int rank, RankPhase at) {
        if (rank == last && at == phase && gate->armed.exchange(false)) {
          while (!gate->open.load()) std::this_thread::sleep_for(Millis(5));
        }
        return Status::Ok();
      };
      Cluster cluster(options);
      const TestSequence s = cluster.Create("s", 1);
      cluster.Append(s, 1, 0, 100);
      gate->armed.store(true);
      const TimePoint before = Clock::now();
      const auto failed = cluster.Step({.step_id = 2, .items = {{&s, 100, 1}}});
      CHECK(Clock::now() - before < Millis(3 * options.timeout_ms));
      REQUIRE(!failed.ok());
      CheckNames(failed.status(), last);
      CHECK(cluster.engine().state() == EngineState::kRanksDown);
      const auto next = cluster.Step({.step_id = 3, .items = {{&s, 100, 1}}});
      CHECK(next.status().reason() == Reason::kRanksDown);
      gate->open.store(true);  // the rank's thread ends before its engine does
    }
  }
}

}  // namespace dcp::testing
