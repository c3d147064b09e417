// Between the wire (proto/dcp/v1) and the engine's requests (runtime/requests.h). Nothing is
// decided here: what a message can say wrongly by itself (unknown enum, missing tensor data, a
// duration out of range) is refused, everything else is the engine's to judge.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"
#include "dcp/v1/decode.pb.h"
#include "runtime/requests.h"

namespace dcp {

// The version of this program and what only the server knows.
struct ServerFacts {
  std::string version;
  std::string git_hash;
  std::int64_t max_message_bytes = 0;
};

// Requests. Tensor views point into the message, which the result keeps alive.
Result<CreateRequest> Bind(const v1::CreateSequenceRequest& message);
Result<ForkRequest> Bind(const v1::ForkSequenceRequest& message);
Result<TruncateRequest> Bind(const v1::TruncateSequenceRequest& message);
Result<ReleaseRequest> Bind(const v1::ReleaseSequencesRequest& message);
Result<GetSequenceRequest> Bind(const v1::GetSequenceRequest& message);
Result<ListRequest> Bind(const v1::ListSequencesRequest& message);
Result<AppendRequest> Bind(const v1::AppendKvHeader& message);
// Precondition: message->has_chunk().
Result<AppendChunk> BindChunk(std::shared_ptr<const v1::AppendKvRequest> message);
Result<StepRequest> Bind(std::shared_ptr<const v1::DecodeStepRequest> message);

// What of a step's request its answer repeats.
struct StepAnswerShape {
  std::uint64_t tag = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t d_v = 0;
  DType dtype = DType::kBf16;
  std::optional<LogBase> lse_base;
};
StepAnswerShape AnswerShape(const v1::DecodeStepRequest& message, const StepRequest& request,
                            const ModelConfig& model);

// Answers.
void Encode(const EngineInfo& info, const ServerFacts& facts, v1::GetServerInfoResponse* out);
void Encode(const LoadInfo& load, v1::GetLoadResponse* out);
void Encode(const SequenceInfo& info, v1::Sequence* out);
void Encode(const ListReply& reply, v1::ListSequencesResponse* out);
void Encode(const AppendReply& reply, v1::AppendKvResponse* out);
void Encode(StepReply&& reply, const StepAnswerShape& shape, v1::DecodeStepResponse* out);

}  // namespace dcp
