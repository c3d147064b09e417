// The device's merge has the bits of the host's, whatever the partials hold.
#include "kernels/merge_cuda.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "tests/kernels/on_device.h"
#include "tests/support/sizes.h"

namespace dcp::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::byte kJunk{0x41};

struct Shape {
  int ranks;
  int tokens;
  int heads;
  int d_v;
  DType partial;
  DType output;
  LogBase lse_base;
  int pad = 0;          // bytes behind each message
  int more_tokens = 0;  // that the launch is for, beyond those of the step
};

std::int64_t RowBytes(const Shape& s, DType dtype) {
  return s.d_v * static_cast<std::int64_t>(SizeOf(dtype));
}

// One message per rank: outputs, then LSEs. Ranks without keys hold poison; a few owners do as
// well.
struct Messages {
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> bounds;  // [ranks, tokens]
  std::int64_t stride;
  std::int64_t lse_at;
};

Messages RandomMessages(const Shape& s, bool faults, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const std::int64_t rows = std::int64_t{s.tokens} * s.heads;
  Messages m{.lse_at = rows * RowBytes(s, s.partial)};
  m.stride = m.lse_at + rows * 4 + s.pad;
  m.bytes.assign(static_cast<std::size_t>(s.ranks * m.stride), kJunk);
  const float poison[] = {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf};
  for (int r = 0; r < s.ranks; ++r) {
    for (int t = 0; t < s.tokens; ++t) {
      const bool owned = random() % 4 != 0;
      m.bounds.push_back(owned ? static_cast<int>(random() % 100) + 1 : 0);
      for (int h = 0; h < s.heads; ++h) {
        const std::int64_t row = std::int64_t{t} * s.heads + h;
        const bool bad = !owned || (faults && random() % 16 == 0);
        const float lse = bad && random() % 2 == 0 ? poison[random() % 3] : 9 * normal(random);
        std::byte* const message = m.bytes.data() + r * m.stride;
        std::memcpy(message + m.lse_at + row * 4, &lse, 4);
        for (int i = 0; i < s.d_v; ++i) {
          const float x = bad && random() % 64 == 0 ? poison[random() % 3] : normal(random);
          std::byte* const at = message + row * RowBytes(s, s.partial);
          if (s.partial == DType::kBf16) {
            const Bf16 rounded = ToBf16(x);
            std::memcpy(at + i * 2, &rounded, 2);
          } else {
            std::memcpy(at + i * 4, &x, 4);
          }
        }
      }
    }
  }
  return m;
}

struct Rows {
  std::vector<std::byte> out;
  std::vector<float> lse;
  std::int64_t faults = 0;
};

Rows NoRows(const Shape& s) {
  const std::int64_t rows = std::int64_t{s.tokens + s.more_tokens} * s.heads;
  return {
      .out = std::vector<std::byte>(static_cast<std::size_t>(rows * RowBytes(s, s.output)), kJunk),
      .lse = std::vector<float>(static_cast<std::size_t>(rows), 3.25f)};
}

// A step in device memory, with its bounds.
class StepOnDevice {
 public:
  StepOnDevice(const Shape& s, const std::vector<std::int32_t>& bounds)
      : bounds_(ToDevice(bounds)),
        step_(ToDevice(std::vector<DeviceStep>{{.tokens = s.tokens,
                                                .bounds = bounds_.as<std::int32_t>(),
                                                .output_dtype = s.output,
                                                .lse_base = s.lse_base}})) {}
  const DeviceStep* get() const { return step_.as<DeviceStep>(); }

 private:
  cuda::DeviceBuffer bounds_, step_;
};

bool Same(const Rows& a, const Rows& b) {
  return a.out == b.out && a.faults == b.faults &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

template <LogBase B>
Rows HostMerge(const Shape& s, const Messages& m) {
  Rows rows = NoRows(s);
  std::vector<MergeSource> sources;
  for (int r = 0; r < s.ranks; ++r) {
    const std::byte* const message = m.bytes.data() + r * m.stride;
    sources.push_back({.out = message, .lse = message + m.lse_at});
  }
  rows.faults = MergePartials<B>({.sources = sources.data(),
                                  .bounds = m.bounds.data(),
                                  .bounds_stride = s.tokens,
                                  .ranks = s.ranks,
                                  .tokens = s.tokens,
                                  .heads = s.heads,
                                  .d_v = s.d_v,
                                  .partial_dtype = s.partial,
                                  .output_dtype = s.output,
                                  .output = rows.out.data(),
                                  .output_token_stride = std::int64_t{s.heads} * s.d_v,
                                  .lse = rows.lse.data(),
                                  .lse_token_stride = s.heads,
                                  .lse_base = s.lse_base});
  return rows;
}

template <LogBase B>
Rows DeviceMerge(const Shape& s, const Messages& m) {
  Rows rows = NoRows(s);
  const cuda::DeviceBuffer messages = ToDevice(m.bytes);
  const cuda::DeviceBuffer out = ToDevice(rows.out);
  const cuda::DeviceBuffer lse = ToDevice(rows.lse);
  const cuda::DeviceBuffer faults = ToDevice(std::vector<std::int64_t>{0});
  const StepOnDevice step(s, m.bounds);
  RequireOk(MergePartialsCuda<B>({.out = messages.data(),
                                  .lse = messages.data() + m.lse_at,
                                  .message_stride = m.stride,
                                  .ranks = s.ranks,
                                  .heads = s.heads,
                                  .d_v = s.d_v,
                                  .partial_dtype = s.partial,
                                  .output = out.data(),
                                  .merged_lse = lse.as<float>(),
                                  .faults = faults.as<std::int64_t>(),
                                  .max_tokens = s.tokens + s.more_tokens,
                                  .step = step.get()},
                                 TestStream().ref()));
  rows.out = ToHost<std::byte>(out);
  rows.lse = ToHost<float>(lse);
  rows.faults = ToHost<std::int64_t>(faults)[0];
  return rows;
}

// Every rank's LSEs as an all-gather leaves them: [ranks][groups][tokens, heads].
std::vector<float> RandomLses(const Shape& s, int groups, bool faults, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> lse(static_cast<std::size_t>(s.ranks) * groups * s.tokens * s.heads);
  for (float& x : lse) x = faults && random() % 50 == 0 ? -kInf : 5 * normal(random);
  return lse;
}

float ItemAt(const std::byte* row, int i, DType dtype) {
  if (dtype == DType::kBf16) {
    Bf16 item;
    std::memcpy(&item, row + i * 2, 2);
    return ToFloat(item);
  }
  float item;
  std::memcpy(&item, row + i * 4, 4);
  return item;
}

bool IsFiniteRow(const std::byte* row, int d_v, DType dtype) {
  for (int i = 0; i < d_v; ++i) {
    if (!std::isfinite(ItemAt(row, i, dtype))) return false;
  }
  return true;
}

// The merged LSE of group `rank`, and what a rank counts, from its scaled partials.
template <LogBase B>
void HostScaleRows(const Shape& s, int rank, const Messages& scaled, const std::vector<float>& lse,
                   const std::vector<std::int32_t>& bounds, Rows& rows) {
  const std::int64_t count = std::int64_t{s.tokens} * s.heads;
  for (int g = 0; g < s.ranks; ++g) {
    for (std::int64_t row = 0; row < count; ++row) {
      bool owned[kMaxRanks];
      Lse<B> lses[kMaxRanks];
      float weight[kMaxRanks];
      for (int r = 0; r < s.ranks; ++r) {
        owned[r] = bounds[r * s.tokens + row / s.heads] > 0;
        lses[r].raw = lse[(std::int64_t{r} * s.ranks + g) * count + row];
      }
      const RowWeights<B> merged = MergeWeights<B>(s.ranks, owned, lses, weight);
      const std::byte* const partial =
          scaled.bytes.data() + g * scaled.stride + row * RowBytes(s, s.partial);
      const bool fault =
          merged.fault ? g == rank : owned[rank] && !IsFiniteRow(partial, s.d_v, s.partial);
      if (fault) ++rows.faults;
      if (g != rank) continue;
      rows.lse[row] = WithLogBase(
          s.lse_base, [&](auto base) { return LseCast<decltype(base)::value>(merged.lse).raw; });
    }
  }
}

template <LogBase B>
void CheckScale(const Shape& s) {
  const int groups = s.ranks;
  // The group's rows are those of a message, its LSE the padding.
  Shape message = s;
  message.ranks = groups;
  Messages partial = RandomMessages(message, true, 5);
  const std::vector<float> lse = RandomLses(s, groups, true, 6);
  const std::vector<std::int32_t> bounds = RandomMessages(s, false, 7).bounds;
  const std::int64_t group_lse_bytes = std::int64_t{s.tokens} * s.heads * 4;
  const cuda::DeviceBuffer device_partial = ToDevice(partial.bytes);
  const cuda::DeviceBuffer device_lse = ToDevice(lse);
  Rows got = NoRows(s);
  Rows want = got;
  const cuda::DeviceBuffer merged_lse = ToDevice(got.lse);
  const cuda::DeviceBuffer faults = ToDevice(std::vector<std::int64_t>{0});
  const StepOnDevice step(s, bounds);
  const int rank = s.ranks / 2;
  RequireOk(ScalePartialCuda<B>({.partial = device_partial.data(),
                                 .group_stride = partial.stride,
                                 .lse = device_lse.data(),
                                 .lse_rank_stride = groups * group_lse_bytes,
                                 .lse_group_stride = group_lse_bytes,
                                 .rank = rank,
                                 .ranks = s.ranks,
                                 .groups = groups,
                                 .heads_per_group = s.heads,
                                 .d_v = s.d_v,
                                 .partial_dtype = s.partial,
                                 .merged_lse = merged_lse.as<float>(),
                                 .faults = faults.as<std::int64_t>(),
                                 .max_tokens = s.tokens + s.more_tokens,
                                 .step = step.get()},
                                TestStream().ref()));
  ScalePartial<B>({.partial = partial.bytes.data(),
                   .group_stride = partial.stride,
                   .lse = reinterpret_cast<const std::byte*>(lse.data()),
                   .bounds = bounds.data(),
                   .bounds_stride = s.tokens,
                   .rank = rank,
                   .ranks = s.ranks,
                   .groups = groups,
                   .tokens = s.tokens,
                   .heads_per_group = s.heads,
                   .d_v = s.d_v,
                   .partial_dtype = s.partial});
  CHECK(ToHost<std::byte>(device_partial) == partial.bytes);
  HostScaleRows<B>(s, rank, partial, lse, bounds, want);
  got.lse = ToHost<float>(merged_lse);
  got.faults = ToHost<std::int64_t>(faults)[0];
  CHECK(Same(got, want));
}

// Random rows, and one whose items are too large for bf16.
void CheckConvert(const Shape& s) {
  Shape one = s;
  one.ranks = 1;
  one.pad = 0;
  Messages in = RandomMessages(one, true, 8);
  if (s.partial == DType::kF32) {
    const float large = 3.4e38f;
    std::memcpy(in.bytes.data(), &large, sizeof(large));
  }
  Rows got = NoRows(s);
  Rows want = got;
  const std::int64_t rows = std::int64_t{s.tokens} * s.heads;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::byte* const from = in.bytes.data() + row * RowBytes(s, s.partial);
    std::byte* const to = want.out.data() + row * RowBytes(s, s.output);
    for (int i = 0; i < s.d_v; ++i) {
      const float x = ItemAt(from, i, s.partial);
      const Bf16 rounded = ToBf16(x);
      s.output == DType::kBf16 ? std::memcpy(to + i * 2, &rounded, 2)
                               : std::memcpy(to + i * 4, &x, 4);
    }
    want.faults += IsFiniteRow(from, s.d_v, s.partial) && !IsFiniteRow(to, s.d_v, s.output);
  }
  const cuda::DeviceBuffer device_in = ToDevice(in.bytes);
  const cuda::DeviceBuffer out = ToDevice(got.out);
  const cuda::DeviceBuffer faults = ToDevice(std::vector<std::int64_t>{0});
  RequireOk(ConvertRowsCuda({.in = device_in.data(),
                             .in_dtype = s.partial,
                             .out = out.data(),
                             .out_dtype = s.output,
                             .rows = rows,
                             .d_v = s.d_v,
                             .faults = faults.as<std::int64_t>()},
                            TestStream().ref()));
  got.out = ToHost<std::byte>(out);
  got.faults = ToHost<std::int64_t>(faults)[0];
  CHECK(Same(got, want));
}

// f(shape) for all combinations of types; d_v 6 and a pad of 4 need narrow access.
template <class F>
void ForEachShape(F f) {
  const std::vector<int> counts =
      testing::SmallSizes() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 8, 64};
  for (const int ranks : counts) {
    for (const int d_v : {512, 64, 6}) {
      for (const DType partial : {DType::kBf16, DType::kF32}) {
        for (const DType output : {DType::kBf16, DType::kF32}) {
          for (const LogBase lse_base : {LogBase::kE, LogBase::kTwo}) {
            const Shape s{.ranks = ranks,
                          .tokens = 5,
                          .heads = 12,
                          .d_v = d_v,
                          .partial = partial,
                          .output = output,
                          .lse_base = lse_base,
                          .pad = d_v == 64 ? 4 : 0,
                          .more_tokens = ranks == 3 ? 2 : 0};
            INFO(ranks << " ranks, d_v " << d_v << ", " << DTypeName(partial) << " to "
                       << DTypeName(output) << ", merged LSE base " << LogBaseName(lse_base));
            f(s);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("A merge on the device has the bits of one on the host") {
  ForEachShape([](const Shape& s) {
    for (const bool faults : {false, true}) {
      for (unsigned seed = 1; seed <= 3; ++seed) {
        const Messages m = RandomMessages(s, faults, seed);
        CHECK(Same(DeviceMerge<LogBase::kE>(s, m), HostMerge<LogBase::kE>(s, m)));
        CHECK(Same(DeviceMerge<LogBase::kTwo>(s, m), HostMerge<LogBase::kTwo>(s, m)));
      }
    }
  });
}

TEST_CASE("Scaling and converting rows on the device has the bits of the host") {
  ForEachShape([](const Shape& s) {
    CheckScale<LogBase::kE>(s);
    CheckScale<LogBase::kTwo>(s);
    CheckConvert(s);
  });
}

TEST_CASE("A merged logarithm rounds as on the host") {
  // One element per row is enough; many rows make many sums.
  const Shape s{.ranks = 8,
                .tokens = 256,
                .heads = 128,
                .d_v = 2,
                .partial = DType::kF32,
                .output = DType::kF32,
                .lse_base = LogBase::kE};
  const Messages m = RandomMessages(s, false, 11);
  CHECK(Same(DeviceMerge<LogBase::kE>(s, m), HostMerge<LogBase::kE>(s, m)));
  CHECK(Same(DeviceMerge<LogBase::kTwo>(s, m), HostMerge<LogBase::kTwo>(s, m)));
}

TEST_CASE("Shapes that a merge cannot do are refused") {
  DeviceMergeArgs args{.ranks = kMaxRanks + 1, .heads = 1, .d_v = 64, .max_tokens = 1};
  CHECK(MergePartialsCuda<LogBase::kE>(args, TestStream().ref()).reason() == Reason::kInternal);
  args.ranks = 1;
  args.d_v = 7;
  CHECK(MergePartialsCuda<LogBase::kE>(args, TestStream().ref()).reason() == Reason::kInternal);
}

}  // namespace dcp::test
