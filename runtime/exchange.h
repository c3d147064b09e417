// How partial results of all ranks become the final rows of each rank's heads. Composes the
// communicator (bytes) and the merge kernels (numbers), which know nothing of each other.
//
//   a2a    partials are written as one message per destination, [T, H/N, d_v] outputs followed by
//          [T, H/N] LSE; one all-to-all; the owner of the heads merges N partials.
//   ag_rs  LSE of all heads is all-gathered; each rank scales its own partial by its weight; the
//          weighted partials are reduce-scattered over heads in the partial dtype.
//
// Both take the rows' local bounds of every rank, because a rank without keys of a row must not be
// read, whatever its buffers hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "kernels/attention_backend.h"
#include "kernels/merge.h"
#include "runtime/config.h"
#include "runtime/exchange_layout.h"
#include "runtime/rank_message.h"

namespace dcp {

// One rank's buffers, sized once for the largest step.
class ExchangeBuffers {
 public:
  ExchangeBuffers(ExchangeKind kind, const ExchangeShape& shape, int max_tokens);

  // Where the attention backend writes for a step of `tokens`: straight into the messages.
  PartialLayout Layout(int tokens);

  ExchangeKind kind() const { return kind_; }
  const ExchangeShape& shape() const { return shape_; }

 private:
  friend struct ExchangeRun;
  ExchangeKind kind_;
  ExchangeShape shape_;
  std::vector<std::byte> send_, recv_;          // partials (a2a: with their LSE)
  std::vector<std::byte> lse_send_, lse_recv_;  // ag_rs only
  std::vector<float> row_;                      // ag_rs only: one row on its way to the output
};

struct ExchangeArgs {
  int tokens = 0;
  std::span<const std::int32_t> bounds;  // [ranks, tokens] local keys a token sees on each rank
  LogBase partial_base = LogBase::kE;    // the backend's declared base
  DType output_dtype = DType::kBf16;
  StridedBytes output;             // [tokens][heads / ranks, d_v]
  StridedBytes lse;                // [tokens][heads / ranks] f32, or no rows
  LogBase lse_base = LogBase::kE;  // of `lse`
  TimePoint deadline;
};

struct ExchangeResult {
  std::int64_t faulty_rows = 0;
  Nanos exchange{}, merge{};
};

// Called by every rank of the group after its attention. `entering` is told each phase and may fail
// the rank there.
using PhaseFn = std::function<Status(RankPhase)>;
Result<ExchangeResult> RunExchange(ExchangeBuffers& buffers, Communicator& comm,
                                   const ExchangeArgs& args, const PhaseFn& entering);

}  // namespace dcp
