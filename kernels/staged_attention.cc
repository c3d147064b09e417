#include "kernels/staged_attention.h"

#include <algorithm>
#include <cstring>

namespace dcp {
namespace {

constexpr std::size_t kAlign = 256;

std::size_t Aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

std::span<const std::byte> Bytes(const void* data, std::size_t size) {
  return {static_cast<const std::byte*>(data), size};
}

// Elements from the pool's base to the end of the last page that some row sees.
std::size_t KvItems(const AttentionArgs& args, const AttentionGeometry& geometry) {
  std::int64_t items = 0;
  for (int e = 0; e < args.entries; ++e) {
    const std::int32_t* const pages = args.block_table + e * args.block_table_stride;
    int keys = 0;
    for (int t = args.entry_begin[e]; t < args.entry_begin[e + 1]; ++t) {
      keys = std::max(keys, args.bound[t]);
    }
    for (int k = 0; k < keys; k += geometry.page_tokens) {
      const std::int64_t begin = pages[k / geometry.page_tokens] * args.page_stride;
      items = std::max(items, begin + std::int64_t{geometry.page_tokens} * geometry.d_qk);
    }
  }
  return static_cast<std::size_t>(items);
}

}  // namespace

Status StagedAttention::Resize(cuda::DeviceBuffer& buffer, std::size_t bytes) {
  if (buffer.data() != nullptr && buffer.size() >= bytes) return Status::Ok();
  buffer = cuda::DeviceBuffer();
  DCP_ASSIGN_OR_RETURN(buffer, cuda::DeviceBuffer::Create(setup_.device, std::max(bytes, kAlign),
                                                          "staged attention"));
  return Status::Ok();
}

Result<std::byte*> StagedAttention::Upload(cuda::DeviceBuffer& to,
                                           std::span<const std::byte> from) {
  DCP_RETURN_IF_ERROR(Resize(to, from.size()));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.data(), from.data(), from.size(), stream_->ref()));
  return to.data();
}

Result<const DeviceStep*> StagedAttention::UploadStep(const AttentionArgs& args) {
  const std::size_t table_bytes = static_cast<std::size_t>(args.entries) *
                                  static_cast<std::size_t>(args.block_table_stride) *
                                  sizeof(std::int32_t);
  const std::size_t bound_bytes = static_cast<std::size_t>(args.tokens) * sizeof(std::int32_t);
  const std::size_t table_at = Aligned(sizeof(DeviceStep));
  const std::size_t bounds_at = table_at + Aligned(table_bytes);
  const std::size_t plan_at = bounds_at + Aligned(bound_bytes);
  host_step_.resize(plan_at + backend_.MaxPlanBytes());
  DCP_RETURN_IF_ERROR(Resize(step_, host_step_.size()));

  const std::byte* const base = step_.data();
  const DeviceStep step{.tokens = args.tokens,
                        .entries = args.entries,
                        .table_stride = static_cast<std::int32_t>(args.block_table_stride),
                        .bounds = reinterpret_cast<const std::int32_t*>(base + bounds_at),
                        .block_table = reinterpret_cast<const std::int32_t*>(base + table_at),
                        .plan = base + plan_at};
  std::memcpy(host_step_.data(), &step, sizeof(step));
  if (table_bytes > 0) {
    std::memcpy(host_step_.data() + table_at, args.block_table, table_bytes);
  }
  if (bound_bytes > 0) std::memcpy(host_step_.data() + bounds_at, args.bound, bound_bytes);
  DCP_RETURN_IF_ERROR(backend_
                          .Plan({.entry_begin = args.entry_begin,
                                 .bound = args.bound,
                                 .entries = args.entries,
                                 .tokens = args.tokens},
                                std::span(host_step_).subspan(plan_at))
                          .status());
  DCP_ASSIGN_OR_RETURN(const std::byte* const device, Upload(step_, host_step_));
  return reinterpret_cast<const DeviceStep*>(device);
}

Status StagedAttention::Run(const AttentionArgs& args) {
  DCP_RETURN_IF_ERROR(cuda::UseDevice(setup_.device));
  if (!stream_.has_value()) {
    DCP_ASSIGN_OR_RETURN(stream_, cuda::Stream::Create(setup_.device));
  }
  const AttentionGeometry& g = setup_.geometry;
  const PartialLayout& to = args.partial;
  const auto groups = static_cast<std::size_t>(g.heads / to.heads_per_group);
  const std::size_t rows =
      static_cast<std::size_t>(args.tokens) * static_cast<std::size_t>(to.heads_per_group);
  // One group may come without strides.
  const std::size_t out_bytes =
      std::max(groups * static_cast<std::size_t>(to.out_group_stride),
               rows * static_cast<std::size_t>(g.d_v) * SizeOf(g.partial_dtype));
  const std::size_t lse_bytes =
      std::max(groups * static_cast<std::size_t>(to.lse_group_stride), rows * sizeof(float));
  const std::size_t query_items = static_cast<std::size_t>(args.tokens) *
                                  static_cast<std::size_t>(g.heads) *
                                  static_cast<std::size_t>(g.d_qk);

  AttentionArgs device = args;
  device.stream = stream_->ref();
  DCP_ASSIGN_OR_RETURN(device.step, UploadStep(args));
  DCP_ASSIGN_OR_RETURN(const std::byte* const query,
                       Upload(query_, Bytes(args.query, query_items * sizeof(Bf16))));
  device.query = reinterpret_cast<const Bf16*>(query);
  DCP_ASSIGN_OR_RETURN(const std::byte* const kv,
                       Upload(kv_, Bytes(args.kv, KvItems(args, g) * sizeof(Bf16))));
  device.kv = reinterpret_cast<const Bf16*>(kv);
  DCP_ASSIGN_OR_RETURN(device.partial.out, Upload(out_, Bytes(to.out, out_bytes)));
  DCP_ASSIGN_OR_RETURN(device.partial.lse, Upload(lse_, Bytes(to.lse, lse_bytes)));
  DCP_RETURN_IF_ERROR(backend_.Run(device));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.out, out_.data(), out_bytes, stream_->ref()));
  DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.lse, lse_.data(), lse_bytes, stream_->ref()));
  return stream_->Synchronize();
}

}  // namespace dcp
