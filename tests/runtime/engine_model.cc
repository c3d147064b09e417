#include "tests/runtime/engine_model.h"

#include <algorithm>
#include <cstring>

namespace dcp::testing {
namespace {

// Wrong dtype, then wrong dims, then wrong size.
Reason JudgeTensor(const TensorView& t, const std::vector<std::int64_t>& dims) {
  if (t.dtype != DType::kBf16) return Reason::kDtype;
  if (std::vector<std::int64_t>(t.shape.begin(), t.shape.end()) != dims) return Reason::kShape;
  long double bytes = 2;  // exact far beyond what a test sends
  for (const std::int64_t d : dims) bytes *= static_cast<long double>(d);
  return bytes == static_cast<long double>(t.bytes.size()) ? Reason::kNone : Reason::kByteSize;
}

std::string Text(const std::optional<Millis>& lease) {
  return lease ? std::to_string(lease->count()) : "none";
}

}  // namespace

bool GoodId(const std::string& id) {
  static const std::string kAllowed =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/-";
  return !id.empty() && id.size() <= 128 && id.find_first_not_of(kAllowed) == std::string::npos;
}

bool GoodRequestId(const std::string& id) {
  if (id.empty() || id.size() > 128) return false;
  for (const char c : id) {
    if (c < ' ' || c > '~') return false;
  }
  return true;
}

bool GoodLease(const std::optional<Millis>& lease) {
  return !lease || (lease->count() >= 100 && lease->count() <= 86400000);
}

std::int64_t ModelSequence::Shortest() const {
  std::int64_t n = layers[0].length();
  for (const ModelLayer& l : layers) n = std::min(n, l.length());
  return n;
}

std::int64_t ModelSequence::Longest() const {
  std::int64_t n = 0;
  for (const ModelLayer& l : layers) n = std::max(n, l.length());
  return n;
}

std::uint64_t ModelSequence::NewestStep() const {
  std::uint64_t n = 0;
  for (const ModelLayer& l : layers) n = std::max(n, l.step_id);
  return n;
}

std::int64_t ModelAppend::Missing() const {
  std::int64_t n = 0;
  for (const auto& layer : sent) n += std::count(layer.begin(), layer.end(), std::nullopt);
  return n;
}

EngineModel::EngineModel(const EngineConfig& config, std::uint64_t epoch)
    : config_(config),
      block_tokens_(static_cast<std::int64_t>(config.kv.page_tokens) * config.ranks.count),
      epoch_(epoch) {}

const ModelSequence* EngineModel::Find(const std::string& id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : &it->second;
}

Reason EngineModel::FindRef(const SequenceRef& ref, ModelSequence*& sequence) {
  const auto it = sequences_.find(ref.id);
  if (it == sequences_.end()) return Reason::kSequenceNotFound;
  if (it->second.generation != ref.generation) return Reason::kSequenceGeneration;
  sequence = &it->second;
  return Reason::kNone;
}

// ---- Sequences ----

Reason EngineModel::Create(const CreateRequest& r) {
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  if (!GoodId(r.id)) return Reason::kSequenceId;
  if (!GoodRequestId(r.request_id)) return Reason::kRequestId;
  if (r.softmax_scale != config_.model.softmax_scale) return Reason::kGeometry;
  if (!GoodLease(r.lease)) return Reason::kLease;
  const std::string made_by = "create " + r.request_id + " lease " + Text(r.lease);
  if (const ModelSequence* old = Find(r.id)) {
    return old->made_by == made_by ? Reason::kNone : Reason::kSequenceExists;
  }
  if (sequences_.size() == static_cast<std::size_t>(config_.limits.max_sequences)) {
    return Reason::kSequenceLimit;
  }
  ModelSequence& s = sequences_[r.id];
  s.id = r.id;
  s.made_by = made_by;
  s.leased = r.lease.has_value();
  s.layers.resize(static_cast<std::size_t>(config_.model.layers));
  return Reason::kNone;
}

Reason EngineModel::Fork(const ForkRequest& r) {
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  if (!GoodId(r.id)) return Reason::kSequenceId;
  if (!GoodRequestId(r.request_id)) return Reason::kRequestId;
  if (!GoodLease(r.lease)) return Reason::kLease;
  if (r.at_length < 0) return Reason::kPosition;
  const std::string made_by = "fork " + r.request_id + " of " + r.parent.id + "#" +
                              std::to_string(r.parent.generation) + " at " +
                              std::to_string(r.at_length) + " lease " + Text(r.lease);
  if (const ModelSequence* old = Find(r.id)) {
    return old->made_by == made_by ? Reason::kNone : Reason::kSequenceExists;
  }
  ModelSequence* parent = nullptr;
  if (const Reason why = FindRef(r.parent, parent); why != Reason::kNone) return why;
  if (r.at_length > parent->Shortest()) return Reason::kIncompleteToken;
  if (sequences_.size() == static_cast<std::size_t>(config_.limits.max_sequences)) {
    return Reason::kSequenceLimit;
  }
  ModelSequence& child = sequences_[r.id];  // leaves `parent` where it is
  child.id = r.id;
  child.made_by = made_by;
  child.leased = r.lease.has_value();
  for (const ModelLayer& l : parent->layers) {
    ModelLayer& mine = child.layers.emplace_back();
    mine.tokens.assign(l.tokens.begin(), l.tokens.begin() + r.at_length);
  }
  if (r.at_length > 0) {
    child.blocks.assign(parent->blocks.begin(),
                        parent->blocks.begin() + BlockOf(r.at_length - 1) + 1);
  }
  return Reason::kNone;
}

Reason EngineModel::Truncate(const TruncateRequest& r) {
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  if (r.to_length < 0) return Reason::kPosition;
  ModelSequence* s = nullptr;
  if (const Reason why = FindRef(r.sequence, s); why != Reason::kNone) return why;
  if (r.step_id == 0) return Reason::kStepId;
  const std::uint64_t newest = s->NewestStep();
  if (r.step_id < newest) return Reason::kStaleStep;
  if (r.step_id == newest) {
    for (const ModelLayer& l : s->layers) {
      if (l.step_id != newest || l.count != 0 || l.start != r.to_length) {
        return Reason::kReplayMismatch;
      }
    }
    return Reason::kNone;
  }
  if (!s->appends.empty()) return Reason::kAppendOpen;
  for (ModelLayer& l : s->layers) {
    if (l.length() > r.to_length) l.tokens.resize(static_cast<std::size_t>(r.to_length));
    l.step_id = r.step_id;
    l.start = r.to_length;
    l.count = 0;
  }
  Trim(*s);
  return Reason::kNone;
}

Reason EngineModel::Release(const ReleaseRequest& r, int& released) {
  released = 0;
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  for (const SequenceRef& ref : r.sequences) {
    ModelSequence* s = nullptr;
    if (FindRef(ref, s) != Reason::kNone) continue;
    Remove(ref.id, Reason::kAppendCancelled);
    ++released;
  }
  return Reason::kNone;
}

void EngineModel::Remove(const std::string& id, Reason why) {
  for (const AppendId append : std::set<AppendId>(sequences_.at(id).appends)) {
    EndAppend(append);
    lost_.emplace_back(append, why);
  }
  sequences_.erase(id);
}

Reason EngineModel::Get(const GetSequenceRequest& r) const {
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  const ModelSequence* s = Find(r.id);
  if (s == nullptr) return Reason::kSequenceNotFound;
  if (r.generation && *r.generation != s->generation) return Reason::kSequenceGeneration;
  return Reason::kNone;
}

Reason EngineModel::List(const ListRequest& r, std::vector<std::string>& ids,
                         std::string& next_page_token) const {
  ids.clear();
  next_page_token.clear();
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  if (r.page_size < 0 || r.page_size > 1000) return Reason::kPage;
  if (!r.page_token.empty() && !GoodId(r.page_token)) return Reason::kPage;
  const std::size_t page = r.page_size == 0 ? 100 : static_cast<std::size_t>(r.page_size);
  std::vector<std::string> rest;
  for (const auto& [id, s] : sequences_) {
    if (id > r.page_token) rest.push_back(id);
  }
  ids.assign(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(std::min(page, rest.size())));
  if (rest.size() > page) next_page_token = ids.back();
  return Reason::kNone;
}

// ---- Writes ----

Reason EngineModel::JudgeWrite(const ModelLayer& l, std::uint64_t step_id, std::int64_t start,
                               std::int64_t count, bool rewind, Write& write) const {
  if (step_id == 0) return Reason::kStepId;
  if (step_id < l.step_id) return Reason::kStaleStep;
  if (step_id == l.step_id) {
    if (start != l.start || count != l.count) return Reason::kReplayMismatch;
    // A later rewind that failed has taken its tokens.
    if (start + count > l.length()) return Reason::kLengthConflict;
    write = Write::kReplay;
    return Reason::kNone;
  }
  if (l.open_append != 0) return Reason::kAppendOpen;
  if (start > l.length()) return Reason::kPositionGap;
  if (start < l.length() && !rewind) return Reason::kLengthConflict;
  if (count > config_.limits.max_context || start + count > config_.limits.max_context) {
    return Reason::kContextLimit;
  }
  write = start == l.length() ? Write::kAppend : Write::kRewind;
  return Reason::kNone;
}

EngineModel::Claim EngineModel::ClaimFor(ModelSequence& s, std::int64_t start,
                                         std::int64_t count) const {
  Claim claim{.sequence = &s};
  for (std::int64_t b = BlockOf(start); b <= BlockOf(start + count - 1); ++b) {
    if (b >= static_cast<std::int64_t>(s.blocks.size())) {
      ++claim.added;
    } else if (!s.append_copies.contains(b) &&
               s.blocks[static_cast<std::size_t>(b)].use_count() > 1) {
      claim.copied.push_back(b);
    }
  }
  return claim;
}

// Gives back the blocks beyond every layer and every open append, and copies nobody needs.
void EngineModel::Trim(ModelSequence& s) {
  std::int64_t reach = s.Longest();
  std::set<std::int64_t> written;
  for (const AppendId id : s.appends) {
    const ModelAppend& a = appends_.at(id);
    if (a.replay) continue;
    reach = std::max(reach, a.request.start + a.request.count);
    for (std::int64_t p = a.request.start; p < a.request.start + a.request.count; ++p) {
      written.insert(BlockOf(p));
    }
  }
  while (static_cast<std::int64_t>(s.blocks.size()) * block_tokens_ >= reach + block_tokens_) {
    s.blocks.pop_back();
  }
  std::erase_if(s.append_copies, [&](const auto& item) { return !written.contains(item.first); });
}

bool EngineModel::RanksRun(bool attends) {
  if (!fault_ || (!attends && *fault_ != RankPhase::kWrite)) return true;
  fault_.reset();
  epoch_ends_ = true;
  ++counts_.rank_failures;
  return false;
}

// ---- Steps ----

Reason EngineModel::Step(const StepCase& step) {
  const auto& timeout = step.request.timeout;
  if (timeout && (timeout->count() <= 0 || *timeout > config_.limits.max_step_timeout)) {
    return Reason::kTimeout;  // never became a step
  }
  const Reason why = StepUncounted(step);
  ++(why == Reason::kNone ? counts_.steps : counts_.failed_steps);
  return why;
}

Reason EngineModel::CheckShape(const StepRequest& r) const {
  const LimitsConfig& limits = config_.limits;
  if (r.layer < 0 || r.layer >= config_.model.layers) return Reason::kLayer;
  if (r.entries.empty() || r.entries.size() > static_cast<std::size_t>(limits.max_batch)) {
    return Reason::kBatchSize;
  }
  std::int64_t tokens = 0;
  for (const StepEntry& e : r.entries) {
    if (e.count < 1 || e.count > limits.max_query_tokens) return Reason::kTokenCount;
    if (e.start < 0) return Reason::kPosition;
    if (e.rewind && !r.new_kv) return Reason::kPosition;
    tokens += e.count;
  }
  if (tokens > limits.max_step_tokens) return Reason::kTokenCount;
  if (!r.output_dtype) return Reason::kDtype;
  if (r.new_kv && r.step_id == 0) return Reason::kStepId;
  const std::int64_t d_qk = config_.model.kv_lora_rank + config_.model.rope_dim;
  if (const Reason why = JudgeTensor(r.query, {tokens, config_.model.heads, d_qk});
      why != Reason::kNone) {
    return why;
  }
  return r.new_kv ? JudgeTensor(*r.new_kv, {tokens, d_qk}) : Reason::kNone;
}

Reason EngineModel::StepUncounted(const StepCase& step) {
  const StepRequest& r = step.request;
  if (step.cancelled) return Reason::kCancelled;
  if (step.expired) return Reason::kStepDeadline;
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  if (const Reason why = CheckShape(r); why != Reason::kNone) return why;

  std::vector<Entry> entries;
  std::set<std::string> names;
  std::size_t key = 0;
  for (const StepEntry& e : r.entries) {
    Entry entry{.sequence = nullptr, .start = e.start, .count = e.count, .first_key = key};
    key += static_cast<std::size_t>(e.count);
    if (const Reason why = FindRef(e.sequence, entry.sequence); why != Reason::kNone) return why;
    const ModelLayer& l = entry.sequence->layers[static_cast<std::size_t>(r.layer)];
    if (r.new_kv) {
      Write write{};
      if (const Reason why = JudgeWrite(l, r.step_id, e.start, e.count, e.rewind, write);
          why != Reason::kNone) {
        return why;
      }
      entry.write = write;
    } else if (e.start > l.length() - e.count) {
      return Reason::kReadRange;
    }
    names.insert(e.sequence.id);
    entries.push_back(entry);
  }
  if (names.size() != entries.size()) return Reason::kDuplicateSequence;

  const auto layer_of = [&](const Entry& e) -> ModelLayer& {
    return e.sequence->layers[static_cast<std::size_t>(r.layer)];
  };
  // Replays are compared before anything changes.
  bool any_replay = false, differs = false;
  for (const Entry& e : entries) {
    if (e.write != Write::kReplay) continue;
    any_replay = true;
    for (std::int64_t j = 0; j < e.count; ++j) {
      differs = differs || !(layer_of(e).tokens[static_cast<std::size_t>(e.start + j)] ==
                             step.keys[e.first_key + static_cast<std::size_t>(j)]);
    }
  }
  if (any_replay && !RanksRun(/*attends=*/false)) return Reason::kRankFailed;
  if (differs) return Reason::kReplayMismatch;

  // A block with two owners is copied for each that writes into it, even when both do.
  std::vector<Claim> claims;
  std::int64_t needed = 0;
  for (const Entry& e : entries) {
    if (e.write != Write::kAppend && e.write != Write::kRewind) continue;
    claims.push_back(ClaimFor(*e.sequence, e.start, e.count));
    needed += claims.back().Blocks();
  }
  if (needed > free_blocks()) return Reason::kKvCapacity;

  for (const Entry& e : entries) {  // holds from launch on, also when the step fails
    if (e.write == Write::kRewind) layer_of(e).tokens.resize(static_cast<std::size_t>(e.start));
  }
  if (!RanksRun(/*attends=*/true)) {
    for (const Entry& e : entries) {
      if (e.write == Write::kRewind) Trim(*e.sequence);
    }
    return Reason::kRankFailed;
  }
  for (const Claim& claim : claims) {
    for (const std::int64_t b : claim.copied) {
      claim.sequence->blocks[static_cast<std::size_t>(b)] = NewBlock();
      ++counts_.cow_blocks;
    }
    for (std::int64_t i = 0; i < claim.added; ++i) claim.sequence->blocks.push_back(NewBlock());
  }
  for (const Entry& e : entries) {
    if (e.write != Write::kAppend && e.write != Write::kRewind) continue;
    ModelSequence& s = *e.sequence;
    for (std::int64_t b = BlockOf(e.start); b <= BlockOf(e.start + e.count - 1); ++b) {
      const auto copy = s.append_copies.find(b);
      if (copy == s.append_copies.end()) continue;
      s.blocks[static_cast<std::size_t>(b)] = copy->second;
      s.append_copies.erase(copy);
    }
    ModelLayer& l = layer_of(e);
    for (std::int64_t j = 0; j < e.count; ++j) {
      l.tokens.push_back(step.keys[e.first_key + static_cast<std::size_t>(j)]);
    }
    l.step_id = r.step_id;
    l.start = e.start;
    l.count = e.count;
    if (e.write == Write::kRewind) Trim(s);
  }
  return Reason::kNone;
}

// ---- AppendKv ----

Reason EngineModel::BeginAppend(const AppendRequest& r) {
  if (WrongEpoch(r.expected_epoch)) return Reason::kEpochChanged;
  const std::int64_t first = r.layer_begin, after = first + r.layer_count;
  if (first < 0 || r.layer_count < 1 || after > config_.model.layers) return Reason::kLayer;
  if (r.count < 1) return Reason::kTokenCount;
  if (r.start < 0) return Reason::kPosition;
  ModelSequence* s = nullptr;
  if (const Reason why = FindRef(r.sequence, s); why != Reason::kNone) return why;
  std::optional<Write> all;
  for (std::int64_t layer = first; layer < after; ++layer) {
    Write write{};
    if (const Reason why = JudgeWrite(s->layers[static_cast<std::size_t>(layer)], r.step_id,
                                      r.start, r.count, false, write);
        why != Reason::kNone) {
      return why;
    }
    if (all && *all != write) return Reason::kReplayMismatch;  // applied to a part of the range
    all = write;
  }
  if (appends_.size() == static_cast<std::size_t>(config_.limits.max_open_appends)) {
    return Reason::kOverloaded;
  }
  const bool replay = *all == Write::kReplay;
  if (!replay) {
    const Claim claim = ClaimFor(*s, r.start, r.count);
    if (claim.Blocks() > free_blocks()) return Reason::kKvCapacity;
    if (!claim.copied.empty()) {
      if (!RanksRun(/*attends=*/false)) return Reason::kRankFailed;
      counts_.cow_blocks += static_cast<std::int64_t>(claim.copied.size());
    }
    // A copy that another append made would be written by both: it is the sequence's from now on.
    for (std::int64_t b = BlockOf(r.start); b <= BlockOf(r.start + r.count - 1); ++b) {
      if (const auto copy = s->append_copies.find(b); copy != s->append_copies.end()) {
        s->blocks[static_cast<std::size_t>(b)] = copy->second;
        s->append_copies.erase(copy);
      }
    }
    for (const std::int64_t b : claim.copied) s->append_copies[b] = NewBlock();
    for (std::int64_t i = 0; i < claim.added; ++i) s->blocks.push_back(NewBlock());
  }
  beginning_ = ModelAppend{.sequence = s->id, .request = r, .replay = replay};
  beginning_->sent.assign(static_cast<std::size_t>(r.layer_count),
                          std::vector<std::optional<TokenKey>>(static_cast<std::size_t>(r.count)));
  return Reason::kNone;
}

std::string EngineModel::LearnAppend(AppendId id) {
  if (id <= last_append_) return "append number " + std::to_string(id) + " is not new";
  last_append_ = id;
  const ModelAppend& a = appends_[id] = *std::exchange(beginning_, std::nullopt);
  ModelSequence& s = sequences_.at(a.sequence);
  s.appends.insert(id);
  if (!a.replay) {
    for (std::int32_t i = 0; i < a.request.layer_count; ++i) {
      s.layers[static_cast<std::size_t>(a.request.layer_begin + i)].open_append = id;
    }
  }
  return "";
}

void EngineModel::EndAppend(AppendId id) {
  ModelSequence& s = sequences_.at(appends_.at(id).sequence);
  s.appends.erase(id);
  appends_.erase(id);
  for (ModelLayer& l : s.layers) {
    if (l.open_append == id) l.open_append = 0;
  }
  Trim(s);
}

// A replay is one only as long as it is still the last write of each of its layers.
Reason EngineModel::JudgeOvertaken(const ModelAppend& a) const {
  if (!a.replay) return Reason::kNone;
  const AppendRequest& r = a.request;
  for (std::int32_t i = 0; i < r.layer_count; ++i) {
    const ModelLayer& l =
        sequences_.at(a.sequence).layers[static_cast<std::size_t>(r.layer_begin + i)];
    Write write{};
    if (const Reason why = JudgeWrite(l, r.step_id, r.start, r.count, false, write);
        why != Reason::kNone) {
      return why;
    }
  }
  return Reason::kNone;
}

Reason EngineModel::WriteAppend(const ChunkCase& c) {
  const auto it = appends_.find(c.append);
  if (it == appends_.end()) return Reason::kAppendCancelled;
  ModelAppend& a = it->second;
  const AppendRequest& r = a.request;
  const auto judge = [&]() -> Reason {
    const std::int64_t layer = std::int64_t{c.chunk.layer} - r.layer_begin;
    if (layer < 0 || layer >= r.layer_count) return Reason::kLayer;
    const auto& shape = c.chunk.latents.shape;
    const std::int64_t n = shape.empty() || shape[0] < 1 ? 1 : shape[0];
    const std::int64_t d_qk = config_.model.kv_lora_rank + config_.model.rope_dim;
    if (const Reason why = JudgeTensor(c.chunk.latents, {n, d_qk}); why != Reason::kNone) {
      return why;
    }
    const std::int64_t offset = c.chunk.offset;
    if (offset < 0 || n > r.count || offset > r.count - n) return Reason::kCoverage;
    auto& sent = a.sent[static_cast<std::size_t>(layer)];
    for (std::int64_t j = offset; j < offset + n; ++j) {
      if (sent[static_cast<std::size_t>(j)]) return Reason::kCoverage;
    }
    if (const Reason why = JudgeOvertaken(a); why != Reason::kNone) return why;
    const ModelLayer& l = sequences_.at(a.sequence).layers[static_cast<std::size_t>(c.chunk.layer)];
    if (!RanksRun(/*attends=*/false)) return Reason::kRankFailed;
    for (std::int64_t j = 0; j < n; ++j) {
      const TokenKey& key = c.keys[static_cast<std::size_t>(j)];
      if (a.replay && !(l.tokens[static_cast<std::size_t>(r.start + offset + j)] == key)) {
        return Reason::kReplayMismatch;
      }
      sent[static_cast<std::size_t>(offset + j)] = key;
    }
    return Reason::kNone;
  };
  const Reason why = judge();
  if (why != Reason::kNone) EndAppend(c.append);
  return why;
}

Reason EngineModel::CommitAppend(AppendId id, AppendReply& reply) {
  const auto it = appends_.find(id);
  if (it == appends_.end()) return Reason::kAppendCancelled;
  const ModelAppend a = it->second;
  const AppendRequest& r = a.request;
  ModelSequence& s = sequences_.at(a.sequence);
  const auto judge = [&]() -> Reason {
    return a.Missing() > 0 ? Reason::kCoverage : JudgeOvertaken(a);
  };
  const Reason why = judge();
  if (why == Reason::kNone) {
    reply = {.length = r.start + r.count, .replayed = a.replay, .epoch = epoch_};
    if (!a.replay) {
      for (std::int64_t b = BlockOf(r.start); b <= BlockOf(r.start + r.count - 1); ++b) {
        if (const auto copy = s.append_copies.find(b); copy != s.append_copies.end()) {
          s.blocks[static_cast<std::size_t>(b)] = copy->second;
          s.append_copies.erase(copy);
        }
      }
      for (std::int32_t i = 0; i < r.layer_count; ++i) {
        ModelLayer& l = s.layers[static_cast<std::size_t>(r.layer_begin + i)];
        for (const auto& key : a.sent[static_cast<std::size_t>(i)]) l.tokens.push_back(*key);
        l.step_id = r.step_id;
        l.start = r.start;
        l.count = r.count;
      }
    }
  }
  EndAppend(id);
  return why;
}

void EngineModel::CancelAppend(AppendId id) {
  if (appends_.contains(id)) EndAppend(id);
}

void EngineModel::LoseAppends(Reason why) {
  while (!appends_.empty()) {
    lost_.emplace_back(appends_.begin()->first, why);
    EndAppend(appends_.begin()->first);
  }
}

// ---- What the engine tells ----

std::string EngineModel::LearnGeneration(const std::string& id, std::uint64_t generation) {
  ModelSequence& s = sequences_.at(id);
  if (s.generation == 0) {
    if (generation <= last_generation_) {
      return "generation " + std::to_string(generation) + " is not new";
    }
    s.generation = last_generation_ = generation;
  }
  return s.generation == generation ? ""
                                    : "generation " + std::to_string(generation) + ", expected " +
                                          std::to_string(s.generation);
}

std::string EngineModel::LearnEpoch(std::uint64_t epoch) {
  if (epoch_ends_) {
    if (epoch <= epoch_) return "the epoch is not new after a rank failure";
    epoch_ = epoch;
    epoch_ends_ = false;
  }
  return epoch == epoch_
             ? ""
             : "epoch " + std::to_string(epoch) + ", expected " + std::to_string(epoch_);
}

SequenceInfo EngineModel::InfoOf(const ModelSequence& s) const {
  SequenceInfo info{.id = s.id,
                    .generation = s.generation,
                    .max_step_id = s.NewestStep(),
                    .blocks = static_cast<std::int64_t>(s.blocks.size()),
                    .open_appends = static_cast<int>(s.appends.size()),
                    .epoch = epoch_};
  for (const ModelLayer& l : s.layers) info.layer_lengths.push_back(l.length());
  for (const BlockRef& b : s.blocks) info.shared_blocks += b.use_count() > 1 ? 1 : 0;
  if (s.leased) info.lease_remaining = Millis(0);
  return info;
}

LoadInfo EngineModel::Load() const {
  LoadInfo load = counts_;
  load.sequences = static_cast<int>(sequences_.size());
  load.open_appends = static_cast<int>(appends_.size());
  load.total_blocks = config_.kv.blocks;
  load.free_blocks = free_blocks();
  load.epoch = epoch_;
  return load;
}

}  // namespace dcp::testing
