#include "runtime/cuda_exchange.h"

#include <utility>
#include <vector>

#include "kernels/merge_cuda.h"

namespace dcp {

Result<CudaExchange> CudaExchange::Create(int device, ExchangeKind kind, const ExchangeShape& shape,
                                          int max_tokens) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto make = [device](std::size_t bytes) {
    return cuda::DeviceBuffer::Create(device, bytes, "the exchange");
  };
  CudaExchange e;
  e.kind_ = kind;
  e.shape_ = shape;
  if (kind == ExchangeKind::kA2a) {
    DCP_ASSIGN_OR_RETURN(e.send_, make(ranks * shape.MessageBytes(max_tokens)));
    DCP_ASSIGN_OR_RETURN(e.recv_, make(e.send_.size()));
  } else {
    DCP_ASSIGN_OR_RETURN(e.send_, make(ranks * shape.PartialBytes(max_tokens)));
    DCP_ASSIGN_OR_RETURN(e.recv_, make(shape.PartialBytes(max_tokens)));
    DCP_ASSIGN_OR_RETURN(e.lse_send_, make(ranks * shape.LseBytes(max_tokens)));
    DCP_ASSIGN_OR_RETURN(e.lse_recv_, make(ranks * e.lse_send_.size()));
  }
  const std::size_t rows = shape.LseBytes(max_tokens) / sizeof(float);
  DCP_ASSIGN_OR_RETURN(e.output_, make(rows * static_cast<std::size_t>(shape.d_v) * sizeof(float)));
  DCP_ASSIGN_OR_RETURN(e.lse_, make(rows * sizeof(float)));
  return e;
}

PartialLayout CudaExchange::Layout(int capacity) const {
  PartialLayout layout;
  layout.heads_per_group = shape_.heads_per_rank();
  layout.out = send_.data();
  if (kind_ == ExchangeKind::kA2a) {
    layout.out_group_stride = static_cast<std::int64_t>(shape_.MessageBytes(capacity));
    layout.lse = send_.data() + shape_.LseOffset(capacity);
    layout.lse_group_stride = layout.out_group_stride;
  } else {
    layout.out_group_stride = static_cast<std::int64_t>(shape_.PartialBytes(capacity));
    layout.lse = lse_send_.data();
    layout.lse_group_stride = static_cast<std::int64_t>(shape_.LseBytes(capacity));
  }
  return layout;
}

Status CudaExchange::Fill(int capacity, float partial, float lse, StreamRef stream) {
  const PartialLayout to = Layout(capacity);
  const std::size_t items = shape_.PartialBytes(capacity) / SizeOf(shape_.partial_dtype);
  const std::vector<float> outs(items, partial);
  std::vector<Bf16> halves;
  if (shape_.partial_dtype == DType::kBf16) halves.assign(items, ToBf16(partial));
  const void* const from = halves.empty() ? static_cast<const void*>(outs.data())
                                          : static_cast<const void*>(halves.data());
  const std::vector<float> lses(shape_.LseBytes(capacity) / sizeof(float), lse);
  for (int g = 0; g < shape_.ranks; ++g) {
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.out + g * to.out_group_stride, from,
                                        shape_.PartialBytes(capacity), stream));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(to.lse + g * to.lse_group_stride, lses.data(),
                                        shape_.LseBytes(capacity), stream));
  }
  return cuda::Check(cudaStreamSynchronize(cuda::Raw(stream)), "cudaStreamSynchronize");
}

Status CudaExchange::Enqueue(Communicator& comm, const Args& args, const PhaseFn& entering) {
  return kind_ == ExchangeKind::kA2a ? A2a(comm, args, entering) : AgRs(comm, args, entering);
}

Result<std::byte*> CudaExchange::Output(int tokens, DType dtype, std::int64_t* faults,
                                        StreamRef stream) {
  if (kind_ == ExchangeKind::kA2a) return output_.data();
  std::byte* const reduced = shape_.ranks == 1 ? send_.data() : recv_.data();
  if (dtype == shape_.partial_dtype) return reduced;
  DCP_RETURN_IF_ERROR(ConvertRowsCuda({.in = reduced,
                                       .in_dtype = shape_.partial_dtype,
                                       .out = output_.data(),
                                       .out_dtype = dtype,
                                       .rows = std::int64_t{tokens} * shape_.heads_per_rank(),
                                       .d_v = shape_.d_v,
                                       .faults = faults},
                                      stream));
  return output_.data();
}

Status CudaExchange::PoisonResults(StreamRef stream) {
  for (const cuda::DeviceBuffer* buffer : {&recv_, &output_, &lse_}) {
    DCP_RETURN_IF_ERROR(cuda::FillAsync(buffer->data(), 0xff, buffer->size(), stream));
  }
  return Status::Ok();
}

Status CudaExchange::A2a(Communicator& comm, const Args& args, const PhaseFn& entering) {
  const std::size_t message = shape_.MessageBytes(args.capacity);
  const std::size_t bytes = static_cast<std::size_t>(shape_.ranks) * message;
  const bool alone = shape_.ranks == 1;  // its own message is the only one
  DCP_RETURN_IF_ERROR(entering(RankPhase::kExchange));
  if (!alone) {
    DCP_RETURN_IF_ERROR(
        comm.AllToAll({send_.data(), bytes}, {recv_.data(), bytes}, args.deadline, args.stream));
  }
  DCP_RETURN_IF_ERROR(entering(RankPhase::kMerge));
  const std::byte* const from = alone ? send_.data() : recv_.data();
  const DeviceMergeArgs merge{.out = from,
                              .lse = from + shape_.LseOffset(args.capacity),
                              .message_stride = static_cast<std::int64_t>(message),
                              .ranks = shape_.ranks,
                              .heads = shape_.heads_per_rank(),
                              .d_v = shape_.d_v,
                              .partial_dtype = shape_.partial_dtype,
                              .output = output_.data(),
                              .merged_lse = lse(),
                              .faults = args.faults,
                              .max_tokens = args.capacity,
                              .step = args.step};
  return WithLogBase(args.partial_base,
                     [&](auto base) { return MergePartialsCuda<base()>(merge, args.stream); });
}

Status CudaExchange::AgRs(Communicator& comm, const Args& args, const PhaseFn& entering) {
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  const std::size_t partial = shape_.PartialBytes(args.capacity);
  const std::size_t group_lse = shape_.LseBytes(args.capacity);
  const std::size_t lse_bytes = ranks * group_lse;
  const bool alone = shape_.ranks == 1;
  DCP_RETURN_IF_ERROR(entering(RankPhase::kExchange));
  if (!alone) {
    DCP_RETURN_IF_ERROR(comm.AllGather({lse_send_.data(), lse_bytes},
                                       {lse_recv_.data(), ranks * lse_bytes}, args.deadline,
                                       args.stream));
  }
  const std::byte* const all_lse = alone ? lse_send_.data() : lse_recv_.data();
  const DeviceScaleArgs scale{.partial = send_.data(),
                              .group_stride = static_cast<std::int64_t>(partial),
                              .lse = all_lse,
                              .lse_rank_stride = static_cast<std::int64_t>(lse_bytes),
                              .lse_group_stride = static_cast<std::int64_t>(group_lse),
                              .rank = comm.rank().value(),
                              .ranks = shape_.ranks,
                              .groups = shape_.ranks,
                              .heads_per_group = shape_.heads_per_rank(),
                              .d_v = shape_.d_v,
                              .partial_dtype = shape_.partial_dtype,
                              .merged_lse = lse(),
                              .faults = args.faults,
                              .max_tokens = args.capacity,
                              .step = args.step};
  DCP_RETURN_IF_ERROR(WithLogBase(
      args.partial_base, [&](auto base) { return ScalePartialCuda<base()>(scale, args.stream); }));
  if (!alone) {
    DCP_RETURN_IF_ERROR(comm.ReduceScatter({send_.data(), ranks * partial}, {recv_.data(), partial},
                                           shape_.partial_dtype, args.deadline, args.stream));
  }
  return entering(RankPhase::kMerge);
}

}  // namespace dcp
