#include "client/dcpctl/replay/driver.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "client/cpp/tensor.h"

namespace dcp {
namespace {

constexpr Millis kIdle(100);
// The server answers within the item's timeout; beyond that it is dead.
constexpr Millis kTransport(10'000);

std::int64_t MicrosSince(TimePoint begin) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
}

Millis MaxStepTimeout(const v1::GetServerInfoResponse& info) {
  const auto& d = info.limits().max_step_timeout();
  const Millis limit(d.seconds() * 1000 + d.nanos() / 1'000'000);
  return limit > Millis(0) ? limit : Millis(60'000);
}

}  // namespace

Driver::Driver(Client& client, const Synthetic& synthetic, v1::DataType output_dtype,
               Admission& admission, ServerCalls& calls, Verifier& verifier, ReplayStats& stats,
               const std::atomic<bool>& stop, std::function<void(const DriverResult&)> progress)
    : client_(client),
      synthetic_(synthetic),
      output_dtype_(output_dtype),
      admission_(admission),
      calls_(calls),
      verifier_(verifier),
      stats_(stats),
      stop_(stop),
      progress_(std::move(progress)),
      item_timeout_(MaxStepTimeout(client.info())) {}

DriverResult Driver::Run() {
  while (!stop_) {
    for (auto& session : admission_.TakeReady(live_.empty() ? kIdle : Millis(0))) {
      live_.push_back(std::move(session));
    }
    if (live_.empty()) {
      if (admission_.Exhausted()) break;
    } else {
      Step();
    }
    progress_(result_);
  }
  admission_.End(std::exchange(live_, {}));
  if (stream_ != nullptr && !stop_) {
    const RpcError error = stream_->Finish(Clock::now() + kTransport);
    if (!error.ok()) stats_.Error("stream", error);
  }
  return std::move(result_);
}

void Driver::Step() {
  std::vector<Item> items = BuildItems(calls_.NextStepId());
  answered_.clear();
  const TimePoint begin = Clock::now();
  const RpcError error = Exchange(items);
  result_.step_us.push_back(MicrosSince(begin));
  if (!error.ok()) {
    stats_.Error("stream", error);
    stream_.reset();  // the next step opens a new one
    for (const auto& s : live_) s->failed = true;
  }
  for (AnsweredItem& item : answered_) verifier_.Push(std::move(item));
  for (const auto& s : live_) {
    if (s->failed) continue;
    if (s->decoded++ == 0) result_.first_token_us.push_back(MicrosSince(s->scheduled));
    ++result_.tokens;
  }
  EndFinished();
}

// As many tokens as the server's limits and a message allow.
std::size_t Driver::ChunkTokens() const {
  const v1::Limits& limits = client_.info().limits();
  const v1::ModelGeometry& model = client_.info().model();
  constexpr std::int64_t kEntryBytes = 256;  // an entry's ids and positions
  const std::int64_t d_qk = model.kv_lora_rank() + model.rope_dim();
  const std::int64_t query = 2 * d_qk * (model.heads() + 1) + kEntryBytes;
  const std::int64_t answer = (4LL * model.kv_lora_rank() + 4) * model.heads();
  const std::int64_t by_message = limits.max_message_bytes() / std::max(query, answer);
  return static_cast<std::size_t>(std::max<std::int64_t>(
      1, std::min<std::int64_t>({limits.max_batch(), limits.max_step_tokens(), by_message})));
}

std::vector<Driver::Item> Driver::BuildItems(std::uint64_t step_id) {
  std::vector<Item> items;
  const std::size_t chunk = ChunkTokens();
  for (int layer = 0; layer < client_.info().model().layers(); ++layer) {
    for (std::size_t begin = 0; begin < live_.size(); begin += chunk) {
      items.push_back(BuildItem(step_id, layer, begin, std::min(begin + chunk, live_.size())));
    }
  }
  return items;
}

Driver::Item Driver::BuildItem(std::uint64_t step_id, int layer, std::size_t begin,
                               std::size_t end) {
  const auto d_qk = static_cast<std::size_t>(synthetic_.geometry().d_qk);
  const auto heads = static_cast<std::size_t>(synthetic_.geometry().heads);
  const auto tokens = static_cast<std::int64_t>(end - begin);
  Item item;
  v1::DecodeStepRequest& request = item.request;
  request.set_step_id(step_id);
  request.set_layer(layer);
  request.set_tag(next_tag_++);
  request.set_output_dtype(output_dtype_);
  request.set_return_lse(true);
  request.set_lse_base(step_id % 2 == 0 ? v1::LSE_BASE_TWO : v1::LSE_BASE_E);
  request.mutable_timeout()->set_seconds(item_timeout_.count() / 1000);
  request.mutable_timeout()->set_nanos(static_cast<int>(item_timeout_.count() % 1000) * 1'000'000);
  const std::span<Bf16> query =
      MakeBf16(*request.mutable_query(),
               {tokens, static_cast<std::int64_t>(heads), static_cast<std::int64_t>(d_qk)});
  const std::span<Bf16> new_kv =
      MakeBf16(*request.mutable_new_kv(), {tokens, static_cast<std::int64_t>(d_qk)});
  for (std::size_t t = 0; t < end - begin; ++t) {
    Session& session = *live_[begin + t];
    v1::DecodeStepEntry& entry = *request.add_entries();
    *entry.mutable_sequence() = session.sequence;
    entry.set_start(session.position());
    entry.set_count(1);
    const Content& content = session.plan->content;
    synthetic_.Queries(content, layer, session.position(),
                       query.subspan(t * heads * d_qk, heads * d_qk));
    synthetic_.Latents(content, layer, session.position(), new_kv.subspan(t * d_qk, d_qk));
    item.sessions.push_back(&session);
  }
  return item;
}

RpcError Driver::Exchange(std::vector<Item>& items) {
  if (stream_ == nullptr) {
    auto stream = DecodeStream::Open(client_, Clock::now() + kTransport);
    if (!stream.ok()) return stream.error();
    stream_ = std::move(*stream);
  }
  const auto window = static_cast<std::size_t>(std::max(1, client_.info().limits().max_inflight()));
  const TimePoint give_up = Clock::now() + kOverloadPatience;
  std::deque<Item*> to_send;
  for (Item& item : items) {
    item.give_up = give_up;
    to_send.push_back(&item);
  }
  std::deque<Item*> unanswered;
  std::deque<Item*> retries;
  while (!to_send.empty() || !unanswered.empty() || !retries.empty()) {
    while (!retries.empty() &&
           (retries.front()->due <= Clock::now() || (to_send.empty() && unanswered.empty()))) {
      std::this_thread::sleep_until(retries.front()->due);
      to_send.push_back(retries.front());
      retries.pop_front();
    }
    while (!to_send.empty() && unanswered.size() < window) {
      RpcError error =
          stream_->Write(to_send.front()->request, Clock::now() + item_timeout_ + kTransport);
      if (!error.ok()) return error;
      unanswered.push_back(to_send.front());
      to_send.pop_front();
    }
    RpcResult<v1::DecodeStepResponse> answer =
        stream_->Read(Clock::now() + item_timeout_ + kTransport);
    if (!answer.ok()) return answer.error();
    Item& item = *unanswered.front();
    unanswered.pop_front();
    if (Take(item, std::move(*answer))) retries.push_back(&item);
  }
  return {};
}

bool Driver::Take(Item& item, v1::DecodeStepResponse answer) {
  if (answer.has_status()) {
    const RpcError error = ToRpcError(answer.status());
    if (error.overloaded() && !stop_ && Clock::now() < item.give_up) {
      ++stats_.retries;
      item.due = Clock::now() + std::max(Millis(1), *error.retry_delay);
      return true;
    }
    stats_.Error(fmt::format("step {} layer {}", item.request.step_id(), item.request.layer()),
                 error);
    for (Session* s : item.sessions) s->failed = true;
    return false;
  }
  AnsweredItem done;
  for (const Session* s : item.sessions) done.tokens.push_back({s->plan, s->position()});
  done.layer = item.request.layer();
  done.tag = item.request.tag();
  done.lse_base = item.request.lse_base();
  done.answer = std::move(answer);
  answered_.push_back(std::move(done));
  return false;
}

void Driver::EndFinished() {
  const auto ended = std::stable_partition(live_.begin(), live_.end(), [](const auto& s) {
    return !s->failed && s->decoded < s->plan->output;
  });
  std::vector<std::unique_ptr<Session>> gone(std::make_move_iterator(ended),
                                             std::make_move_iterator(live_.end()));
  live_.erase(ended, live_.end());
  for (const auto& s : gone) {
    if (s->failed) continue;
    ++stats_.requests;
    result_.request_us.push_back(MicrosSince(s->scheduled));
  }
  if (!gone.empty()) admission_.End(gone);
}

}  // namespace dcp
