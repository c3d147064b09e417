#include "tests/integration/test_client.h"

#include <cstring>
#include <functional>
#include <stdexcept>

#include "base/status.h"
#include "google/rpc/error_details.pb.h"

namespace dcp {
namespace {

std::string Bytes(const std::vector<Bf16>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Bf16)};
}

std::string CodeAndReason(const RpcError& error) {
  if (error.code == 0) return "OK";
  std::string text(CodeName(static_cast<StatusCode>(error.code)));
  return error.reason.empty() ? text : text + "/" + error.reason;
}

void ExpectOk(const grpc::Status& status) {
  if (!status.ok())
    throw std::runtime_error(CodeAndReason(ErrorOf(status)) + ": " + status.error_message());
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

void Expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

RpcError ErrorOf(const google::rpc::Status& status) {
  RpcError error{.code = status.code(), .reason = {}, .message = status.message(), .metadata = {}};
  for (const google::protobuf::Any& any : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info)) {
      Expect(info.domain() == "dcp", "domain is " + info.domain());
      error.reason = info.reason();
      error.metadata = {info.metadata().begin(), info.metadata().end()};
    } else if (any.UnpackTo(&retry)) {
      error.retry = retry.retry_delay().seconds() > 0 || retry.retry_delay().nanos() > 0;
    }
  }
  return error;
}

RpcError ErrorOf(const grpc::Status& status) {
  google::rpc::Status details;
  if (!status.error_details().empty()) {
    Expect(details.ParseFromString(status.error_details()), "details do not decode");
    Expect(details.code() == status.error_code(), "details have another code");
  }
  RpcError error = ErrorOf(details);
  error.code = status.error_code();
  error.message = status.error_message();
  return error;
}

std::string CodeAndReason(const grpc::Status& status) { return CodeAndReason(ErrorOf(status)); }
std::string CodeAndReason(const google::rpc::Status& status) {
  return CodeAndReason(ErrorOf(status));
}

TestClient::TestClient(const std::string& address, const TestConfig& config)
    : config_(config),
      synthetic_(
          {.heads = config.heads, .d_qk = config.d_qk(), .softmax_scale = config.softmax_scale},
          /*seed=*/7),
      checker_(synthetic_, config.kv_lora_rank, {.output = 1e-5, .lse = 1e-5}),
      channel_(Connect(address)),
      stub_(v1::DecodeService::NewStub(channel_)) {}

std::unique_ptr<grpc::ClientContext> TestClient::Context(Millis timeout) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + timeout);
  return context;
}

TestSequence TestClient::Create(const std::string& id, std::uint64_t content) {
  v1::CreateSequenceRequest request;
  request.set_sequence_id(id);
  request.set_request_id("create " + id);
  request.set_softmax_scale(config_.softmax_scale);
  v1::CreateSequenceResponse response;
  ExpectOk(stub_->CreateSequence(Context().get(), request, &response));
  Expect(response.sequence().sequence_id() == id && response.sequence().generation() > 0 &&
             response.epoch() > 0,
         "answer of CreateSequence: " + response.ShortDebugString());
  return {.ref = response.sequence(),
          .content = Content(content != 0 ? content : std::hash<std::string>()(id))};
}

TestSequence TestClient::Fork(const TestSequence& parent, const std::string& id, std::int64_t at) {
  v1::ForkSequenceRequest request;
  *request.mutable_parent() = parent.ref;
  request.set_sequence_id(id);
  request.set_request_id("fork " + id);
  request.set_at_length(at);
  v1::ForkSequenceResponse response;
  ExpectOk(stub_->ForkSequence(Context().get(), request, &response));
  // The parent's tokens, then its own. Parents of the tests have one segment at most.
  return {.ref = response.sequence(),
          .content = Content(std::hash<std::string>()(id), {{parent.content.At(0).content, at}})};
}

int TestClient::Release(const std::vector<const TestSequence*>& sequences) {
  v1::ReleaseSequencesRequest request;
  for (const TestSequence* s : sequences) *request.add_sequences() = s->ref;
  v1::ReleaseSequencesResponse response;
  ExpectOk(stub_->ReleaseSequences(Context().get(), request, &response));
  return response.released();
}

v1::Sequence TestClient::Get(const TestSequence& sequence) {
  v1::GetSequenceRequest request;
  request.set_sequence_id(sequence.ref.sequence_id());
  request.set_generation(sequence.ref.generation());
  v1::GetSequenceResponse response;
  ExpectOk(stub_->GetSequence(Context().get(), request, &response));
  return response.sequence();
}

v1::GetLoadResponse TestClient::Load() {
  v1::GetLoadResponse response;
  ExpectOk(stub_->GetLoad(Context().get(), {}, &response));
  return response;
}

v1::GetServerInfoResponse TestClient::Info() {
  v1::GetServerInfoResponse response;
  ExpectOk(stub_->GetServerInfo(Context().get(), {}, &response));
  return response;
}

v1::DecodeStepRequest TestClient::Step(std::uint64_t step_id, int layer,
                                       const std::vector<StepPart>& parts, bool write) const {
  v1::DecodeStepRequest request;
  request.set_step_id(write ? step_id : 0);
  request.set_layer(layer);
  const auto row = static_cast<std::size_t>(config_.heads) * config_.d_qk();
  std::vector<Bf16> queries;
  std::vector<Bf16> latents;
  std::int64_t tokens = 0;
  for (const StepPart& part : parts) {
    v1::DecodeStepEntry* entry = request.add_entries();
    *entry->mutable_sequence() = part.sequence->ref;
    entry->set_start(part.start);
    entry->set_count(part.count);
    entry->set_rewind(part.rewind);
    for (int j = 0; j < part.count; ++j) {
      queries.resize(queries.size() + row);
      synthetic_.Queries(part.sequence->content, layer, part.start + j,
                         std::span(queries).last(row));
    }
    const auto n = static_cast<std::size_t>(part.count) * config_.d_qk();
    latents.resize(latents.size() + n);
    synthetic_.Latents(part.sequence->content, layer, part.start, std::span(latents).last(n));
    tokens += part.count;
  }
  v1::Tensor* query = request.mutable_query();
  query->set_dtype(v1::DATA_TYPE_BF16);
  query->add_shape(tokens);
  query->add_shape(config_.heads);
  query->add_shape(config_.d_qk());
  query->set_data(Bytes(queries));
  if (write) {
    v1::Tensor* kv = request.mutable_new_kv();
    kv->set_dtype(v1::DATA_TYPE_BF16);
    kv->add_shape(tokens);
    kv->add_shape(config_.d_qk());
    kv->set_data(Bytes(latents));
  }
  request.set_output_dtype(v1::DATA_TYPE_FP32);
  request.set_return_lse(true);
  request.set_lse_base(v1::LSE_BASE_E);
  return request;
}

v1::AppendKvRequest TestClient::Header(const TestSequence& sequence, std::uint64_t step_id,
                                       std::int64_t start, std::int64_t count, int layer_begin,
                                       int layer_count) const {
  v1::AppendKvRequest message;
  v1::AppendKvHeader* header = message.mutable_header();
  *header->mutable_sequence() = sequence.ref;
  header->set_step_id(step_id);
  header->set_start(start);
  header->set_count(count);
  header->set_layer_begin(layer_begin);
  header->set_layer_count(layer_count);
  return message;
}

v1::AppendKvRequest TestClient::Chunk(const TestSequence& sequence, int layer, std::int64_t start,
                                      std::int64_t offset, std::int64_t count) const {
  v1::AppendKvRequest message;
  message.mutable_chunk()->set_layer(layer);
  message.mutable_chunk()->set_offset(offset);
  std::vector<Bf16> latents(static_cast<std::size_t>(count) * config_.d_qk());
  synthetic_.Latents(sequence.content, layer, start + offset, latents);
  v1::Tensor* tensor = message.mutable_chunk()->mutable_latents();
  tensor->set_dtype(v1::DATA_TYPE_BF16);
  tensor->add_shape(count);
  tensor->add_shape(config_.d_qk());
  tensor->set_data(Bytes(latents));
  return message;
}

grpc::Status TestClient::Call(const v1::DecodeStepRequest& request,
                              v1::DecodeStepResponse* response) {
  return stub_->DecodeStep(Context().get(), request, response);
}

void TestClient::Append(const TestSequence& sequence, std::uint64_t step_id, std::int64_t start,
                        int count) {
  for (int layer = 0; layer < config_.layers; ++layer) {
    const std::vector<StepPart> parts = {{&sequence, start, count}};
    v1::DecodeStepResponse response;
    ExpectOk(Call(Step(step_id, layer, parts), &response));
    const std::string wrong = Verify(layer, parts, response);
    Expect(wrong.empty(), wrong);
  }
}

std::string TestClient::Verify(int layer, const std::vector<StepPart>& parts,
                               const v1::DecodeStepResponse& response) {
  const auto heads = static_cast<std::size_t>(config_.heads);
  const auto d_v = static_cast<std::size_t>(config_.kv_lora_rank);
  std::size_t tokens = 0;
  for (const StepPart& part : parts) tokens += static_cast<std::size_t>(part.count);
  const v1::Tensor& output = response.output();
  const v1::Tensor& lse = response.lse().values();
  const auto shape_is = [](const v1::Tensor& t, std::initializer_list<std::size_t> shape) {
    return std::equal(
        t.shape().begin(), t.shape().end(), shape.begin(), shape.end(),
        [](std::int64_t a, std::size_t b) { return static_cast<std::size_t>(a) == b; });
  };
  if (response.has_status()) return "has a status";
  if (output.dtype() != v1::DATA_TYPE_FP32 || !shape_is(output, {tokens, heads, d_v}) ||
      output.data().size() != tokens * heads * d_v * 4) {
    return "output: dtype, shape or size";
  }
  if (response.lse().base() != v1::LSE_BASE_E || lse.dtype() != v1::DATA_TYPE_FP32 ||
      !shape_is(lse, {tokens, heads}) || lse.data().size() != tokens * heads * 4) {
    return "lse: base, dtype, shape or size";
  }
  if (response.faulty_rows() != 0) return "faulty rows";
  std::vector<float> values(output.data().size() / 4);
  std::memcpy(values.data(), output.data().data(), output.data().size());
  std::vector<float> lses(lse.data().size() / 4);
  std::memcpy(lses.data(), lse.data().data(), lse.data().size());
  std::vector<int> all_heads(heads);
  for (std::size_t h = 0; h < heads; ++h) all_heads[h] = static_cast<int>(h);
  std::size_t token = 0;
  for (const StepPart& part : parts) {
    for (int j = 0; j < part.count; ++j, ++token) {
      const RowCheckResult result =
          checker_.Check({.content = &part.sequence->content,
                          .layer = layer,
                          .position = part.start + j,
                          .heads = all_heads,
                          .output = std::span(values).subspan(token * heads * d_v, heads * d_v),
                          .lse = std::span(lses).subspan(token * heads, heads)});
      if (result.wrong != 0) {
        return std::to_string(result.wrong) + " wrong rows at token " + std::to_string(token) +
               ", error " + std::to_string(result.max_output_error) + ", lse error " +
               std::to_string(result.max_lse_error);
      }
    }
  }
  return "";
}

}  // namespace dcp
