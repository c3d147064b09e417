#include "runtime/exchange.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/sabotage.h"

namespace dcp {
namespace {

void RoundLseToBf16(std::byte* lse, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(float)) {
    float x;
    std::memcpy(&x, lse + i, sizeof(x));
    x = ToFloat(ToBf16(x));
    std::memcpy(lse + i, &x, sizeof(x));
  }
}

template <class T>
void StoreRow(std::byte* out, const float* row, int n) {
  for (int i = 0; i < n; ++i) {
    T x;
    if constexpr (std::is_same_v<T, Bf16>) {
      x = ToBf16(row[i]);
    } else {
      x = row[i];
    }
    std::memcpy(out + static_cast<std::size_t>(i) * sizeof(T), &x, sizeof(T));
  }
}

}  // namespace

ExchangeBuffers::ExchangeBuffers(ExchangeKind kind, const ExchangeShape& shape, int max_tokens)
    : kind_(kind), shape_(shape) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  if (kind == ExchangeKind::kA2a) {
    send_.resize(ranks * shape.MessageBytes(max_tokens));
    recv_.resize(send_.size());
  } else {
    send_.resize(ranks * shape.PartialBytes(max_tokens));
    recv_.resize(shape.PartialBytes(max_tokens));
    lse_send_.resize(ranks * shape.LseBytes(max_tokens));
    lse_recv_.resize(ranks * lse_send_.size());
    row_.resize(static_cast<std::size_t>(shape.d_v));
  }
}

PartialLayout ExchangeBuffers::Layout(int tokens) {
  PartialLayout layout;
  layout.heads_per_group = shape_.heads_per_rank();
  layout.out = send_.data();
  if (kind_ == ExchangeKind::kA2a) {
    layout.out_group_stride = static_cast<std::int64_t>(shape_.MessageBytes(tokens));
    layout.lse = send_.data() + shape_.LseOffset(tokens);
    layout.lse_group_stride = layout.out_group_stride;
  } else {
    layout.out_group_stride = static_cast<std::int64_t>(shape_.PartialBytes(tokens));
    layout.lse = lse_send_.data();
    layout.lse_group_stride = static_cast<std::int64_t>(shape_.LseBytes(tokens));
  }
  return layout;
}

// The steps of one exchange on one rank.
struct ExchangeRun {
  ExchangeBuffers& b;
  Communicator& comm;
  const ExchangeArgs& args;
  const PhaseFn& entering;
  const ExchangeShape& s = b.shape_;
  ExchangeResult result{};

  TimePoint mark = Clock::now();
  Nanos Lap() {
    const TimePoint now = Clock::now();
    return now - std::exchange(mark, now);
  }

  std::size_t ranks() const { return static_cast<std::size_t>(s.ranks); }

  Status A2a() {
    const std::size_t message = s.MessageBytes(args.tokens);
    const std::span send(b.send_.data(), ranks() * message);
    const std::span recv(b.recv_.data(), ranks() * message);
    if (Sabotaged(Fault::kLseBf16)) {
      for (std::size_t r = 0; r < ranks(); ++r) {
        RoundLseToBf16(send.data() + r * message + s.LseOffset(args.tokens),
                       s.LseBytes(args.tokens));
      }
    }
    DCP_RETURN_IF_ERROR(entering(RankPhase::kExchange));
    DCP_RETURN_IF_ERROR(comm.AllToAll(send, recv, args.deadline, StreamRef::Host()));
    result.exchange = Lap();
    DCP_RETURN_IF_ERROR(entering(RankPhase::kMerge));
    std::array<MergeSource, kMaxRanks> sources;
    for (std::size_t r = 0; r < ranks(); ++r) {
      const std::byte* from = recv.data() + r * message;
      sources[r] = {.out = from, .lse = from + s.LseOffset(args.tokens)};
    }
    std::vector<std::int32_t> from_bits;  // stays empty but in one sabotage build
    MergeArgs merge{.sources = sources.data(),
                    .bounds = args.bounds.data(),
                    .bounds_stride = args.tokens,
                    .ranks = s.ranks,
                    .tokens = args.tokens,
                    .heads = s.heads_per_rank(),
                    .d_v = s.d_v,
                    .partial_dtype = s.partial_dtype,
                    .output_dtype = args.output_dtype,
                    .output = args.output.data,
                    .output_token_stride =
                        args.output.stride / static_cast<std::int64_t>(SizeOf(args.output_dtype)),
                    .lse = args.lse.rows > 0 ? reinterpret_cast<float*>(args.lse.data) : nullptr,
                    .lse_token_stride = args.lse.stride / static_cast<std::int64_t>(sizeof(float)),
                    .lse_base = args.lse_base};
    if (Sabotaged(Fault::kEmptinessFromBits)) {
      from_bits = BoundsFromBits(sources);
      merge.bounds = from_bits.data();
    }
    result.faulty_rows =
        WithLogBase(args.partial_base, [&](auto base) { return MergePartials<base()>(merge); });
    result.merge = Lap();
    return Status::Ok();
  }

  std::vector<std::int32_t> BoundsFromBits(
      const std::array<MergeSource, kMaxRanks>& sources) const {
    std::vector<std::int32_t> bounds(ranks() * static_cast<std::size_t>(args.tokens));
    for (std::size_t i = 0; i < bounds.size(); ++i) {
      const std::size_t r = i / static_cast<std::size_t>(args.tokens);
      const std::size_t t = i % static_cast<std::size_t>(args.tokens);
      float lse;
      std::memcpy(&lse,
                  sources[r].lse + t * static_cast<std::size_t>(s.heads_per_rank()) * sizeof(lse),
                  sizeof(lse));
      bounds[i] = lse == -INFINITY ? 0 : 1;
    }
    return bounds;
  }

  Status AgRs() {
    const std::size_t lse_bytes = ranks() * s.LseBytes(args.tokens);
    const std::size_t partial = s.PartialBytes(args.tokens);
    const std::span lse_send(b.lse_send_.data(), lse_bytes);
    const std::span lse_recv(b.lse_recv_.data(), ranks() * lse_bytes);
    if (Sabotaged(Fault::kLseBf16)) RoundLseToBf16(lse_send.data(), lse_send.size());
    DCP_RETURN_IF_ERROR(entering(RankPhase::kExchange));
    DCP_RETURN_IF_ERROR(comm.AllGather(lse_send, lse_recv, args.deadline, StreamRef::Host()));
    result.exchange = Lap();
    const ScaleArgs scale{.partial = b.send_.data(),
                          .group_stride = static_cast<std::int64_t>(partial),
                          .lse = lse_recv.data(),
                          .bounds = args.bounds.data(),
                          .bounds_stride = args.tokens,
                          .rank = comm.rank().value(),
                          .ranks = s.ranks,
                          .groups = s.ranks,
                          .tokens = args.tokens,
                          .heads_per_group = s.heads_per_rank(),
                          .d_v = s.d_v,
                          .partial_dtype = s.partial_dtype};
    WithLogBase(args.partial_base, [&](auto base) { ScalePartial<base()>(scale); });
    result.merge = Lap();
    DCP_RETURN_IF_ERROR(comm.ReduceScatter(std::span(b.send_.data(), ranks() * partial),
                                           std::span(b.recv_.data(), partial), s.partial_dtype,
                                           args.deadline, StreamRef::Host()));
    result.exchange += Lap();
    DCP_RETURN_IF_ERROR(entering(RankPhase::kMerge));
    WithLogBase(args.partial_base, [&](auto base) { FinishRows<base()>(lse_recv.data()); });
    result.merge += Lap();
    return Status::Ok();
  }

  // Converts the reduced rows to the output dtype and writes the merged LSE.
  template <LogBase B>
  void FinishRows(const std::byte* lse_all) {
    const int heads = s.heads_per_rank();
    const std::size_t d_v = static_cast<std::size_t>(s.d_v);
    std::vector<float>& row = b.row_;
    for (int t = 0; t < args.tokens; ++t) {
      bool owned[kMaxRanks];
      for (int r = 0; r < s.ranks; ++r) {
        owned[r] = args.bounds[static_cast<std::size_t>(r) * static_cast<std::size_t>(args.tokens) +
                               static_cast<std::size_t>(t)] > 0;
      }
      for (int h = 0; h < heads; ++h) {
        const std::size_t index = static_cast<std::size_t>(t) * static_cast<std::size_t>(heads) +
                                  static_cast<std::size_t>(h);
        Lse<B> lse[kMaxRanks];
        float weight[kMaxRanks];
        for (std::size_t r = 0; r < ranks(); ++r) {
          // [rank][group = this rank][tokens, heads]
          const std::size_t group = r * ranks() + static_cast<std::size_t>(comm.rank().value());
          std::memcpy(&lse[r], lse_all + group * s.LseBytes(args.tokens) + index * sizeof(float),
                      sizeof(float));
        }
        const RowWeights<B> merged = MergeWeights<B>(s.ranks, owned, lse, weight);
        bool finite = !merged.fault;
        for (std::size_t i = 0; i < d_v; ++i) {
          const std::size_t at = index * d_v + i;
          if (s.partial_dtype == DType::kBf16) {
            Bf16 x;
            std::memcpy(&x, b.recv_.data() + at * sizeof(x), sizeof(x));
            row[i] = ToFloat(x);
          } else {
            std::memcpy(&row[i], b.recv_.data() + at * sizeof(float), sizeof(float));
          }
          finite = finite && std::isfinite(row[i]);
        }
        if (!finite) ++result.faulty_rows;
        std::byte* out = args.output.data + t * args.output.stride +
                         static_cast<std::size_t>(h) * d_v * SizeOf(args.output_dtype);
        args.output_dtype == DType::kBf16 ? StoreRow<Bf16>(out, row.data(), s.d_v)
                                          : StoreRow<float>(out, row.data(), s.d_v);
        if (args.lse.rows > 0) {
          const float value = args.lse_base == LogBase::kE ? LseCast<LogBase::kE>(merged.lse).raw
                                                           : LseCast<LogBase::kTwo>(merged.lse).raw;
          std::memcpy(
              args.lse.data + t * args.lse.stride + static_cast<std::size_t>(h) * sizeof(float),
              &value, sizeof(value));
        }
      }
    }
  }
};

Result<ExchangeResult> RunExchange(ExchangeBuffers& buffers, Communicator& comm,
                                   const ExchangeArgs& args, const PhaseFn& entering) {
  ExchangeRun run{buffers, comm, args, entering};
  DCP_RETURN_IF_ERROR(buffers.kind() == ExchangeKind::kA2a ? run.A2a() : run.AgRs());
  return run.result;
}

}  // namespace dcp
