// The exchange of runtime/exchange.h on a device: the same messages and the same arithmetic,
// enqueued on a stream. Layouts are those of a capacity in tokens, so that a captured exchange
// serves every step of at most as many; rows past the step's tokens travel and are not looked at.
#pragma once

#include <cstdint>
#include <functional>

#include "base/cuda.h"
#include "comm/communicator.h"
#include "kernels/attention_backend.h"
#include "kernels/device_step.h"
#include "runtime/config.h"
#include "runtime/exchange.h"

namespace dcp {

class CudaExchange {
 public:
  // Allocates for steps of up to max_tokens. Errors: KV_CAPACITY.
  static Result<CudaExchange> Create(int device, ExchangeKind kind, const ExchangeShape& shape,
                                     int max_tokens);

  // Where the attention backend writes: straight into the messages.
  PartialLayout Layout(int capacity) const;

  // Writes the same partial and LSE for every row of a capacity, for tests. Waits; start-up only.
  Status Fill(int capacity, float partial, float lse, StreamRef stream);

  struct Args {
    int capacity = 0;
    const DeviceStep* step = nullptr;
    std::int64_t* faults = nullptr;      // device address; rows at fault are added, merge_cuda.h
    LogBase partial_base = LogBase::kE;  // the backend's declared base
    TimePoint deadline;
    StreamRef stream = StreamRef::Host();
  };
  // Enqueues everything between the attention's partials and the merged rows of this rank's heads.
  Status Enqueue(Communicator& comm, const Args& args, const PhaseFn& entering);

  // The merged rows, [tokens, heads / ranks, d_v], device memory. `dtype` is the step's output
  // dtype: ag_rs reduces in the partials' and enqueues a conversion here if that is another.
  Result<std::byte*> Output(int tokens, DType dtype, std::int64_t* faults, StreamRef stream);
  float* lse() const { return lse_.as<float>(); }  // [tokens, heads / ranks], device memory

  // For tests: fills the memory in which results will lie with 0xff.
  Status PoisonResults(StreamRef stream);

 private:
  CudaExchange() = default;
  Status A2a(Communicator& comm, const Args& args, const PhaseFn& entering);
  Status AgRs(Communicator& comm, const Args& args, const PhaseFn& entering);

  ExchangeKind kind_{};
  ExchangeShape shape_;
  cuda::DeviceBuffer send_, recv_;          // partials (a2a: with their LSE)
  cuda::DeviceBuffer lse_send_, lse_recv_;  // ag_rs only
  cuda::DeviceBuffer output_, lse_;
};

}  // namespace dcp
