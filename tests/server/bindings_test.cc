#include "server/bindings.h"

#include <catch2/catch.hpp>
#include <limits>

namespace dcp {
namespace {

constexpr int kHeads = 4;
constexpr int kDqk = 8;

void SetTensor(v1::Tensor& tensor, std::initializer_list<std::int64_t> shape, std::string data) {
  tensor.set_dtype(v1::DATA_TYPE_BF16);
  for (const std::int64_t dim : shape) tensor.add_shape(dim);
  tensor.set_data(std::move(data));
}

std::shared_ptr<v1::DecodeStepRequest> ValidStep() {
  auto step = std::make_shared<v1::DecodeStepRequest>();
  step->set_step_id(7);
  step->set_layer(1);
  v1::DecodeStepEntry* entry = step->add_entries();
  entry->mutable_sequence()->set_sequence_id("a");
  entry->mutable_sequence()->set_generation(3);
  entry->set_start(5);
  entry->set_count(2);
  entry->set_rewind(true);
  SetTensor(*step->mutable_query(), {2, kHeads, kDqk}, std::string(2 * kHeads * kDqk * 2, 'q'));
  SetTensor(*step->mutable_new_kv(), {2, kDqk}, std::string(2 * kDqk * 2, 'k'));
  step->set_output_dtype(v1::DATA_TYPE_FP32);
  step->set_tag(99);
  return step;
}

Result<StepRequest> BindStep(const std::shared_ptr<v1::DecodeStepRequest>& step) {
  return Bind(std::shared_ptr<const v1::DecodeStepRequest>(step));
}

Reason StepReason(const std::shared_ptr<v1::DecodeStepRequest>& step) {
  return BindStep(step).status().reason();
}

TEST_CASE("a step binds field by field") {
  const auto step = ValidStep();
  step->set_return_lse(true);
  step->set_lse_base(v1::LSE_BASE_TWO);
  step->mutable_timeout()->set_seconds(2);
  step->set_expected_epoch(11);
  const Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  CHECK(request->step_id == 7);
  CHECK(request->layer == 1);
  REQUIRE(request->entries.size() == 1);
  CHECK(request->entries[0].sequence.id == "a");
  CHECK(request->entries[0].sequence.generation == 3);
  CHECK(request->entries[0].start == 5);
  CHECK(request->entries[0].count == 2);
  CHECK(request->entries[0].rewind);
  CHECK(request->query.dtype == DType::kBf16);
  CHECK(std::vector(request->query.shape.begin(), request->query.shape.end()) ==
        std::vector<std::int64_t>{2, kHeads, kDqk});
  REQUIRE(request->new_kv);
  CHECK(request->new_kv->bytes.size() == 2 * kDqk * 2);
  CHECK(request->output_dtype == DType::kF32);
  CHECK(request->lse_base == LogBase::kTwo);
  CHECK(request->timeout == Millis{2000});
  CHECK(request->expected_epoch == 11u);
}

TEST_CASE("tensors point into the message, which the request keeps alive") {
  auto step = ValidStep();
  const std::weak_ptr<v1::DecodeStepRequest> weak = step;
  const auto* bytes = reinterpret_cast<const std::byte*>(step->query().data().data());
  Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  step.reset();
  CHECK(!weak.expired());
  CHECK(request->query.bytes.data() == bytes);
  request->keepalive.reset();
  CHECK(weak.expired());
}

TEST_CASE("what is absent stays absent") {
  const auto step = ValidStep();
  step->clear_new_kv();
  const Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  CHECK(!request->new_kv);
  CHECK(!request->lse_base);
  CHECK(!request->timeout);
  CHECK(!request->expected_epoch);
}

TEST_CASE("a base without return_lse asks for nothing") {
  const auto step = ValidStep();
  step->set_lse_base(v1::LSE_BASE_E);
  const Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  CHECK(!request->lse_base);
}

TEST_CASE("dtypes that are missing or unknown are DTYPE") {
  auto step = ValidStep();
  step->set_output_dtype(v1::DATA_TYPE_UNSPECIFIED);
  CHECK(StepReason(step) == Reason::kDtype);
  step->set_output_dtype(static_cast<v1::DataType>(77));
  CHECK(StepReason(step) == Reason::kDtype);
  step = ValidStep();
  step->mutable_query()->set_dtype(v1::DATA_TYPE_UNSPECIFIED);
  CHECK(StepReason(step) == Reason::kDtype);
  step = ValidStep();
  step->mutable_new_kv()->set_dtype(static_cast<v1::DataType>(-1));
  CHECK(StepReason(step) == Reason::kDtype);
  CHECK(BindStep(step).status().message().find("new_kv.dtype is -1") != std::string::npos);
}

TEST_CASE("tensors that are missing are TENSOR_DATA") {
  auto step = ValidStep();
  step->clear_query();
  CHECK(StepReason(step) == Reason::kTensorData);
  step = ValidStep();
  step->mutable_query()->clear_data();
  CHECK(StepReason(step) == Reason::kTensorData);
  step = ValidStep();
  step->mutable_new_kv()->clear_payload();
  CHECK(StepReason(step) == Reason::kTensorData);
}

TEST_CASE("empty data is data: its size is judged later") {
  const auto step = ValidStep();
  step->mutable_query()->set_data("");
  const Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  CHECK(request->query.bytes.empty());
}

TEST_CASE("return_lse needs a base") {
  const auto step = ValidStep();
  step->set_return_lse(true);
  CHECK(StepReason(step) == Reason::kLseBase);
  step->set_lse_base(static_cast<v1::LseBase>(9));
  CHECK(StepReason(step) == Reason::kLseBase);
}

TEST_CASE("timeouts are positive and in range") {
  const auto step = ValidStep();
  const auto reason = [&](std::int64_t seconds, std::int32_t nanos) {
    step->mutable_timeout()->set_seconds(seconds);
    step->mutable_timeout()->set_nanos(nanos);
    return StepReason(step);
  };
  CHECK(reason(0, 0) == Reason::kTimeout);
  CHECK(reason(-1, 0) == Reason::kTimeout);
  CHECK(reason(0, -1) == Reason::kTimeout);
  CHECK(reason(1, -1) == Reason::kTimeout);
  CHECK(reason(0, 1'000'000'000) == Reason::kTimeout);
  CHECK(reason(315'576'000'001, 0) == Reason::kTimeout);
  CHECK(reason(std::numeric_limits<std::int64_t>::max(), 0) == Reason::kTimeout);
  CHECK(reason(std::numeric_limits<std::int64_t>::min(), 0) == Reason::kTimeout);
  CHECK(reason(0, 1) == Reason::kNone);
  CHECK(BindStep(step)->timeout == Millis{1});  // rounded up, never to 0
  CHECK(reason(1, 1) == Reason::kNone);
  CHECK(BindStep(step)->timeout == Millis{1001});
  CHECK(reason(315'576'000'000, 999'999'999) == Reason::kNone);
}

TEST_CASE("leases are checked as durations, in Create and Fork") {
  v1::CreateSequenceRequest create;
  v1::ForkSequenceRequest fork;
  CHECK(!Bind(create)->lease);
  CHECK(!Bind(fork)->lease);
  create.mutable_lease()->set_nanos(-5);
  fork.mutable_lease()->set_seconds(std::numeric_limits<std::int64_t>::max());
  CHECK(Bind(create).status().reason() == Reason::kLease);
  CHECK(Bind(fork).status().reason() == Reason::kLease);
  create.mutable_lease()->set_nanos(250'000'000);
  CHECK(Bind(create)->lease == Millis{250});
}

TEST_CASE("the other requests bind field by field") {
  v1::CreateSequenceRequest create;
  create.set_sequence_id("s");
  create.set_request_id("r");
  create.set_softmax_scale(0.25);
  create.set_expected_epoch(0);  // present, although 0
  const auto c = Bind(create);
  CHECK(c->id == "s");
  CHECK(c->request_id == "r");
  CHECK(c->softmax_scale == 0.25);
  CHECK(c->expected_epoch == 0u);

  v1::ForkSequenceRequest fork;
  fork.mutable_parent()->set_sequence_id("p");
  fork.mutable_parent()->set_generation(4);
  fork.set_sequence_id("s");
  fork.set_request_id("r");
  fork.set_at_length(12);
  const auto f = Bind(fork);
  CHECK(f->parent.id == "p");
  CHECK(f->parent.generation == 4);
  CHECK(f->id == "s");
  CHECK(f->request_id == "r");
  CHECK(f->at_length == 12);

  v1::TruncateSequenceRequest truncate;
  truncate.mutable_sequence()->set_sequence_id("p");
  truncate.set_step_id(9);
  truncate.set_to_length(-1);  // the engine's to judge
  const auto t = Bind(truncate);
  CHECK(t->sequence.id == "p");
  CHECK(t->step_id == 9);
  CHECK(t->to_length == -1);

  v1::ReleaseSequencesRequest release;
  release.add_sequences()->set_sequence_id("a");
  release.add_sequences()->set_generation(2);
  const auto r = Bind(release);
  REQUIRE(r->sequences.size() == 2);
  CHECK(r->sequences[0].id == "a");
  CHECK(r->sequences[1].generation == 2);

  v1::GetSequenceRequest get;
  get.set_sequence_id("g");
  CHECK(!Bind(get)->generation);
  get.set_generation(5);
  CHECK(Bind(get)->generation == 5u);

  v1::ListSequencesRequest list;
  list.set_page_size(10);
  list.set_page_token("t");
  CHECK(Bind(list)->page_size == 10);
  CHECK(Bind(list)->page_token == "t");

  v1::AppendKvHeader header;
  header.mutable_sequence()->set_sequence_id("h");
  header.set_step_id(1);
  header.set_start(2);
  header.set_count(3);
  header.set_layer_begin(4);
  header.set_layer_count(5);
  const auto h = Bind(header);
  CHECK(h->sequence.id == "h");
  CHECK(h->step_id == 1);
  CHECK(h->start == 2);
  CHECK(h->count == 3);
  CHECK(h->layer_begin == 4);
  CHECK(h->layer_count == 5);
}

TEST_CASE("a chunk keeps its message alive") {
  auto message = std::make_shared<v1::AppendKvRequest>();
  message->mutable_chunk()->set_layer(1);
  message->mutable_chunk()->set_offset(6);
  CHECK(BindChunk(message).status().reason() == Reason::kTensorData);
  SetTensor(*message->mutable_chunk()->mutable_latents(), {1, kDqk}, std::string(kDqk * 2, 'k'));
  const std::weak_ptr<v1::AppendKvRequest> weak = message;
  Result<AppendChunk> chunk = BindChunk(std::move(message));
  REQUIRE(chunk.ok());
  CHECK(chunk->layer == 1);
  CHECK(chunk->offset == 6);
  CHECK(chunk->latents.bytes.size() == kDqk * 2);
  CHECK(!weak.expired());
  chunk->keepalive.reset();
  CHECK(weak.expired());
}

TEST_CASE("a step's answer") {
  const auto step = ValidStep();
  step->set_return_lse(true);
  step->set_lse_base(v1::LSE_BASE_TWO);
  const Result<StepRequest> request = BindStep(step);
  REQUIRE(request.ok());
  const StepAnswerShape shape = AnswerShape(
      *step, *request, {.layers = 2, .heads = kHeads, .kv_lora_rank = 6, .rope_dim = 2});
  StepReply reply;
  reply.output = std::string(2 * kHeads * 6 * 4, 'o');
  reply.lse.assign(2 * kHeads, 1.5f);
  reply.faulty_rows = 3;
  reply.timing.queue = Nanos{1'500'000'001};
  reply.timing.total = Nanos{2'000'000'000};
  reply.epoch = 8;
  const char* bytes = reply.output.data();

  v1::DecodeStepResponse out;
  Encode(std::move(reply), shape, &out);
  CHECK(out.tag() == 99);
  CHECK(!out.has_status());
  CHECK(out.output().dtype() == v1::DATA_TYPE_FP32);
  CHECK(std::vector(out.output().shape().begin(), out.output().shape().end()) ==
        std::vector<std::int64_t>{2, kHeads, 6});
  CHECK(out.output().data().data() == bytes);  // moved, not copied
  CHECK(out.lse().base() == v1::LSE_BASE_TWO);
  CHECK(out.lse().values().dtype() == v1::DATA_TYPE_FP32);
  CHECK(std::vector(out.lse().values().shape().begin(), out.lse().values().shape().end()) ==
        std::vector<std::int64_t>{2, kHeads});
  CHECK(out.lse().values().data().size() == 2 * kHeads * sizeof(float));
  CHECK(out.faulty_rows() == 3);
  CHECK(out.timing().queue().seconds() == 1);
  CHECK(out.timing().queue().nanos() == 500'000'001);
  CHECK(out.timing().total().seconds() == 2);
  CHECK(out.epoch() == 8);
}

TEST_CASE("a sequence's answer") {
  SequenceInfo info{.id = "a",
                    .generation = 2,
                    .layer_lengths = {3, 4},
                    .max_step_id = 5,
                    .blocks = 6,
                    .shared_blocks = 1,
                    .open_appends = 1,
                    .lease_remaining = {},
                    .epoch = 9};
  v1::Sequence out;
  Encode(info, &out);
  CHECK(out.ref().sequence_id() == "a");
  CHECK(out.ref().generation() == 2);
  CHECK(std::vector(out.layer_lengths().begin(), out.layer_lengths().end()) ==
        std::vector<std::int64_t>{3, 4});
  CHECK(out.max_step_id() == 5);
  CHECK(out.blocks() == 6);
  CHECK(out.shared_blocks() == 1);
  CHECK(out.open_appends() == 1);
  CHECK(!out.has_lease_remaining());
  info.lease_remaining = Millis{1500};
  Encode(info, &out);
  CHECK(out.lease_remaining().seconds() == 1);
  CHECK(out.lease_remaining().nanos() == 500'000'000);
}

TEST_CASE("the server's own answer says what was configured and chosen") {
  EngineInfo info{.backend = "some_backend", .lse_base = LogBase::kTwo};
  info.config.ranks.count = 3;
  info.config.model = {.layers = 5, .heads = 6, .kv_lora_rank = 7, .rope_dim = 8};
  for (const RankDevice device : {RankDevice::kCpu, RankDevice::kCuda}) {
    info.config.ranks.device = device;
    v1::GetServerInfoResponse out;
    Encode(info, {.version = "1", .git_hash = "h", .max_message_bytes = 9}, &out);
    CHECK(out.ranks().count() == 3);
    CHECK(out.ranks().device() == (device == RankDevice::kCpu ? "cpu" : "cuda"));
    CHECK(out.model().layers() == 5);
    CHECK(out.model().heads() == 6);
    CHECK(out.model().kv_lora_rank() == 7);
    CHECK(out.model().rope_dim() == 8);
  }
}

}  // namespace
}  // namespace dcp
