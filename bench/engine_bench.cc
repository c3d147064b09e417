// Time of one decode step inside the engine, queue to answer: what the runtime costs beside the
// attention itself. Verified against the float64 truth before it is timed.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "client/workload/synthetic.h"
#include "client/workload/truth.h"
#include "runtime/engine.h"

namespace dcp {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "engine_bench: %s\n", what.c_str());
  std::exit(1);
}

template <class T>
T Must(Result<T> result) {
  if (!result.ok()) Die(result.status().ToString());
  return *std::move(result);
}

EngineConfig Config(int ranks) {
  EngineConfig c;
  c.model = {.layers = 1,
             .heads = 16,
             .kv_lora_rank = 512,
             .rope_dim = 64,
             .softmax_scale = 1 / std::sqrt(192.0)};
  c.ranks.count = ranks;
  c.kv = {.page_tokens = 16, .interleave = 1, .blocks = 64};
  return c;
}

double Percentile(std::vector<double>& values, double p) {
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(p * (values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

// One sequence of one token; each step reads it. L = 1 leaves the attention next to nothing to do.
void EngineStep(benchmark::State& state) {
  const EngineConfig config = Config(static_cast<int>(state.range(0)));
  const std::unique_ptr<Engine> engine = Must(Engine::Create(config));
  const Synthetic synthetic({.heads = config.model.heads,
                             .d_qk = config.model.d_qk(),
                             .softmax_scale = config.model.softmax_scale},
                            1);
  const Content content(1);
  const std::int64_t heads = config.model.heads;
  const std::int64_t d_qk = config.model.d_qk();
  std::vector<Bf16> query(static_cast<std::size_t>(heads * d_qk));
  std::vector<Bf16> latent(static_cast<std::size_t>(d_qk));
  synthetic.Queries(content, 0, 0, query);
  synthetic.Latent(content.At(0), 0, latent);
  const std::vector<std::int64_t> query_shape{1, heads, d_qk}, latent_shape{1, d_qk};

  const CreateReply created = Must(Await<CreateReply>([&](auto done) {
    engine->CreateSequence(
        {.id = "s", .request_id = "r", .softmax_scale = config.model.softmax_scale},
        std::move(done));
  }));
  StepRequest request{
      .step_id = 1,
      .entries = {{.sequence = {"s", created.generation}, .start = 0, .count = 1}},
      .query = {DType::kBf16, query_shape, std::as_bytes(std::span(query))},
      .new_kv = TensorView{DType::kBf16, latent_shape, std::as_bytes(std::span(latent))},
      .output_dtype = DType::kF32};
  const auto step = [&] {
    return Must(Await<StepReply>([&](auto done) { engine->SubmitStep(request, std::move(done)); }));
  };
  const StepReply first = step();
  std::vector<float> output(first.output.size() / sizeof(float));
  std::memcpy(output.data(), first.output.data(), first.output.size());
  const TruthGeometry geometry{static_cast<int>(d_qk), config.model.kv_lora_rank,
                               config.model.softmax_scale};
  const auto d_v = static_cast<std::size_t>(config.model.kv_lora_rank);
  for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
    const RowTruth truth = AttendRow(geometry,
                                     std::span(query).subspan(h * static_cast<std::size_t>(d_qk),
                                                              static_cast<std::size_t>(d_qk)),
                                     latent);
    const double error = RelativeError(std::span(output).subspan(h * d_v, d_v), truth.output);
    if (!(error <= 4e-3))
      Die("head " + std::to_string(h) + " is wrong by " + std::to_string(error));
  }

  request.new_kv.reset();
  std::vector<double> total, plan, exchange;
  for (auto _ : state) {
    const StepReply reply = step();
    const auto us = [](Nanos t) { return static_cast<double>(t.count()) * 1e-3; };
    total.push_back(us(reply.timing.total));
    plan.push_back(us(reply.timing.plan));
    exchange.push_back(us(reply.timing.exchange));
    state.SetIterationTime(total.back() * 1e-6);
  }
  state.counters["p50_us"] = Percentile(total, 0.5);
  state.counters["p99_us"] = Percentile(total, 0.99);
  state.counters["plan_p50_us"] = Percentile(plan, 0.5);
  state.counters["exchange_p50_us"] = Percentile(exchange, 0.5);
}
BENCHMARK(EngineStep)->Arg(1)->Arg(4)->ArgName("ranks")->Iterations(5000)->UseManualTime();

}  // namespace
}  // namespace dcp

BENCHMARK_MAIN();
