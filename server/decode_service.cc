#include "server/decode_service.h"

#include <memory>
#include <utility>

#include "server/append_stream.h"
#include "server/decode_stream.h"
#include "server/unary_call.h"

namespace dcp {
namespace {

template <class Request, class Reply>
using CallPtr = std::shared_ptr<UnaryCall<Request, Reply>>;

// A completion for the engine that answers `call`; `fill` writes the reply.
template <class T, class Request, class Reply, class Fill>
Done<T> AnswerWith(CallPtr<Request, Reply> call, Fill fill) {
  return [call = std::move(call), fill = std::move(fill)](Result<T> result) {
    Guarded(*call, [&] {
      if (!result.ok()) return call->Fail(result.status());
      Reply reply;
      fill(*std::move(result), &reply);
      call->Answer(reply);
    });
  };
}

void GetServerInfo(ServiceContext& context,
                   const CallPtr<v1::GetServerInfoRequest, v1::GetServerInfoResponse>& call) {
  v1::GetServerInfoResponse reply;
  Encode(context.engine.info(), context.facts, &reply);
  call->Answer(reply);
}

void GetLoad(ServiceContext& context,
             const CallPtr<v1::GetLoadRequest, v1::GetLoadResponse>& call) {
  v1::GetLoadResponse reply;
  Encode(context.engine.load(), &reply);
  call->Answer(reply);
}

void CreateSequence(ServiceContext& context,
                    const CallPtr<v1::CreateSequenceRequest, v1::CreateSequenceResponse>& call) {
  Result<CreateRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.CreateSequence(
      *std::move(request),
      AnswerWith<CreateReply>(call, [raw = call.get()](const CreateReply& made, auto* reply) {
        reply->mutable_sequence()->set_sequence_id(raw->request()->sequence_id());
        reply->mutable_sequence()->set_generation(made.generation);
        reply->set_epoch(made.epoch);
      }));
}

void ForkSequence(ServiceContext& context,
                  const CallPtr<v1::ForkSequenceRequest, v1::ForkSequenceResponse>& call) {
  Result<ForkRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.ForkSequence(
      *std::move(request),
      AnswerWith<CreateReply>(call, [raw = call.get()](const CreateReply& made, auto* reply) {
        reply->mutable_sequence()->set_sequence_id(raw->request()->sequence_id());
        reply->mutable_sequence()->set_generation(made.generation);
        reply->set_epoch(made.epoch);
      }));
}

void TruncateSequence(
    ServiceContext& context,
    const CallPtr<v1::TruncateSequenceRequest, v1::TruncateSequenceResponse>& call) {
  Result<TruncateRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.TruncateSequence(
      *std::move(request),
      AnswerWith<SequenceInfo>(call, [](const SequenceInfo& info, auto* reply) {
        Encode(info, reply->mutable_sequence());
        reply->set_epoch(info.epoch);
      }));
}

void ReleaseSequences(
    ServiceContext& context,
    const CallPtr<v1::ReleaseSequencesRequest, v1::ReleaseSequencesResponse>& call) {
  Result<ReleaseRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.ReleaseSequences(
      *std::move(request),
      AnswerWith<ReleaseReply>(call, [](const ReleaseReply& released, auto* reply) {
        reply->set_released(released.released);
        reply->set_epoch(released.epoch);
      }));
}

void GetSequence(ServiceContext& context,
                 const CallPtr<v1::GetSequenceRequest, v1::GetSequenceResponse>& call) {
  Result<GetSequenceRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.GetSequence(
      *std::move(request),
      AnswerWith<SequenceInfo>(call, [](const SequenceInfo& info, auto* reply) {
        Encode(info, reply->mutable_sequence());
        reply->set_epoch(info.epoch);
      }));
}

void ListSequences(ServiceContext& context,
                   const CallPtr<v1::ListSequencesRequest, v1::ListSequencesResponse>& call) {
  Result<ListRequest> request = Bind(*call->request());
  if (!request.ok()) return call->Fail(request.status());
  context.engine.ListSequences(
      *std::move(request),
      AnswerWith<ListReply>(call, [](const ListReply& list, auto* reply) { Encode(list, reply); }));
}

void DecodeStep(ServiceContext& context,
                const CallPtr<v1::DecodeStepRequest, v1::DecodeStepResponse>& call) {
  Result<StepRequest> request = Bind(std::shared_ptr<const v1::DecodeStepRequest>(call->request()));
  if (!request.ok()) return call->Fail(request.status());
  const StepAnswerShape shape = AnswerShape(*call->request(), *request, context.config.model);
  StepHandle handle = context.engine.SubmitStep(
      *std::move(request), AnswerWith<StepReply>(call, [shape](StepReply&& step, auto* reply) {
        Encode(std::move(step), shape, reply);
      }));
  call->OnCancel([handle]() mutable { handle.Cancel(); });
}

constexpr UnaryMethod<v1::GetServerInfoRequest, v1::GetServerInfoResponse> kGetServerInfo{
    &AsyncService::RequestGetServerInfo, &GetServerInfo};
constexpr UnaryMethod<v1::GetLoadRequest, v1::GetLoadResponse> kGetLoad{
    &AsyncService::RequestGetLoad, &GetLoad};
constexpr UnaryMethod<v1::CreateSequenceRequest, v1::CreateSequenceResponse> kCreateSequence{
    &AsyncService::RequestCreateSequence, &CreateSequence};
constexpr UnaryMethod<v1::ForkSequenceRequest, v1::ForkSequenceResponse> kForkSequence{
    &AsyncService::RequestForkSequence, &ForkSequence};
constexpr UnaryMethod<v1::TruncateSequenceRequest, v1::TruncateSequenceResponse> kTruncateSequence{
    &AsyncService::RequestTruncateSequence, &TruncateSequence};
constexpr UnaryMethod<v1::ReleaseSequencesRequest, v1::ReleaseSequencesResponse> kReleaseSequences{
    &AsyncService::RequestReleaseSequences, &ReleaseSequences};
constexpr UnaryMethod<v1::GetSequenceRequest, v1::GetSequenceResponse> kGetSequence{
    &AsyncService::RequestGetSequence, &GetSequence};
constexpr UnaryMethod<v1::ListSequencesRequest, v1::ListSequencesResponse> kListSequences{
    &AsyncService::RequestListSequences, &ListSequences};
constexpr UnaryMethod<v1::DecodeStepRequest, v1::DecodeStepResponse> kDecodeStep{
    &AsyncService::RequestDecodeStep, &DecodeStep, /*cancellable=*/true};

// Calls waited for at the same time, per queue. Each call that arrives is replaced at once, so
// these only take the edge off bursts.
constexpr int kSlots = 4;
constexpr int kDecodeStepSlots = 32;

template <class Method>
void Accept(ServiceContext& context, grpc::ServerCompletionQueue& queue, const Method& method,
            int slots) {
  for (int i = 0; i < slots; ++i) Method::Call::Accept(context, queue, method);
}

}  // namespace

void AcceptCalls(ServiceContext& context, grpc::ServerCompletionQueue& queue) {
  Accept(context, queue, kGetServerInfo, kSlots);
  Accept(context, queue, kGetLoad, kSlots);
  Accept(context, queue, kCreateSequence, kSlots);
  Accept(context, queue, kForkSequence, kSlots);
  Accept(context, queue, kTruncateSequence, kSlots);
  Accept(context, queue, kReleaseSequences, kSlots);
  Accept(context, queue, kGetSequence, kSlots);
  Accept(context, queue, kListSequences, kSlots);
  Accept(context, queue, kDecodeStep, kDecodeStepSlots);
  for (int i = 0; i < kSlots; ++i) {
    DecodeStream::Accept(context, queue);
    AppendStream::Accept(context, queue);
  }
}

}  // namespace dcp
