#include "server/bindings.h"

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace dcp {
namespace {

Result<DType> BindDType(std::string_view name, v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_BF16: return DType::kBf16;
    case v1::DATA_TYPE_FP32: return DType::kF32;
    default: break;
  }
  return Status(Reason::kDtype, std::string(name) + " is " + std::to_string(int{dtype}) +
                                    ", expected DATA_TYPE_BF16 (1) or DATA_TYPE_FP32 (2)");
}

Result<TensorView> BindTensor(std::string_view name, const v1::Tensor& tensor) {
  if (tensor.payload_case() != v1::Tensor::kData) {
    return Status(Reason::kTensorData, std::string(name) + " has no payload, expected data");
  }
  DCP_ASSIGN_OR_RETURN(const DType dtype, BindDType(std::string(name) + ".dtype", tensor.dtype()));
  return TensorView{
      .dtype = dtype,
      .shape = {tensor.shape().data(), static_cast<std::size_t>(tensor.shape_size())},
      .bytes = std::as_bytes(std::span(tensor.data())),
  };
}

// A duration in milliseconds, rounded up so that a positive one stays positive.
Result<Millis> BindDuration(std::string_view name, Reason reason,
                            const google::protobuf::Duration& duration) {
  constexpr std::int64_t kMaxSeconds = 315'576'000'000;  // google.protobuf.Duration's own range
  const std::int64_t seconds = duration.seconds();
  const std::int32_t nanos = duration.nanos();
  const bool valid = seconds >= 0 && seconds <= kMaxSeconds && nanos >= 0 && nanos < 1'000'000'000;
  if (!valid) {
    return Status(reason, std::string(name) + " is {seconds: " + std::to_string(seconds) +
                              ", nanos: " + std::to_string(nanos) +
                              "}, expected seconds in [0, 315576000000] and nanos in [0, 10^9)");
  }
  return Millis{seconds * 1000 + (nanos + 999'999) / 1'000'000};
}

Result<std::optional<Millis>> BindLease(bool present, const google::protobuf::Duration& lease) {
  if (!present) return std::optional<Millis>();
  DCP_ASSIGN_OR_RETURN(const Millis bound, BindDuration("lease", Reason::kLease, lease));
  return std::optional<Millis>(bound);
}

template <class Message>
std::optional<std::uint64_t> ExpectedEpoch(const Message& message) {
  if (!message.has_expected_epoch()) return std::nullopt;
  return message.expected_epoch();
}

SequenceRef BindRef(const v1::SequenceRef& ref) {
  return {.id = ref.sequence_id(), .generation = ref.generation()};
}

v1::DataType WireDType(DType dtype) {
  return dtype == DType::kBf16 ? v1::DATA_TYPE_BF16 : v1::DATA_TYPE_FP32;
}

v1::LseBase WireBase(LogBase base) {
  return base == LogBase::kE ? v1::LSE_BASE_E : v1::LSE_BASE_TWO;
}

void EncodeDuration(Nanos time, google::protobuf::Duration* out) {
  out->set_seconds(time.count() / 1'000'000'000);
  out->set_nanos(static_cast<std::int32_t>(time.count() % 1'000'000'000));
}

}  // namespace

Result<CreateRequest> Bind(const v1::CreateSequenceRequest& message) {
  DCP_ASSIGN_OR_RETURN(const auto lease, BindLease(message.has_lease(), message.lease()));
  return CreateRequest{.id = message.sequence_id(),
                       .request_id = message.request_id(),
                       .softmax_scale = message.softmax_scale(),
                       .lease = lease,
                       .expected_epoch = ExpectedEpoch(message)};
}

Result<ForkRequest> Bind(const v1::ForkSequenceRequest& message) {
  DCP_ASSIGN_OR_RETURN(const auto lease, BindLease(message.has_lease(), message.lease()));
  return ForkRequest{.parent = BindRef(message.parent()),
                     .id = message.sequence_id(),
                     .request_id = message.request_id(),
                     .at_length = message.at_length(),
                     .lease = lease,
                     .expected_epoch = ExpectedEpoch(message)};
}

Result<TruncateRequest> Bind(const v1::TruncateSequenceRequest& message) {
  return TruncateRequest{.sequence = BindRef(message.sequence()),
                         .step_id = message.step_id(),
                         .to_length = message.to_length(),
                         .expected_epoch = ExpectedEpoch(message)};
}

Result<ReleaseRequest> Bind(const v1::ReleaseSequencesRequest& message) {
  ReleaseRequest request{.sequences = {}, .expected_epoch = ExpectedEpoch(message)};
  request.sequences.reserve(static_cast<std::size_t>(message.sequences_size()));
  for (const v1::SequenceRef& ref : message.sequences()) request.sequences.push_back(BindRef(ref));
  return request;
}

Result<GetSequenceRequest> Bind(const v1::GetSequenceRequest& message) {
  GetSequenceRequest request{
      .id = message.sequence_id(), .generation = {}, .expected_epoch = ExpectedEpoch(message)};
  if (message.has_generation()) request.generation = message.generation();
  return request;
}

Result<ListRequest> Bind(const v1::ListSequencesRequest& message) {
  return ListRequest{.page_size = message.page_size(),
                     .page_token = message.page_token(),
                     .expected_epoch = ExpectedEpoch(message)};
}

Result<AppendRequest> Bind(const v1::AppendKvHeader& message) {
  return AppendRequest{.sequence = BindRef(message.sequence()),
                       .step_id = message.step_id(),
                       .start = message.start(),
                       .count = message.count(),
                       .layer_begin = message.layer_begin(),
                       .layer_count = message.layer_count(),
                       .expected_epoch = ExpectedEpoch(message)};
}

Result<AppendChunk> BindChunk(std::shared_ptr<const v1::AppendKvRequest> message) {
  const v1::AppendKvChunk& chunk = message->chunk();
  DCP_ASSIGN_OR_RETURN(const TensorView latents, BindTensor("latents", chunk.latents()));
  return AppendChunk{.layer = chunk.layer(),
                     .offset = chunk.offset(),
                     .latents = latents,
                     .keepalive = std::move(message)};
}

Result<StepRequest> Bind(std::shared_ptr<const v1::DecodeStepRequest> message) {
  StepRequest request;
  request.step_id = message->step_id();
  request.layer = message->layer();
  request.entries.reserve(static_cast<std::size_t>(message->entries_size()));
  for (const v1::DecodeStepEntry& entry : message->entries()) {
    request.entries.push_back({.sequence = BindRef(entry.sequence()),
                               .start = entry.start(),
                               .count = entry.count(),
                               .rewind = entry.rewind()});
  }
  if (!message->has_query()) {
    return Status(Reason::kTensorData, "query is missing, expected a tensor");
  }
  DCP_ASSIGN_OR_RETURN(request.query, BindTensor("query", message->query()));
  if (message->has_new_kv()) {
    DCP_ASSIGN_OR_RETURN(request.new_kv, BindTensor("new_kv", message->new_kv()));
  }
  DCP_ASSIGN_OR_RETURN(request.output_dtype, BindDType("output_dtype", message->output_dtype()));
  if (message->return_lse()) {
    switch (message->lse_base()) {
      case v1::LSE_BASE_E: request.lse_base = LogBase::kE; break;
      case v1::LSE_BASE_TWO: request.lse_base = LogBase::kTwo; break;
      default:
        return Status(Reason::kLseBase, "lse_base is " + std::to_string(int{message->lse_base()}) +
                                            " with return_lse, expected LSE_BASE_E (1) or "
                                            "LSE_BASE_TWO (2)");
    }
  }
  if (message->has_timeout()) {
    DCP_ASSIGN_OR_RETURN(request.timeout,
                         BindDuration("timeout", Reason::kTimeout, message->timeout()));
    if (*request.timeout == Millis{0}) {
      return Status(Reason::kTimeout, "timeout is 0, expected a positive duration");
    }
  }
  request.expected_epoch = ExpectedEpoch(*message);
  request.keepalive = std::move(message);
  return request;
}

StepAnswerShape AnswerShape(const v1::DecodeStepRequest& message, const StepRequest& request,
                            const ModelConfig& model) {
  StepAnswerShape shape{.tag = message.tag(),
                        .tokens = 0,
                        .heads = model.heads,
                        .d_v = model.kv_lora_rank,
                        .dtype = *request.output_dtype,
                        .lse_base = request.lse_base};
  for (const StepEntry& entry : request.entries) shape.tokens += entry.count;
  return shape;
}

void Encode(const EngineInfo& info, const ServerFacts& facts, v1::GetServerInfoResponse* out) {
  const EngineConfig& config = info.config;
  out->set_version(facts.version);
  out->set_git_hash(facts.git_hash);
  out->set_epoch(info.epoch);

  v1::ModelGeometry* model = out->mutable_model();
  model->set_layers(config.model.layers);
  model->set_heads(config.model.heads);
  model->set_kv_lora_rank(config.model.kv_lora_rank);
  model->set_rope_dim(config.model.rope_dim);
  model->set_softmax_scale(config.model.softmax_scale);

  out->mutable_ranks()->set_count(config.ranks.count);
  out->mutable_ranks()->set_device(std::string(RankDeviceName(config.ranks.device)));

  v1::KvLayout* kv = out->mutable_kv();
  kv->set_page_tokens(config.kv.page_tokens);
  kv->set_interleave(config.kv.interleave);
  kv->set_block_tokens(info.block_tokens);
  kv->set_total_blocks(config.kv.blocks);
  kv->set_bytes_per_rank(info.kv_bytes_per_rank);

  const LimitsConfig& from = config.limits;
  v1::Limits* limits = out->mutable_limits();
  limits->set_max_sequences(from.max_sequences);
  limits->set_max_context(from.max_context);
  limits->set_max_batch(from.max_batch);
  limits->set_max_query_tokens(from.max_query_tokens);
  limits->set_max_step_tokens(from.max_step_tokens);
  limits->set_max_queue(from.max_queue);
  limits->set_max_inflight(from.max_inflight);
  limits->set_max_message_bytes(facts.max_message_bytes);
  EncodeDuration(from.default_step_timeout, limits->mutable_default_step_timeout());
  EncodeDuration(from.max_step_timeout, limits->mutable_max_step_timeout());
  EncodeDuration(from.append_idle_timeout, limits->mutable_append_idle_timeout());
  limits->set_max_open_appends(from.max_open_appends);

  v1::AttentionChoice* attention = out->mutable_attention();
  attention->set_backend(info.backend);
  attention->set_lse_base(WireBase(info.lse_base));
  attention->set_partial_dtype(WireDType(config.attention.partial_dtype));
  out->set_exchange(config.exchange == ExchangeKind::kAgRs ? v1::EXCHANGE_ALGORITHM_AG_RS
                                                           : v1::EXCHANGE_ALGORITHM_A2A);
}

void Encode(const LoadInfo& load, v1::GetLoadResponse* out) {
  out->set_sequences(load.sequences);
  out->set_queued(load.queued);
  out->set_open_appends(load.open_appends);
  out->set_total_blocks(load.total_blocks);
  out->set_free_blocks(load.free_blocks);
  out->set_cow_blocks(load.cow_blocks);
  out->set_steps(load.steps);
  out->set_failed_steps(load.failed_steps);
  out->set_faulty_rows(load.faulty_rows);
  out->set_rank_failures(load.rank_failures);
  out->set_epoch(load.epoch);
}

void Encode(const SequenceInfo& info, v1::Sequence* out) {
  out->mutable_ref()->set_sequence_id(info.id);
  out->mutable_ref()->set_generation(info.generation);
  out->mutable_layer_lengths()->Assign(info.layer_lengths.begin(), info.layer_lengths.end());
  out->set_max_step_id(info.max_step_id);
  out->set_blocks(info.blocks);
  out->set_shared_blocks(info.shared_blocks);
  out->set_open_appends(info.open_appends);
  if (info.lease_remaining) EncodeDuration(*info.lease_remaining, out->mutable_lease_remaining());
}

void Encode(const ListReply& reply, v1::ListSequencesResponse* out) {
  out->mutable_sequences()->Reserve(static_cast<int>(reply.sequences.size()));
  for (const SequenceInfo& info : reply.sequences) Encode(info, out->add_sequences());
  out->set_next_page_token(reply.next_page_token);
  out->set_epoch(reply.epoch);
}

void Encode(const AppendReply& reply, v1::AppendKvResponse* out) {
  out->set_length(reply.length);
  out->set_replayed(reply.replayed);
  out->set_epoch(reply.epoch);
}

void Encode(StepReply&& reply, const StepAnswerShape& shape, v1::DecodeStepResponse* out) {
  out->set_tag(shape.tag);
  v1::Tensor* output = out->mutable_output();
  output->set_dtype(WireDType(shape.dtype));
  output->add_shape(shape.tokens);
  output->add_shape(shape.heads);
  output->add_shape(shape.d_v);
  output->set_data(std::move(reply.output));
  if (shape.lse_base) {
    out->mutable_lse()->set_base(WireBase(*shape.lse_base));
    v1::Tensor* lse = out->mutable_lse()->mutable_values();
    lse->set_dtype(v1::DATA_TYPE_FP32);
    lse->add_shape(shape.tokens);
    lse->add_shape(shape.heads);
    lse->set_data(reply.lse.data(), reply.lse.size() * sizeof(float));
  }
  out->set_faulty_rows(reply.faulty_rows);
  v1::StepTiming* timing = out->mutable_timing();
  EncodeDuration(reply.timing.queue, timing->mutable_queue());
  EncodeDuration(reply.timing.plan, timing->mutable_plan());
  EncodeDuration(reply.timing.write, timing->mutable_write());
  EncodeDuration(reply.timing.attend, timing->mutable_attend());
  EncodeDuration(reply.timing.exchange, timing->mutable_exchange());
  EncodeDuration(reply.timing.merge, timing->mutable_merge());
  EncodeDuration(reply.timing.total, timing->mutable_total());
  out->set_epoch(reply.epoch);
}

}  // namespace dcp
