// What backends promise about threads: the same bits with any number of them, and no allocation.
#include <catch2/catch.hpp>

#include "kernels/worker_pool.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/count_allocations.h"

namespace dcp::test {

TEST_CASE("Fifty runs give the same bits, with any number of threads") {
  const AttentionProblem p({.heads = 20,
                            .d_qk = 80,
                            .d_v = 64,
                            .bounds = {{2100}, {700, 701}, {30}, {0}, {1500}},
                            .seed = 12});
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    if (!entry.caps.deterministic) return;
    const Partial first = RunBackend(entry, p, {});
    CHECK(Mismatch(entry, p, first, DType::kF32) == "");
    for (const int threads : {0, 1, 2, 5}) {
      INFO("extra threads " << threads);
      WorkerPool pool(threads);
      CHECK(SameBits(p, RunBackend(entry, p, {.pool = &pool}), p, first, 0, 0));
      CHECK(SameBits(p, RunBackend(entry, p, {.pool = &pool, .repeat = 2}), p, first, 0, 0));
    }
    if (entry.priority == 0) return;  // the reference has no state that could drift
    WorkerPool pool(1);
    for (int i = 0; i < 50; ++i) {
      if (!SameBits(p, RunBackend(entry, p, {.pool = &pool}), p, first, 0, 0)) FAIL("run " << i);
    }
  });
}

TEST_CASE("Run allocates nothing") {
  WorkerPool pool(2);
  const AttentionProblem p({.heads = 20, .d_qk = 80, .d_v = 64, .bounds = {{1500}, {64, 65}}});
  std::vector<Bf16> kv(static_cast<std::size_t>(1600) * 80, ToBf16(0.5f));
  std::vector<std::int32_t> table(200, 0);
  std::vector<std::byte> out(p.tokens() * 20 * 64 * 4);
  std::vector<std::byte> lse(p.tokens() * 20 * 4);
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    auto backend =
        entry.make({.geometry = GeometryOf(p, {}), .max_tokens = p.tokens(), .pool = &pool});
    REQUIRE(backend.ok());
    const AttentionArgs args{
        .query = p.query.data(),
        .kv = kv.data(),
        .page_stride = 16 * 80,
        .entry_begin = p.entry_begin.data(),
        .block_table = table.data(),
        .block_table_stride = 100,
        .bound = p.bound.data(),
        .entries = 2,
        .tokens = p.tokens(),
        .partial = {.out = out.data(), .lse = lse.data(), .heads_per_group = 20}};
    const std::int64_t before = Allocations();
    const bool ok = (*backend)->Run(args).ok();
    const std::int64_t after = Allocations();
    CHECK(ok);
    CHECK(after - before == 0);
  });
}

}  // namespace dcp::test
