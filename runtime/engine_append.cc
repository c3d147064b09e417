// The open appends of an engine: prefill hand-off into reserved pages, committed at once.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "runtime/engine_core.h"

namespace dcp {

Result<Verdict> EngineCore::JudgeAppend(const Sequence& sequence,
                                        const AppendRequest& request) const {
  std::optional<Verdict> all;
  for (std::int32_t i = 0; i < request.layer_count; ++i) {
    const std::int32_t layer = request.layer_begin + i;
    const std::string name = "sequence \"" + sequence.id + "\" layer " + std::to_string(layer);
    DCP_ASSIGN_OR_RETURN(
        const Verdict verdict,
        JudgeWrite(sequence.layers[static_cast<std::size_t>(layer)],
                   {.step_id = request.step_id, .start = request.start, .count = request.count},
                   config_->limits.max_context, name));
    if (all && *all != verdict) {
      return Status(Reason::kReplayMismatch,
                    name + ": step_id " + std::to_string(request.step_id) +
                        " is applied to some layers of the range and not to others");
    }
    all = verdict;
  }
  return *all;
}

// Takes the blocks that an append will write: new ones at the table's end, and private copies of
// shared ones, which stay beside the table until they are needed in it.
Status EngineCore::StageBlocks(Sequence& sequence, const AppendRequest& request) {
  // A copy that another append has staged would be written by two: it becomes the table's now.
  const std::int64_t first = shards_.Block(GlobalPos(request.start));
  const std::int64_t last = shards_.Block(GlobalPos(request.start + request.count - 1));
  BlockChanges changes;
  std::vector<PageCopy> copies;
  DCP_RETURN_IF_ERROR(
      ReserveBlocks(sequence, request.start, request.count, shards_, pool_, changes, copies));
  if (!copies.empty()) {
    const auto buffers = group_->Buffers();
    buffers->new_kv = {};
    buffers->query = {};
    buffers->output.clear();
    buffers->lse.clear();
    WriteTokensMessage(RankMode::kWrite, request.layer_begin, request.start, 0, {}, copies, shards_,
                       *buffers);
    if (const StepOutcome outcome = RunRanks(buffers); !outcome.status.ok()) {
      DropBlocks(changes, pool_);
      PublishCounters();
      return outcome.status;
    }
    counters_.cow_blocks += static_cast<std::int64_t>(copies.size());
  }
  for (std::int64_t b = first; b <= last; ++b) sequence.AdoptStaged(b, pool_);
  for (const BlockChanges::Replace& r : changes.replaced) {
    if (!r.staged) sequence.staged.emplace(r.block, r.to);
  }
  sequence.table.insert(sequence.table.end(), changes.added.begin(), changes.added.end());
  return Status::Ok();
}

Result<AppendId> EngineCore::BeginAppend(const AppendRequest& request,
                                         std::function<void(Status)> on_lost) {
  DCP_RETURN_IF_ERROR(CheckEpoch(request.expected_epoch));
  const int layers = config_->model.layers;
  if (request.layer_begin < 0 || request.layer_count < 1 ||
      request.layer_count > layers - std::min(request.layer_begin, layers)) {
    return Status(Reason::kLayer, "layers [" + std::to_string(request.layer_begin) + ", +" +
                                      std::to_string(request.layer_count) +
                                      ") are not a range of the " + std::to_string(layers) +
                                      " layers");
  }
  if (request.count < 1) {
    return Status(Reason::kTokenCount,
                  "count is " + std::to_string(request.count) + ", expected at least 1");
  }
  if (request.start < 0) {
    return Status(Reason::kPosition,
                  "start is " + std::to_string(request.start) + ", expected at least 0");
  }
  DCP_ASSIGN_OR_RETURN(Sequence * sequence, sequences_.Find(request.sequence));
  DCP_ASSIGN_OR_RETURN(const Verdict verdict, JudgeAppend(*sequence, request));
  if (appends_.size() >= static_cast<std::size_t>(config_->limits.max_open_appends)) {
    return Status(Reason::kOverloaded,
                  "limits.max_open_appends = " + std::to_string(config_->limits.max_open_appends) +
                      " are open");
  }
  const bool replay = verdict == Verdict::kReplay;
  if (!replay) DCP_RETURN_IF_ERROR(StageBlocks(*sequence, request));

  const AppendId id = next_append_++;
  OpenAppend& append = appends_[id];
  append.sequence = sequence;
  append.request = request;
  append.replay = replay;
  append.covered.assign(static_cast<std::size_t>(request.layer_count),
                        std::vector<bool>(static_cast<std::size_t>(request.count)));
  append.missing = request.layer_count * request.count;
  append.last_activity = Clock::now();
  append.on_lost = std::move(on_lost);
  if (replay) {
    sequence->open_appends[id] = {0, 0};  // reserves nothing, but ends with the sequence
  } else {
    sequence->open_appends[id] = {request.start, request.start + request.count};
    for (std::int32_t i = 0; i < request.layer_count; ++i) {
      sequence->layers[static_cast<std::size_t>(request.layer_begin + i)].open_append = id;
    }
  }
  PublishCounters();
  return id;
}

Status EngineCore::WriteChunk(OpenAppend& append, const AppendChunk& chunk) {
  const AppendRequest& request = append.request;
  const std::int32_t index = chunk.layer - request.layer_begin;
  if (index < 0 || index >= request.layer_count) {
    return Status(Reason::kLayer,
                  "chunk layer is " + std::to_string(chunk.layer) + ", outside the append's range");
  }
  const std::int64_t n = chunk.latents.shape.empty() ? 0 : chunk.latents.shape[0];
  const std::array<std::int64_t, 2> shape{std::max<std::int64_t>(n, 1), config_->model.d_qk()};
  DCP_RETURN_IF_ERROR(CheckTensor("latents", chunk.latents, DType::kBf16, shape));
  if (chunk.offset < 0 || n > request.count || chunk.offset > request.count - n) {
    return Status(Reason::kCoverage, "chunk offset " + std::to_string(chunk.offset) + " with " +
                                         std::to_string(n) + " tokens is outside the append's " +
                                         std::to_string(request.count));
  }
  std::vector<bool>& covered = append.covered[static_cast<std::size_t>(index)];
  const auto begin = covered.begin() + chunk.offset;
  if (std::find(begin, begin + n, true) != begin + n) {
    return Status(Reason::kCoverage, "chunk offset " + std::to_string(chunk.offset) + " with " +
                                         std::to_string(n) + " tokens of layer " +
                                         std::to_string(chunk.layer) + " was sent before");
  }
  // A later write may have come between: then the tokens to compare with are no longer there.
  if (append.replay) DCP_RETURN_IF_ERROR(JudgeAppend(*append.sequence, request).status());
  const auto buffers = group_->Buffers();
  buffers->query = {};
  buffers->new_kv = chunk.latents.bytes;
  buffers->keepalive = chunk.keepalive;
  buffers->output.clear();
  buffers->lse.clear();
  WriteTokensMessage(
      append.replay ? RankMode::kCompare : RankMode::kWrite, chunk.layer,
      request.start + chunk.offset, n,
      [&append](std::int64_t b) { return append.sequence->WriteBlock(b); }, {}, shards_, *buffers);
  const StepOutcome outcome = RunRanks(buffers);
  DCP_RETURN_IF_ERROR(outcome.status);
  if (outcome.mismatch_token >= 0) {
    return Status(Reason::kReplayMismatch,
                  "the latent of layer " + std::to_string(chunk.layer) + " position " +
                      std::to_string(request.start + chunk.offset + outcome.mismatch_token) +
                      " differs from the one applied by step " + std::to_string(request.step_id));
  }
  std::fill(begin, begin + n, true);
  append.missing -= n;
  return Status::Ok();
}

namespace {
Status NotOpen(AppendId id) {
  return Status(Reason::kAppendCancelled, "append " + std::to_string(id) + " is not open");
}
}  // namespace

Result<AppendId> EngineCore::WriteAppend(AppendId id, const AppendChunk& chunk) {
  const auto it = appends_.find(id);
  if (it == appends_.end()) return NotOpen(id);
  DCP_RETURN_IF_ERROR(sequences_.Find(it->second.request.sequence).status());  // renews the lease
  if (Status status = WriteChunk(it->second, chunk); !status.ok()) {
    EndAppend(id);
    return status;
  }
  it->second.last_activity = Clock::now();  // after the ranks' work, which may be long
  return id;
}

Result<AppendReply> EngineCore::CommitAppend(AppendId id) {
  const auto it = appends_.find(id);
  if (it == appends_.end()) return NotOpen(id);
  const OpenAppend& append = it->second;
  const AppendRequest request = append.request;
  if (append.missing > 0) {
    const std::int64_t missing = append.missing;
    EndAppend(id);
    return Status(Reason::kCoverage, std::to_string(missing) + " of " +
                                         std::to_string(request.layer_count * request.count) +
                                         " (layer, token) pairs were not sent");
  }
  Sequence& sequence = *append.sequence;
  AppendReply reply{.length = request.start + request.count, .replayed = append.replay};
  if (append.replay) {
    if (Status status = JudgeAppend(sequence, request).status(); !status.ok()) {
      EndAppend(id);
      return status;
    }
  } else {
    for (std::int64_t b = shards_.Block(GlobalPos(request.start));
         b <= shards_.Block(GlobalPos(reply.length - 1)); ++b) {
      sequence.AdoptStaged(b, pool_);
    }
    for (std::int32_t i = 0; i < request.layer_count; ++i) {
      LayerState& layer = sequence.layers[static_cast<std::size_t>(request.layer_begin + i)];
      layer.length = reply.length;
      layer.step_id = request.step_id;
      layer.start = request.start;
      layer.count = request.count;
    }
  }
  EndAppend(id);
  reply.epoch = group_->epoch();
  return reply;
}

void EngineCore::CancelAppend(AppendId id) {
  if (appends_.contains(id)) EndAppend(id);
}

// Returns what the append holds and forgets it.
void EngineCore::EndAppend(AppendId id) {
  const auto it = appends_.find(id);
  Sequence& sequence = *it->second.sequence;
  sequence.open_appends.erase(id);
  for (LayerState& layer : sequence.layers) {
    if (layer.open_append == id) layer.open_append = 0;
  }
  sequence.Trim(shards_, pool_);
  appends_.erase(it);
  PublishCounters();
}

void EngineCore::LoseAppend(AppendId id, const Status& why) {
  const auto on_lost = std::move(appends_.at(id).on_lost);
  EndAppend(id);
  if (on_lost) on_lost(why);
}

void EngineCore::LoseAppends(const Status& why) {
  while (!appends_.empty()) LoseAppend(appends_.begin()->first, why);
}

void EngineCore::Expire(TimePoint now, const std::function<bool(AppendId)>& waits) {
  std::vector<AppendId> silent;
  for (auto& [id, append] : appends_) {
    if (now - append.last_activity <= config_->limits.append_idle_timeout) continue;
    if (waits(id)) {
      append.last_activity = now;
    } else {
      silent.push_back(id);
    }
  }
  for (const AppendId id : silent) {
    LoseAppend(id, Status(Reason::kAppendIdle,
                          "no chunk for " +
                              std::to_string(config_->limits.append_idle_timeout.count()) + " ms"));
  }
  if (sequences_.leased() == 0) return;
  std::vector<Sequence*> ended;
  sequences_.ForEachAfter("", [&](Sequence& sequence) {
    if (sequence.origin.lease && now > sequence.lease_end) ended.push_back(&sequence);
    return true;
  });
  for (Sequence* sequence : ended) {
    RemoveSequence(*sequence, Status(Reason::kAppendCancelled, "the sequence's lease ended"));
  }
}

}  // namespace dcp
