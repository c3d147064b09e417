// step: one synthetic step over all layers on a temporary sequence, verified.
#include <fmt/core.h>

#include <atomic>
#include <memory>
#include <numeric>

#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "client/dcpctl/commands.h"
#include "client/dcpctl/output.h"
#include "client/dcpctl/replay/server_calls.h"
#include "client/dcpctl/server_traits.h"

namespace dcp {
namespace {

struct StepOptions {
  std::int64_t context = 64;
  int tokens = 1;
  std::uint64_t seed = 1;
};

struct LayerResult {
  v1::StepTiming timing;
  RowCheckResult rows;
};

RpcResult<LayerResult> RunLayer(Client& client, const Synthetic& synthetic, RowChecker& checker,
                                const v1::SequenceRef& sequence, const Content& content,
                                const StepOptions& options, std::uint64_t step_id, int layer) {
  const v1::ModelGeometry& model = client.info().model();
  const std::int64_t d_qk = model.kv_lora_rank() + model.rope_dim();
  v1::DecodeStepRequest request;
  request.set_step_id(step_id);
  request.set_layer(layer);
  request.set_output_dtype(v1::DATA_TYPE_FP32);
  request.set_return_lse(true);
  request.set_lse_base(v1::LSE_BASE_E);
  v1::DecodeStepEntry& entry = *request.add_entries();
  *entry.mutable_sequence() = sequence;
  entry.set_start(options.context);
  entry.set_count(options.tokens);
  const std::span<Bf16> query =
      MakeBf16(*request.mutable_query(), {options.tokens, model.heads(), d_qk});
  const auto row = static_cast<std::size_t>(model.heads() * d_qk);
  for (int t = 0; t < options.tokens; ++t) {
    synthetic.Queries(content, layer, options.context + t,
                      query.subspan(static_cast<std::size_t>(t) * row, row));
  }
  synthetic.Latents(content, layer, options.context,
                    MakeBf16(*request.mutable_new_kv(), {options.tokens, d_qk}));

  auto answer = client.DecodeStep(request);
  if (!answer.ok()) return answer.error();
  LayerResult result;
  result.timing = answer->timing();
  const int d_v = model.kv_lora_rank();
  if (!HasForm(answer->output(), v1::DATA_TYPE_FP32, {options.tokens, model.heads(), d_v}) ||
      !HasForm(answer->lse().values(), v1::DATA_TYPE_FP32, {options.tokens, model.heads()}) ||
      answer->lse().base() != v1::LSE_BASE_E) {
    result.rows.rows = result.rows.wrong =
        static_cast<std::int64_t>(options.tokens) * model.heads();
    return result;
  }
  const auto heads = static_cast<std::size_t>(model.heads());
  std::vector<float> output(heads * static_cast<std::size_t>(d_v));
  std::vector<float> lse(heads);
  for (int t = 0; t < options.tokens; ++t) {
    ReadFloats(answer->output(), static_cast<std::size_t>(t) * output.size(), output);
    ReadFloats(answer->lse().values(), static_cast<std::size_t>(t) * heads, lse);
    AnsweredToken token;
    token.content = &content;
    token.layer = layer;
    token.position = options.context + t;
    token.heads.resize(heads);
    std::iota(token.heads.begin(), token.heads.end(), 0);
    token.output = output;
    token.lse = lse;
    result.rows.Add(checker.Check(token));
  }
  return result;
}

RpcError RunStep(Client& client, ServerCalls& calls, const Synthetic& synthetic,
                 const v1::SequenceRef& sequence, const StepOptions& options,
                 std::vector<LayerResult>& layers) {
  const Content content(1);
  RpcError error = calls.Append(sequence, content, 0, options.context);
  if (!error.ok()) return error;
  RowChecker checker(synthetic, client.info().model().kv_lora_rank(),
                     LimitsOf(client.info(), v1::DATA_TYPE_FP32));
  const std::uint64_t step_id = calls.NextStepId();
  for (int layer = 0; layer < client.info().model().layers(); ++layer) {
    auto result = RunLayer(client, synthetic, checker, sequence, content, options, step_id, layer);
    if (!result.ok()) return result.error();
    layers.push_back(*result);
  }
  return {};
}

void Print(const Globals& globals, const StepOptions& options,
           const std::vector<LayerResult>& layers, const RowCheckResult& all) {
  Json json = {{"context", options.context},
               {"tokens", options.tokens},
               {"rows_verified", all.rows},
               {"rows_mismatched", all.wrong},
               {"max_rel_error", all.max_output_error},
               {"max_lse_error", all.max_lse_error},
               {"layers", Json::array()}};
  for (const LayerResult& l : layers) json["layers"].push_back(ToJson(l.timing));
  if (globals.json) {
    fmt::print("{}\n", json.dump(2));
    return;
  }
  fmt::print("{} token(s) on a context of {}, microseconds by layer:\n", options.tokens,
             options.context);
  fmt::print("{}\n",
             Painted(Paint::kBold, fmt::format("{:>5} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
                                               "LAYER", "QUEUE", "PLAN", "WRITE", "ATTEND",
                                               "EXCHANGE", "MERGE", "TOTAL")));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto us = [&](const char* key) { return json["layers"][i].value(key, 0.0) * 1e6; };
    fmt::print("{:>5} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f}\n", i,
               us("queue"), us("plan"), us("write"), us("attend"), us("exchange"), us("merge"),
               us("total"));
  }
  fmt::print("rows verified {}, wrong {}, largest error {:.2e}, LSE {:.2e}\n", all.rows,
             Painted(all.wrong == 0 ? Paint::kGood : Paint::kBad, fmt::format("{}", all.wrong)),
             all.max_output_error, all.max_lse_error);
}

int Step(const Globals& globals, const StepOptions& options) {
  auto client = Client::Connect(globals.server);
  if (!client.ok()) return Fail(globals, client.error());
  const Synthetic synthetic(GeometryOf((*client)->info()), options.seed);
  ReplayStats stats;
  const std::atomic<bool> stop{false};
  ServerCalls calls(**client, synthetic, stats, stop);
  auto sequence = calls.Create("step");
  if (!sequence.ok()) return Fail(globals, sequence.error());
  std::vector<LayerResult> layers;
  const RpcError error = RunStep(**client, calls, synthetic, *sequence, options, layers);
  calls.Release({*sequence});
  if (!error.ok()) return Fail(globals, error);
  RowCheckResult all;
  for (const LayerResult& l : layers) all.Add(l.rows);
  Print(globals, options, layers, all);
  return all.wrong == 0 && stats.errors == 0 ? kExitOk : kExitFailed;
}

}  // namespace

void AddStepCommand(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* command =
      app.add_subcommand("step", "One synthetic step on a temporary sequence, verified");
  command->fallthrough();
  auto options = std::make_shared<StepOptions>();
  command->add_option("--context", options->context, "Tokens before the step")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Query tokens")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Of the data")->capture_default_str();
  command->callback([&globals, &action, options] {
    action = [&globals, options] { return Step(globals, *options); };
  });
}

}  // namespace dcp
