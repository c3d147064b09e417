// What device backends promise beyond the conformance suite: bits that do not depend on how a step
// was shared out, launches that a graph can replay for another step, pools of any size.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/contract_probe.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/on_device.h"
#include "tests/support/sizes.h"

namespace dcp::test {
namespace {

constexpr std::byte kJunk{0x5a};
constexpr int kPageTokens = 64;

// A backend and everything that its launches point to, for steps of up to `max_tokens`.
class Bench {
 public:
  Bench(const BackendEntry& entry, const AttentionProblem& shape, int max_tokens)
      : geometry_(GeometryOf(shape, {.page_tokens = kPageTokens})),
        max_tokens_(max_tokens),
        query_(DeviceBytes(Items(shape.d_qk) * sizeof(Bf16))),
        out_(DeviceBytes(Items(shape.d_v) * sizeof(float))),
        lse_(DeviceBytes(Items(1) * sizeof(float))) {
    auto made = entry.make(
        {.geometry = geometry_, .max_tokens = max_tokens, .device = 0, .max_keys = 1 << 16});
    RequireOk(made.status());
    backend_ = *std::move(made);
    step_ = DeviceBytes(kPlanAt + backend_->MaxPlanBytes());
  }

  // Puts a problem into the pages `pages` of the pool `kv`, in their order.
  void Load(const AttentionProblem& p, const cuda::DeviceBuffer& kv,
            const std::vector<std::int32_t>& pages, std::int64_t kv_offset) {
    const int entries = static_cast<int>(p.keys.size());
    const std::int64_t page_items = std::int64_t{kPageTokens} * p.d_qk;
    std::int32_t stride = 1;
    for (const auto& keys : p.keys) {
      stride = std::max(stride, static_cast<std::int32_t>(keys.size() / page_items) + 1);
    }
    std::vector<std::int32_t> table(static_cast<std::size_t>(entries) * stride, -1'000'000'000);
    std::size_t next = 0;
    for (int e = 0; e < entries; ++e) {
      const auto items = static_cast<std::int64_t>(p.keys[e].size());
      for (std::int64_t at = 0; at < items; at += page_items) {
        REQUIRE(next < pages.size());
        const std::int32_t page = pages[next++];
        table[e * stride + at / page_items] = page;
        RequireOk(
            cuda::CopyAsync(kv.as<Bf16>() + kv_offset + page * page_items, p.keys[e].data() + at,
                            std::min(page_items, items - at) * sizeof(Bf16), TestStream().ref()));
      }
    }
    REQUIRE(table.size() * sizeof(std::int32_t) <= kPlanAt - kTableAt);
    std::vector<std::byte> bytes(kPlanAt + backend_->MaxPlanBytes());
    const DeviceStep step{
        .tokens = p.tokens(),
        .entries = entries,
        .table_stride = stride,
        .kv_offset = kv_offset,
        .block_table = reinterpret_cast<const std::int32_t*>(step_.data() + kTableAt),
        .plan = step_.data() + kPlanAt};
    std::memcpy(bytes.data(), &step, sizeof(step));
    std::memcpy(bytes.data() + kTableAt, table.data(), table.size() * sizeof(std::int32_t));
    RequireOk(backend_
                  ->Plan({.entry_begin = p.entry_begin.data(),
                          .bound = p.bound.data(),
                          .entries = entries,
                          .tokens = p.tokens()},
                         std::span(bytes).subspan(kPlanAt))
                  .status());
    RequireOk(cuda::CopyAsync(step_.data(), bytes.data(), bytes.size(), TestStream().ref()));
    RequireOk(cuda::CopyAsync(query_.data(), p.query.data(), p.query.size() * sizeof(Bf16),
                              TestStream().ref()));
    RequireOk(cuda::FillAsync(out_.data(), 0x5a, out_.size(), TestStream().ref()));
    RequireOk(cuda::FillAsync(lse_.data(), 0x5a, lse_.size(), TestStream().ref()));
    RequireOk(TestStream().Synchronize());
  }

  Status Run(const cuda::DeviceBuffer& kv) {
    return backend_->Run(
        {.query = query_.as<Bf16>(),
         .kv = kv.as<Bf16>(),
         .page_stride = std::int64_t{kPageTokens} * geometry_.d_qk,
         .partial = {.out = out_.data(), .lse = lse_.data(), .heads_per_group = geometry_.heads},
         .stream = TestStream().ref(),
         .step = step_.as<DeviceStep>()});
  }

  // Waits; checks that nothing was written behind the step's rows.
  Partial Result(const AttentionProblem& p) {
    RequireOk(TestStream().Synchronize());
    Partial partial{.out = ToHost<float>(out_), .lse = ToHost<float>(lse_)};
    const std::size_t rows = static_cast<std::size_t>(p.tokens()) * p.heads;
    const auto untouched = [](const std::vector<float>& x, std::size_t from) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(x.data());
      return std::all_of(bytes + from * 4, bytes + x.size() * 4,
                         [](std::byte b) { return b == kJunk; });
    };
    CHECK(untouched(partial.out, rows * p.d_v));
    CHECK(untouched(partial.lse, rows));
    partial.out.resize(rows * p.d_v);
    partial.lse.resize(rows);
    return partial;
  }

 private:
  static constexpr std::size_t kTableAt = 256;
  static constexpr std::size_t kPlanAt = std::size_t{1} << 16;

  std::size_t Items(int per_row) const {
    return static_cast<std::size_t>(max_tokens_) * geometry_.heads * per_row;
  }

  const AttentionGeometry geometry_;
  const int max_tokens_;
  std::unique_ptr<AttentionBackend> backend_;
  cuda::DeviceBuffer query_, out_, lse_, step_;
};

std::vector<std::int32_t> Pages(std::int32_t first, int count) {
  std::vector<std::int32_t> pages;
  for (int i = 0; i < count; ++i) pages.push_back(first + i);
  return pages;
}

bool SameBytes(const Partial& a, const Partial& b) {
  return a.out.size() == b.out.size() &&
         std::memcmp(a.out.data(), b.out.data(), a.out.size() * 4) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}

// The table's own lines for these dims; what the tests' line does to an LSE is not of interest
// here.
std::vector<BackendEntry> CudaLines(Dims dims) {
  std::vector<BackendEntry> lines;
  for (const BackendEntry& entry : Backends()) {
    if (entry.caps.arch == Arch::kCuda && Serves(entry, dims, kPageTokens)) lines.push_back(entry);
  }
  return lines;
}

}  // namespace

TEST_CASE("Fifty runs give the same bits") {
  const AttentionProblem p({.heads = 128,
                            .d_qk = 576,
                            .d_v = 512,
                            .bounds = {{5100}, {700, 701, 702}, {30}, {0}, {1500}},
                            .seed = 12});
  for (const BackendEntry& entry : CudaLines({p.d_qk, p.d_v})) {
    Bench bench(entry, p, p.tokens());
    const cuda::DeviceBuffer kv = DeviceBytes(std::size_t{256} * kPageTokens * 576 * 2);
    RequireOk(cuda::FillAsync(kv.data(), 0xff, kv.size(), TestStream().ref()));
    bench.Load(p, kv, Pages(3, 250), 0);
    RequireOk(bench.Run(kv));
    const Partial first = bench.Result(p);
    CHECK(Mismatch(entry, p, first, DType::kF32) == "");
    for (int i = 0; i < (testing::SmallSizes() ? 3 : 50); ++i) {
      RequireOk(bench.Run(kv));
      if (!SameBytes(bench.Result(p), first)) FAIL("run " << i);
    }
  }
}

TEST_CASE("A row has the same bits alone, split over blocks, and in a large batch, done by one") {
  const int entries = testing::SmallSizes() ? 20 : 240;
  std::vector<std::vector<int>> bounds(static_cast<std::size_t>(entries), {1100, 1101});
  bounds[7] = {9000};
  bounds[8] = {20'000, 19'999};
  bounds[9] = {0, 3};
  const AttentionProblem p({.heads = 16, .d_qk = 80, .d_v = 64, .bounds = bounds, .seed = 21});
  for (const BackendEntry& entry : CudaLines({p.d_qk, p.d_v})) {
    if (!entry.caps.deterministic) continue;
    const Partial whole = RunBackend(entry, p, {});
    CHECK(Mismatch(entry, p, whole, DType::kF32) == "");
    for (const int token : {0, 13, 14, 15, 16, 17, 18, 2 * (entries - 1)}) {
      INFO("token " << token);
      const AttentionProblem part = p.OnlyToken(token);
      CHECK(SameBits(part, RunBackend(entry, part, {}), p, whole, token, 0));
    }
  }
}

TEST_CASE("Long entries split in many ways are right") {
  for (const Dims dims : {Dims{80, 64}, Dims{576, 512}}) {
    Bounds bounds{{70'000, 69'999}, {40'000}, {16'385}};
    if (testing::SmallSizes()) bounds = {{9'001, 9'000}, {4'097}};
    const AttentionProblem p(
        {.heads = 2, .d_qk = dims.d_qk, .d_v = dims.d_v, .bounds = bounds, .seed = 22});
    for (const BackendEntry& entry : CudaLines(dims)) {
      CHECK(Mismatch(entry, p, RunBackend(entry, p, {.page_tokens = 64}), DType::kF32) == "");
    }
  }
}

TEST_CASE("Steps of many shapes are right") {
  struct Shape {
    int heads;
    Bounds bounds;
  };
  const std::vector<Shape> shapes = {
      {128, {{64}, {65}, {127}, {128}, {129}, {0}, {1}}},
      {128, {{2000, 2001}, {300}, {64, 64, 65, 66}}},
      {16, {{100, 101, 101, 102, 103, 103, 104, 105}, {4000}}},
      {48, {{0, 0, 1, 1}, {191, 192, 192, 193}, {900}}},
      {1, std::vector<std::vector<int>>(300, {130})},
      {64, std::vector<std::vector<int>>(140, {70})},
  };
  for (const Shape& shape : shapes) {
    for (const int d_qk : {576, 512}) {
      const AttentionProblem p(
          {.heads = shape.heads, .d_qk = d_qk, .bounds = shape.bounds, .seed = 26});
      for (const BackendEntry& entry : CudaLines({p.d_qk, p.d_v})) {
        for (const DType dtype : {DType::kF32, DType::kBf16}) {
          INFO(entry.name << ", heads " << shape.heads << ", d_qk " << d_qk);
          const Partial partial =
              RunBackend(entry, p, {.page_tokens = kPageTokens, .partial_dtype = dtype});
          CHECK(Mismatch(entry, p, partial, dtype) == "");
        }
      }
    }
  }
}

TEST_CASE("A captured launch serves other steps") {
  const Dims dims = GENERATE(Dims{80, 64}, Dims{576, 512});
  const AttentionProblem first({.heads = 24,
                                .d_qk = dims.d_qk,
                                .d_v = dims.d_v,
                                .bounds = {{3000, 3001}, {70}},
                                .seed = 23});
  const AttentionProblem second({.heads = 24,
                                 .d_qk = dims.d_qk,
                                 .d_v = dims.d_v,
                                 .bounds = {{64}, {5000}, {0}, {513, 514}, {1}},
                                 .seed = 24});
  for (const BackendEntry& entry : CudaLines(dims)) {
    Bench bench(entry, first, 8);
    const cuda::DeviceBuffer kv = DeviceBytes(std::size_t{256} * kPageTokens * dims.d_qk * 2);
    RequireOk(cuda::FillAsync(kv.data(), 0xff, kv.size(), TestStream().ref()));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    cudaStream_t stream = TestStream().raw();
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    RequireOk(bench.Run(kv));
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess);
    for (const AttentionProblem* p : {&first, &second, &first}) {
      bench.Load(*p, kv, Pages(1, 200), 0);
      REQUIRE(cudaGraphLaunch(replay, stream) == cudaSuccess);
      const Partial replayed = bench.Result(*p);
      CHECK(Mismatch(entry, *p, replayed, DType::kF32) == "");
      bench.Load(*p, kv, Pages(1, 200), 0);
      RequireOk(bench.Run(kv));
      CHECK(SameBytes(bench.Result(*p), replayed));
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
}

TEST_CASE("Pools above 2^31 elements are addressed") {
  constexpr std::int64_t kPages = 64'000;  // of 64 * 576 elements: 2.36e9, 4.7 GB
  const AttentionProblem p({.heads = 4, .bounds = {{200, 201}, {70}}, .seed = 25});
  for (const BackendEntry& entry : CudaLines({p.d_qk, p.d_v})) {
    Bench bench(entry, p, p.tokens());
    const cuda::DeviceBuffer kv =
        DeviceBytes(static_cast<std::size_t>(kPages) * kPageTokens * 576 * sizeof(Bf16));
    RequireOk(cuda::FillAsync(kv.data(), 0xff, kv.size(), TestStream().ref()));
    const auto far = static_cast<std::int32_t>(kPages);
    // By page index, and by a layer's offset.
    bench.Load(p, kv, {far - 1, 5, far - 3, 58'255, 58'254, far - 2, 0, 1}, 0);
    RequireOk(bench.Run(kv));
    CHECK(Mismatch(entry, p, bench.Result(p), DType::kF32) == "");
    bench.Load(p, kv, {500, 5, 7, 300, 301, 302, 0, 1}, (kPages - 600) * kPageTokens * 576);
    RequireOk(bench.Run(kv));
    CHECK(Mismatch(entry, p, bench.Result(p), DType::kF32) == "");
  }
}

TEST_CASE("Honest device backends pass the probe and a wrong declaration is refused") {
  for (const BackendEntry& entry : BackendsUnderTest()) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const int heads : {3, 16, 128}) {
        const BackendSetup setup{.geometry = {.heads = heads,
                                              .d_qk = 576,
                                              .d_v = 512,
                                              .page_tokens = 64,
                                              .softmax_scale = 0.0721688,
                                              .partial_dtype = dtype},
                                 .max_tokens = 8,
                                 .device = 0,
                                 .max_keys = 4096};
        auto backend = entry.make(setup);
        RequireOk(backend.status());
        RequireOk(ProbeContract(entry, setup, **backend));
        BackendEntry lie = entry;
        lie.caps.lse_base = entry.caps.lse_base == LogBase::kE ? LogBase::kTwo : LogBase::kE;
        CHECK(ProbeContract(lie, setup, **backend).reason() == Reason::kBackendContract);
      }
    }
  }
}

TEST_CASE("A device that does not exist is refused") {
  for (const BackendEntry& entry : BackendsUnderTest()) {
    const auto made = entry.make(
        {.geometry = {.heads = 1, .d_qk = 576, .d_v = 512, .page_tokens = 64, .softmax_scale = 1},
         .max_tokens = 1,
         .device = 1000,
         .max_keys = 64});
    CHECK_FALSE(made.ok());
  }
}

}  // namespace dcp::test
