#include "client/cpp/append_kv.h"

#include <grpcpp/client_context.h>

#include <algorithm>

#include "client/cpp/tensor.h"

namespace dcp {
namespace {

constexpr std::int64_t kChunkBytes = 1 << 20;
// Room for the message's other fields.
constexpr std::int64_t kHeaderBytes = 1 << 10;

}  // namespace

RpcResult<v1::AppendKvResponse> AppendKv(Client& client, const AppendSource& source,
                                         Millis timeout) {
  const v1::GetServerInfoResponse& info = client.info();
  const std::int64_t d_qk = info.model().kv_lora_rank() + info.model().rope_dim();
  const std::int64_t limit = info.limits().max_message_bytes();
  const std::int64_t chunk_bytes =
      limit > 0 ? std::min(kChunkBytes, limit - kHeaderBytes) : kChunkBytes;
  const std::int64_t chunk_tokens =
      std::max<std::int64_t>(1, chunk_bytes / (d_qk * static_cast<std::int64_t>(sizeof(Bf16))));

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  v1::AppendKvResponse response;
  const auto writer = client.stub().AppendKv(&context, &response);

  v1::AppendKvRequest message;
  v1::AppendKvHeader& header = *message.mutable_header();
  *header.mutable_sequence() = source.sequence;
  header.set_step_id(source.step_id);
  header.set_start(source.start);
  header.set_count(source.count);
  header.set_layer_begin(0);
  header.set_layer_count(info.model().layers());
  // A failed write means that the call has ended; Finish says why.
  bool open = writer->Write(message);
  for (int layer = 0; open && layer < info.model().layers(); ++layer) {
    for (std::int64_t offset = 0; open && offset < source.count; offset += chunk_tokens) {
      const std::int64_t n = std::min(chunk_tokens, source.count - offset);
      v1::AppendKvChunk& chunk = *message.mutable_chunk();
      chunk.set_layer(layer);
      chunk.set_offset(offset);
      source.latents(layer, source.start + offset, MakeBf16(*chunk.mutable_latents(), {n, d_qk}));
      open = writer->Write(message);
    }
  }
  if (open) writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (!status.ok()) return ToRpcError(status);
  return response;
}

}  // namespace dcp
