#include "client/dcpctl/replay/server_calls.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <random>
#include <thread>

#include "client/cpp/append_kv.h"

namespace dcp {
namespace {

// A replay that dies leaves nothing behind for long.
constexpr std::int64_t kLeaseSeconds = 300;
constexpr Millis kAppendTimeout(120'000);

}  // namespace

ServerCalls::ServerCalls(Client& client, const Synthetic& synthetic, ReplayStats& stats,
                         const std::atomic<bool>& stop)
    : client_(client),
      synthetic_(synthetic),
      stats_(stats),
      stop_(stop),
      prefix_(fmt::format("replay-{:08x}/", std::random_device()())) {}

RpcError ServerCalls::Retry(const std::function<RpcError()>& call) {
  const TimePoint give_up = Clock::now() + kOverloadPatience;
  for (;;) {
    RpcError error = call();
    if (!error.overloaded() || stop_ || Clock::now() >= give_up) return error;
    ++stats_.retries;
    std::this_thread::sleep_for(std::max(Millis(1), *error.retry_delay));
  }
}

RpcResult<v1::SequenceRef> ServerCalls::Create(const std::string& name) {
  v1::CreateSequenceRequest request;
  request.set_sequence_id(Name(name));
  request.set_request_id(Name(name));
  request.set_softmax_scale(client_.info().model().softmax_scale());
  request.mutable_lease()->set_seconds(kLeaseSeconds);
  v1::SequenceRef sequence;
  RpcError error = Retry([&] {
    auto answer = client_.CreateSequence(request);
    if (answer.ok()) sequence = answer->sequence();
    return answer.error();
  });
  if (!error.ok()) return error;
  return sequence;
}

RpcResult<v1::SequenceRef> ServerCalls::Fork(const v1::SequenceRef& parent, std::int64_t at_length,
                                             const std::string& name) {
  v1::ForkSequenceRequest request;
  *request.mutable_parent() = parent;
  request.set_sequence_id(Name(name));
  request.set_request_id(Name(name));
  request.set_at_length(at_length);
  request.mutable_lease()->set_seconds(kLeaseSeconds);
  v1::SequenceRef sequence;
  RpcError error = Retry([&] {
    auto answer = client_.ForkSequence(request);
    if (answer.ok()) sequence = answer->sequence();
    return answer.error();
  });
  if (!error.ok()) return error;
  ++stats_.forks;
  stats_.forked_tokens += at_length;
  return sequence;
}

RpcError ServerCalls::Append(const v1::SequenceRef& sequence, const Content& content,
                             std::int64_t start, std::int64_t count) {
  if (count <= 0) return {};
  AppendSource source;
  source.sequence = sequence;
  source.step_id = NextStepId();
  source.start = start;
  source.count = count;
  source.latents = [&](int layer, std::int64_t begin, std::span<Bf16> out) {
    synthetic_.Latents(content, layer, begin, out);
  };
  RpcError error = Retry([&] { return AppendKv(client_, source, kAppendTimeout).error(); });
  if (error.ok()) stats_.appended_tokens += count;
  return error;
}

void ServerCalls::Release(const std::vector<v1::SequenceRef>& sequences) {
  if (sequences.empty()) return;
  v1::ReleaseSequencesRequest request;
  for (const v1::SequenceRef& s : sequences) *request.add_sequences() = s;
  const RpcError error = Retry([&] { return client_.ReleaseSequences(request).error(); });
  if (!error.ok()) stats_.Error("release", error);
}

void ServerCalls::Touch(const v1::SequenceRef& sequence) {
  v1::GetSequenceRequest request;
  request.set_sequence_id(sequence.sequence_id());
  request.set_generation(sequence.generation());
  const RpcError error = client_.GetSequence(request).error();
  if (!error.ok()) stats_.Error("prefix " + sequence.sequence_id(), error);
}

}  // namespace dcp
