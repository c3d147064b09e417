#include "tests/support/cluster.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

namespace dcp::testing {
namespace {

constexpr std::uint64_t kSeed = 20260101;

// The tensors of one request, in one allocation that the request keeps alive.
struct Payload {
  std::vector<Bf16> query, latents;
  std::vector<std::int64_t> query_shape, latent_shape;
};

TensorView View(const std::vector<Bf16>& data, const std::vector<std::int64_t>& shape) {
  return {.dtype = DType::kBf16, .shape = shape, .bytes = std::as_bytes(std::span(data))};
}

template <class T>
T Must(Result<T> result) {
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  return *std::move(result);
}

}  // namespace

EngineConfig MakeConfig(const ClusterOptions& o) {
  EngineConfig c;
  c.model = {.layers = o.layers,
             .heads = o.heads,
             .kv_lora_rank = o.kv_lora_rank,
             .rope_dim = o.rope_dim,
             .softmax_scale = 1.0 / std::sqrt(192.0)};
  c.ranks = o.on;
  c.ranks.count = o.ranks;
  c.ranks.timeout = Millis(o.timeout_ms);
  c.kv = {.page_tokens = o.page_tokens, .interleave = o.interleave, .blocks = o.blocks};
  c.attention = {.backend = o.backend, .partial_dtype = o.partial_dtype};
  c.exchange = o.exchange;
  c.limits.max_step_tokens = o.max_step_tokens;
  c.limits.max_context = 1 << 16;
  return c;
}

void TestSequence::Diverge(std::int64_t at, std::uint64_t tail) {
  std::vector<Segment> kept;
  std::int64_t length = 0;
  for (const Segment& s : segments_) {
    if (length == at) break;
    kept.push_back({s.content, std::min(s.tokens, at - length)});
    length += kept.back().tokens;
  }
  if (length < at) kept.push_back({tail_, at - length});
  segments_ = std::move(kept);
  tail_ = tail;
}

TestSequence TestSequence::Forked(std::string id, std::int64_t at, std::uint64_t tail) const {
  TestSequence child = *this;
  child.id_ = std::move(id);
  child.generation = 0;
  child.Diverge(at, tail);
  return child;
}

Cluster::Cluster(const ClusterOptions& options)
    : config_(MakeConfig(options)),
      synthetic_({.heads = config_.model.heads,
                  .d_qk = config_.model.d_qk(),
                  .softmax_scale = config_.model.softmax_scale},
                 kSeed) {
  EngineHooks hooks = options.hooks;
  hooks.poison_kv = true;
  engine_ = Must(Engine::Create(config_, hooks));
}

TestSequence Cluster::Create(const std::string& id, std::uint64_t content) {
  TestSequence sequence(id, content);
  sequence.generation =
      Must(Await<CreateReply>([&](auto done) {
        engine_->CreateSequence(
            {.id = id, .request_id = "create " + id, .softmax_scale = config_.model.softmax_scale},
            std::move(done));
      })).generation;
  return sequence;
}

TestSequence Cluster::Fork(const TestSequence& parent, const std::string& id, std::int64_t at,
                           std::uint64_t content) {
  TestSequence child = parent.Forked(id, at, content);
  child.generation =
      Must(Await<CreateReply>([&](auto done) {
        engine_->ForkSequence(
            {.parent = parent.ref(), .id = id, .request_id = "fork " + id, .at_length = at},
            std::move(done));
      })).generation;
  return child;
}

void Cluster::Append(const TestSequence& sequence, std::uint64_t step_id, std::int64_t start,
                     std::int64_t count) {
  if (count == 0) return;
  const int layers = config_.model.layers;
  const AppendId id = Must(BeginAppend({.sequence = sequence.ref(),
                                        .step_id = step_id,
                                        .start = start,
                                        .count = count,
                                        .layer_begin = 0,
                                        .layer_count = layers}));
  for (int layer = 0; layer < layers; ++layer) {
    Must(WriteAppend(id, MakeChunk(sequence, layer, start, 0, count)));
  }
  CHECK(Must(CommitAppend(id)).length == start + count);
}

void Cluster::Release(const TestSequence& sequence) {
  const ReleaseReply reply = Must(Await<ReleaseReply>([&](auto done) {
    engine_->ReleaseSequences({.sequences = {sequence.ref()}}, std::move(done));
  }));
  CHECK(reply.released == 1);
}

SequenceInfo Cluster::Info(const TestSequence& sequence) {
  return Must(Await<SequenceInfo>([&](auto done) {
    engine_->GetSequence({.id = sequence.id(), .generation = sequence.generation}, std::move(done));
  }));
}

StepRequest Cluster::MakeStep(const StepSpec& spec) const {
  const std::int64_t heads = config_.model.heads;
  const std::int64_t d_qk = config_.model.d_qk();
  auto payload = std::make_shared<Payload>();
  std::int64_t tokens = 0;
  for (const StepItem& item : spec.items) tokens += item.count;
  payload->query.resize(static_cast<std::size_t>(tokens * heads * d_qk));
  payload->latents.resize(static_cast<std::size_t>(tokens * d_qk));
  payload->query_shape = {tokens, heads, d_qk};
  payload->latent_shape = {tokens, d_qk};

  StepRequest request{.step_id = spec.step_id,
                      .layer = spec.layer,
                      .output_dtype = spec.output_dtype,
                      .lse_base = spec.lse_base};
  std::int64_t token = 0;
  for (const StepItem& item : spec.items) {
    request.entries.push_back({.sequence = item.sequence->ref(),
                               .start = item.start,
                               .count = item.count,
                               .rewind = item.rewind});
    const Content content = item.sequence->content();
    for (std::int64_t j = 0; j < item.count; ++j, ++token) {
      synthetic_.Queries(content, spec.layer, item.start + j,
                         std::span(payload->query)
                             .subspan(static_cast<std::size_t>(token * heads * d_qk),
                                      static_cast<std::size_t>(heads * d_qk)));
      synthetic_.Latent(
          content.At(item.start + j), spec.layer,
          std::span(payload->latents)
              .subspan(static_cast<std::size_t>(token * d_qk), static_cast<std::size_t>(d_qk)));
    }
  }
  request.query = View(payload->query, payload->query_shape);
  if (spec.write) request.new_kv = View(payload->latents, payload->latent_shape);
  request.keepalive = payload;
  return request;
}

AppendChunk Cluster::MakeChunk(const TestSequence& sequence, std::int32_t layer, std::int64_t start,
                               std::int64_t offset, std::int64_t count) const {
  auto payload = std::make_shared<Payload>();
  payload->latents.resize(static_cast<std::size_t>(count * config_.model.d_qk()));
  payload->latent_shape = {count, config_.model.d_qk()};
  synthetic_.Latents(sequence.content(), layer, start + offset, payload->latents);
  return {.layer = layer,
          .offset = offset,
          .latents = View(payload->latents, payload->latent_shape),
          .keepalive = payload};
}

Result<StepReply> Cluster::Submit(StepRequest request) {
  return Await<StepReply>(
      [&](auto done) { engine_->SubmitStep(std::move(request), std::move(done)); });
}

Result<StepReply> Cluster::Step(const StepSpec& spec) { return Submit(MakeStep(spec)); }

Result<AppendId> Cluster::BeginAppend(const AppendRequest& request) {
  return Await<AppendId>([&](auto done) {
    engine_->BeginAppend(
        request, [](const Status&) {}, std::move(done));
  });
}

Result<AppendId> Cluster::WriteAppend(AppendId id, AppendChunk chunk) {
  return Await<AppendId>(
      [&](auto done) { engine_->WriteAppend(id, std::move(chunk), std::move(done)); });
}

Result<AppendReply> Cluster::CommitAppend(AppendId id) {
  return Await<AppendReply>([&](auto done) { engine_->CommitAppend(id, std::move(done)); });
}

RowErrors Cluster::Check(const StepSpec& spec, const StepReply& reply) const {
  const ModelConfig& model = config_.model;
  const auto heads = static_cast<std::size_t>(model.heads);
  const auto d_v = static_cast<std::size_t>(model.kv_lora_rank);
  const auto d_qk = static_cast<std::size_t>(model.d_qk());
  const TruthGeometry geometry{
      .d_qk = model.d_qk(), .d_v = model.kv_lora_rank, .softmax_scale = model.softmax_scale};
  RowErrors errors;
  std::size_t token = 0;
  for (const StepItem& item : spec.items) {
    const Content content = item.sequence->content();
    const std::size_t end = static_cast<std::size_t>(item.start + item.count);
    std::vector<Bf16> latents(end * d_qk);
    synthetic_.Latents(content, spec.layer, 0, latents);
    std::vector<const Bf16*> rows(end);
    for (std::size_t p = 0; p < end; ++p) rows[p] = latents.data() + p * d_qk;
    std::vector<Bf16> queries(heads * d_qk);
    for (std::int64_t j = 0; j < item.count; ++j, ++token) {
      synthetic_.Queries(content, spec.layer, item.start + j, queries);
      const auto visible = static_cast<std::size_t>(item.start + j + 1);
      const std::vector<RowTruth> truth =
          AttendRows(geometry, queries, std::span<const Bf16* const>(rows).first(visible));
      for (std::size_t h = 0; h < heads; ++h, ++errors.rows) {
        const std::size_t row = token * heads + h;
        std::vector<float> output(d_v);
        if (spec.output_dtype == DType::kF32) {
          std::memcpy(output.data(), reply.output.data() + row * d_v * 4, d_v * 4);
        } else {
          for (std::size_t i = 0; i < d_v; ++i) {
            Bf16 x;
            std::memcpy(&x, reply.output.data() + (row * d_v + i) * 2, 2);
            output[i] = ToFloat(x);
          }
        }
        const double error = RelativeError(output, truth[h].output);
        errors.output = std::isnan(error) ? error : std::max(errors.output, error);
        const double lse =
            static_cast<double>(reply.lse[row]) * (spec.lse_base == LogBase::kTwo ? kLn2 : 1.0);
        const double lse_error =
            std::abs(lse - truth[h].lse) / std::max(1.0, std::abs(truth[h].lse));
        errors.lse = std::isnan(lse_error) ? lse_error : std::max(errors.lse, lse_error);
        if (std::isnan(error) || std::isnan(lse_error)) return errors;
      }
    }
  }
  return errors;
}

double Cluster::OutputLimit(DType output_dtype) const {
  const bool bf16_partial = config_.attention.partial_dtype == DType::kBf16;
  if (bf16_partial && config_.exchange == ExchangeKind::kAgRs) return 8e-3;
  // Tensor cores take the softmax weights in bf16.
  const bool bf16_weights = config_.ranks.device == RankDevice::kCuda;
  return bf16_partial || bf16_weights || output_dtype == DType::kBf16 ? 4e-3 : 1e-5;
}

void Cluster::StepChecked(const StepSpec& spec) {
  const StepReply reply = Must(Step(spec));
  const RowErrors errors = Check(spec, reply);
  INFO("ranks " << config_.ranks.count << " interleave " << config_.kv.interleave << " start "
                << spec.items[0].start << " count " << spec.items[0].count);
  CHECK(reply.faulty_rows == 0);
  CHECK(errors.output <= OutputLimit(spec.output_dtype));
  CHECK(errors.lse <= 1e-5);
}

}  // namespace dcp::testing
