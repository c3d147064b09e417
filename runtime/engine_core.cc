#include "runtime/engine_core.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace dcp {
namespace {

constexpr std::size_t kMaxIdLength = 128;
constexpr Millis kMinLease{100};
constexpr Millis kMaxLease{24LL * 3600 * 1000};
constexpr int kDefaultPage = 100;
constexpr int kMaxPage = 1000;

bool IsIdChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == ':' || c == '/' || c == '-';
}

bool IsId(std::string_view id) {
  return !id.empty() && id.size() <= kMaxIdLength && std::ranges::all_of(id, IsIdChar);
}

Status CheckSequenceId(std::string_view id) {
  if (IsId(id)) return Status::Ok();
  return Status(Reason::kSequenceId, "sequence_id has " + std::to_string(id.size()) +
                                         " characters, expected 1 to 128 of [A-Za-z0-9._:/-]");
}

Status CheckRequestId(std::string_view id) {
  const auto printable = [](char c) { return c >= 0x20 && c < 0x7f; };
  if (!id.empty() && id.size() <= kMaxIdLength && std::ranges::all_of(id, printable)) {
    return Status::Ok();
  }
  return Status(Reason::kRequestId, "request_id has " + std::to_string(id.size()) +
                                        " characters, expected 1 to 128 of printable ASCII");
}

Status CheckLease(const std::optional<Millis>& lease) {
  if (!lease || (*lease >= kMinLease && *lease <= kMaxLease)) return Status::Ok();
  return Status(Reason::kLease, "lease is " + std::to_string(lease->count()) + " ms, expected " +
                                    std::to_string(kMinLease.count()) + " to " +
                                    std::to_string(kMaxLease.count()));
}

Status CheckPosition(std::string_view name, std::int64_t value) {
  if (value >= 0) return Status::Ok();
  return Status(Reason::kPosition,
                std::string(name) + " is " + std::to_string(value) + ", expected at least 0");
}

std::string LayerName(const std::string& id, std::int32_t layer) {
  return "sequence \"" + id + "\" layer " + std::to_string(layer);
}

}  // namespace

EngineCore::EngineCore(std::shared_ptr<const EngineConfig> config, std::unique_ptr<RankGroup> group)
    : config_(std::move(config)),
      shards_(config_->ranks.count, config_->kv.interleave, config_->kv.page_tokens),
      group_(std::move(group)),
      pool_(config_->kv.blocks),
      sequences_(config_->limits.max_sequences, group_->epoch()) {
  PublishCounters();
}

Status EngineCore::CheckEpoch(const std::optional<std::uint64_t>& expected) const {
  if (!expected || *expected == group_->epoch()) return Status::Ok();
  return Status(Reason::kEpochChanged, "epoch is " + std::to_string(group_->epoch()) +
                                           ", the request expects " + std::to_string(*expected))
      .With("epoch", std::to_string(group_->epoch()));
}

void EngineCore::PublishCounters() {
  counters_.sequences = sequences_.size();
  counters_.open_appends = static_cast<int>(appends_.size());
  counters_.free_blocks = pool_.free();
  counters_.epoch = group_->epoch();
}

Result<CreateReply> EngineCore::Create(const CreateRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  DCP_RETURN_IF_ERROR(CheckSequenceId(request.id));
  DCP_RETURN_IF_ERROR(CheckRequestId(request.request_id));
  if (request.softmax_scale != config_->model.softmax_scale) {
    return Status(Reason::kGeometry, "softmax_scale is " + std::to_string(request.softmax_scale) +
                                         ", this server's is " +
                                         std::to_string(config_->model.softmax_scale));
  }
  DCP_RETURN_IF_ERROR(CheckLease(request.lease));
  Origin origin{.request_id = request.request_id,
                .softmax_scale = request.softmax_scale,
                .lease = request.lease};
  DCP_ASSIGN_OR_RETURN(Sequence * sequence, sequences_.FindEarlier(request.id, origin));
  if (sequence == nullptr) {
    DCP_ASSIGN_OR_RETURN(sequence,
                         sequences_.Add(request.id, std::move(origin), config_->model.layers));
    PublishCounters();
  }
  return CreateReply{sequence->generation, group_->epoch()};
}

Result<CreateReply> EngineCore::Fork(const ForkRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  DCP_RETURN_IF_ERROR(CheckSequenceId(request.id));
  DCP_RETURN_IF_ERROR(CheckRequestId(request.request_id));
  DCP_RETURN_IF_ERROR(CheckLease(request.lease));
  DCP_RETURN_IF_ERROR(CheckPosition("at_length", request.at_length));
  Origin origin{.request_id = request.request_id,
                .parent = request.parent.id,
                .parent_generation = request.parent.generation,
                .at_length = request.at_length,
                .lease = request.lease};
  // Before the parent: a fork sent again answers the same after its parent is gone.
  DCP_ASSIGN_OR_RETURN(Sequence * child, sequences_.FindEarlier(request.id, origin));
  if (child != nullptr) return CreateReply{child->generation, group_->epoch()};
  DCP_ASSIGN_OR_RETURN(const Sequence* parent, sequences_.Find(request.parent));
  if (request.at_length > parent->ShortestLayer()) {
    return Status(Reason::kIncompleteToken, "at_length is " + std::to_string(request.at_length) +
                                                ", the shortest layer of \"" + parent->id +
                                                "\" has " +
                                                std::to_string(parent->ShortestLayer()) + " tokens")
        .With("actual_length", std::to_string(parent->ShortestLayer()));
  }
  DCP_ASSIGN_OR_RETURN(child, sequences_.Add(request.id, std::move(origin), config_->model.layers));
  const std::int64_t blocks = shards_.Blocks(Tokens(request.at_length));
  child->table.assign(parent->table.begin(), parent->table.begin() + blocks);
  for (const BlockId b : child->table) pool_.Ref(b);
  for (LayerState& layer : child->layers) layer.length = request.at_length;
  PublishCounters();
  return CreateReply{child->generation, group_->epoch()};
}

Result<SequenceInfo> EngineCore::Truncate(const TruncateRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  DCP_RETURN_IF_ERROR(CheckPosition("to_length", request.to_length));
  DCP_ASSIGN_OR_RETURN(Sequence * sequence, sequences_.Find(request.sequence));
  DCP_ASSIGN_OR_RETURN(const Verdict verdict,
                       JudgeTruncate(*sequence, request.step_id, request.to_length));
  if (verdict != Verdict::kReplay) {
    for (LayerState& layer : sequence->layers) {
      layer.length = std::min(layer.length, request.to_length);
      layer.step_id = request.step_id;
      layer.start = request.to_length;
      layer.count = 0;
    }
    sequence->Trim(shards_, pool_);
    PublishCounters();
  }
  return InfoOf(*sequence);
}

Result<ReleaseReply> EngineCore::Release(const ReleaseRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  ReleaseReply reply;
  for (const SequenceRef& ref : request.sequences) {
    Sequence* sequence = sequences_.FindId(ref.id);
    if (sequence == nullptr || sequence->generation != ref.generation) continue;
    RemoveSequence(*sequence, Status(Reason::kAppendCancelled, "the sequence was released"));
    ++reply.released;
  }
  reply.epoch = group_->epoch();
  return reply;
}

void EngineCore::RemoveSequence(Sequence& sequence, const Status& why) {
  while (!sequence.open_appends.empty()) LoseAppend(sequence.open_appends.begin()->first, why);
  sequence.FreeAll(pool_);
  sequences_.Remove(sequence);
  PublishCounters();
}

SequenceInfo EngineCore::InfoOf(const Sequence& sequence) const {
  SequenceInfo info{.id = sequence.id,
                    .generation = sequence.generation,
                    .max_step_id = sequence.MaxStepId(),
                    .blocks = static_cast<std::int64_t>(sequence.table.size()),
                    .open_appends = static_cast<int>(sequence.open_appends.size()),
                    .epoch = group_->epoch()};
  for (const LayerState& layer : sequence.layers) info.layer_lengths.push_back(layer.length);
  info.shared_blocks =
      std::ranges::count_if(sequence.table, [this](BlockId b) { return pool_.refs(b) > 1; });
  if (sequence.origin.lease) {
    info.lease_remaining =
        std::max(Millis(0), std::chrono::duration_cast<Millis>(sequence.lease_end - Clock::now()));
  }
  return info;
}

Result<SequenceInfo> EngineCore::Get(const GetSequenceRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  const Sequence* any = sequences_.FindId(request.id);
  const std::uint64_t present = any == nullptr ? 0 : any->generation;
  DCP_ASSIGN_OR_RETURN(const Sequence* sequence,
                       sequences_.Find({request.id, request.generation.value_or(present)}));
  return InfoOf(*sequence);
}

Result<ListReply> EngineCore::List(const ListRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  if (request.page_size < 0 || request.page_size > kMaxPage) {
    return Status(Reason::kPage, "page_size is " + std::to_string(request.page_size) +
                                     ", expected 0 to " + std::to_string(kMaxPage));
  }
  if (!request.page_token.empty() && !IsId(request.page_token)) {
    return Status(Reason::kPage, "page_token is not one that this server gave");
  }
  const std::size_t page =
      static_cast<std::size_t>(request.page_size == 0 ? kDefaultPage : request.page_size);
  ListReply reply{.epoch = group_->epoch()};
  sequences_.ForEachAfter(request.page_token, [&](const Sequence& sequence) {
    if (reply.sequences.size() == page) {
      reply.next_page_token = reply.sequences.back().id;
      return false;
    }
    reply.sequences.push_back(InfoOf(sequence));
    return true;
  });
  return reply;
}

// What can be said of a step without looking at a sequence. Sets plan_.tokens.
Status EngineCore::CheckStepShape(const StepRequest& request) {
  const LimitsConfig& limits = config_->limits;
  const ModelConfig& model = config_->model;
  if (request.layer < 0 || request.layer >= model.layers) {
    return Status(Reason::kLayer, "layer is " + std::to_string(request.layer) + ", expected 0 to " +
                                      std::to_string(model.layers - 1));
  }
  const std::size_t batch = request.entries.size();
  if (batch == 0 || batch > static_cast<std::size_t>(limits.max_batch)) {
    return Status(Reason::kBatchSize, "the step has " + std::to_string(batch) +
                                          " entries, expected 1 to " +
                                          std::to_string(limits.max_batch));
  }
  std::int64_t tokens = 0;
  for (const StepEntry& e : request.entries) {
    if (e.count < 1 || e.count > limits.max_query_tokens) {
      return Status(Reason::kTokenCount, "count is " + std::to_string(e.count) +
                                             ", expected 1 to " +
                                             std::to_string(limits.max_query_tokens));
    }
    DCP_RETURN_IF_ERROR(CheckPosition("start", e.start));
    if (e.rewind && !request.new_kv) {
      return Status(Reason::kPosition, "rewind is set in a step without new_kv");
    }
    tokens += e.count;
  }
  if (tokens > limits.max_step_tokens) {
    return Status(Reason::kTokenCount, "the step has " + std::to_string(tokens) +
                                           " tokens, expected at most " +
                                           std::to_string(limits.max_step_tokens));
  }
  if (!request.output_dtype) {
    return Status(Reason::kDtype, "output_dtype is required: bf16 or fp32");
  }
  if (request.new_kv && request.step_id == 0) {
    return Status(Reason::kStepId, "a step with new_kv needs step_id > 0");
  }
  const std::array<std::int64_t, 3> query_shape{tokens, model.heads, model.d_qk()};
  DCP_RETURN_IF_ERROR(CheckTensor("query", request.query, DType::kBf16, query_shape));
  if (request.new_kv) {
    const std::array<std::int64_t, 2> kv_shape{tokens, model.d_qk()};
    DCP_RETURN_IF_ERROR(CheckTensor("new_kv", *request.new_kv, DType::kBf16, kv_shape));
  }
  plan_.tokens = tokens;
  return Status::Ok();
}

// Judges the whole step before any rank or sequence is touched; fills plan_.
Status EngineCore::PlanStep(const StepRequest& request) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  DCP_RETURN_IF_ERROR(CheckStepShape(request));
  plan_.layer = request.layer;
  plan_.step_id = request.step_id;
  plan_.entries.resize(request.entries.size());
  std::vector<const Sequence*> seen;
  seen.reserve(request.entries.size());
  for (std::size_t i = 0; i < request.entries.size(); ++i) {
    const StepEntry& e = request.entries[i];
    DCP_ASSIGN_OR_RETURN(Sequence * sequence, sequences_.Find(e.sequence));
    seen.push_back(sequence);
    const LayerState& layer = sequence->layers[static_cast<std::size_t>(request.layer)];
    const std::string name = LayerName(sequence->id, request.layer);
    Verdict verdict = Verdict::kRead;
    if (request.new_kv) {
      DCP_ASSIGN_OR_RETURN(
          verdict,
          JudgeWrite(
              layer,
              {.step_id = request.step_id, .start = e.start, .count = e.count, .rewind = e.rewind},
              config_->limits.max_context, name));
    } else {
      DCP_RETURN_IF_ERROR(JudgeRead(layer, e.start, e.count, name));
    }
    plan_.entries[i] = {
        .sequence = sequence, .verdict = verdict, .start = e.start, .count = e.count};
  }
  std::ranges::sort(seen);
  if (const auto twice = std::ranges::adjacent_find(seen); twice != seen.end()) {
    return Status(Reason::kDuplicateSequence,
                  "sequence \"" + (*twice)->id + "\" appears more than once in the step");
  }
  return Status::Ok();
}

StepOutcome EngineCore::RunRanks(const std::shared_ptr<StepBuffers>& buffers) {
  StepOutcome outcome = group_->Run(buffers);
  // A stuck rank may still read the request's bytes: they stay with the buffers until it is back.
  if (!group_->down()) buffers->keepalive.reset();
  if (!outcome.status.ok()) {
    ++counters_.rank_failures;
    PublishCounters();  // the epoch may be new
  }
  return outcome;
}

// A replay's latents are compared before the step runs, so that a mismatch leaves no trace.
Status EngineCore::CompareReplays(const StepRequest& request) {
  const auto buffers = group_->Buffers();
  buffers->new_kv = request.new_kv->bytes;
  buffers->query = {};
  buffers->keepalive = request.keepalive;
  buffers->output.clear();
  buffers->lse.clear();
  WriteMessage(plan_, shards_, {.mode = RankMode::kCompare}, *buffers);
  const StepOutcome outcome = RunRanks(buffers);
  DCP_RETURN_IF_ERROR(outcome.status);
  if (outcome.mismatch_token < 0) return Status::Ok();
  std::int64_t token = outcome.mismatch_token;
  for (const PlannedEntry& e : plan_.entries) {
    if (token < e.count) {
      return Status(Reason::kReplayMismatch,
                    LayerName(e.sequence->id, request.layer) + ": the latent of position " +
                        std::to_string(e.start + token) + " differs from the one applied by step " +
                        std::to_string(request.step_id));
    }
    token -= e.count;
  }
  return Status(Reason::kInternal, "a rank reported a token outside the step");
}

Result<StepReply> EngineCore::Step(const StepRequest& request) {
  const TimePoint begin = Clock::now();
  DCP_RETURN_IF_ERROR(PlanStep(request));
  if (plan_.HasVerdict(Verdict::kReplay)) DCP_RETURN_IF_ERROR(CompareReplays(request));
  DCP_RETURN_IF_ERROR(plan_.Reserve(shards_, pool_));

  const ModelConfig& model = config_->model;
  const auto buffers = group_->Buffers();
  buffers->query = request.query.bytes;
  buffers->new_kv = request.new_kv ? request.new_kv->bytes : ConstBytes{};
  buffers->keepalive = request.keepalive;
  const std::size_t rows = static_cast<std::size_t>(plan_.tokens * model.heads);
  buffers->output.resize(rows * static_cast<std::size_t>(model.kv_lora_rank) *
                         SizeOf(*request.output_dtype));
  buffers->lse.resize(request.lse_base ? rows : 0);
  WriteMessage(plan_, shards_,
               {.mode = RankMode::kAttend,
                .output_dtype = *request.output_dtype,
                .return_lse = request.lse_base.has_value(),
                .lse_base = request.lse_base.value_or(LogBase::kE)},
               *buffers);
  plan_.BeginRewinds();
  const TimePoint launch = Clock::now();
  const StepOutcome outcome = RunRanks(buffers);
  if (!outcome.status.ok()) {
    plan_.Drop(shards_, pool_);
    PublishCounters();
    return outcome.status;
  }
  counters_.cow_blocks += plan_.CowBlocks();
  counters_.faulty_rows += outcome.faulty_rows;
  plan_.Commit(shards_, pool_);
  PublishCounters();
  return StepReply{.output = std::move(buffers->output),
                   .lse = std::move(buffers->lse),
                   .faulty_rows = outcome.faulty_rows,
                   .timing = {.plan = launch - begin,
                              .write = outcome.write,
                              .attend = outcome.attend,
                              .exchange = outcome.exchange,
                              .merge = outcome.merge},
                   .epoch = group_->epoch()};
}

}  // namespace dcp
