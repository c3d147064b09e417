#include "kernels/merge.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/merge_math.h"
#include "tests/kernels/for_each_target.h"

namespace dcp {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

// Partials of several ranks as plain floats, to be stored in either dtype.
struct Shards {
  int ranks;
  int tokens;
  int heads;
  int d_v;
  std::vector<std::int32_t> bounds;     // [ranks, tokens]
  std::vector<std::vector<float>> out;  // per rank [tokens, heads, d_v]
  std::vector<std::vector<float>> lse;  // per rank [tokens, heads]
};

Shards OneRow(std::vector<float> outputs, std::vector<float> lses, std::vector<int> bounds,
              int d_v) {
  Shards s{.ranks = static_cast<int>(outputs.size()), .tokens = 1, .heads = 1, .d_v = d_v};
  for (int r = 0; r < s.ranks; ++r) {
    s.bounds.push_back(bounds[r]);
    s.out.emplace_back(d_v, outputs[r]);
    s.lse.emplace_back(1, lses[r]);
  }
  return s;
}

std::vector<std::byte> Bytes(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * SizeOf(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Bf16 rounded = ToBf16(values[i]);
    const void* const from = dtype == DType::kBf16 ? static_cast<const void*>(&rounded)
                                                   : static_cast<const void*>(&values[i]);
    std::memcpy(&bytes[i * SizeOf(dtype)], from, SizeOf(dtype));
  }
  return bytes;
}

std::vector<float> Floats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBf16) {
      Bf16 rounded;
      std::memcpy(&rounded, &bytes[i * 2], 2);
      values[i] = ToFloat(rounded);
    } else {
      std::memcpy(&values[i], &bytes[i * 4], 4);
    }
  }
  return values;
}

struct Merged {
  std::vector<float> out;  // [tokens, heads, d_v]
  std::vector<float> lse;  // [tokens, heads]
  std::int64_t faults;
};

template <LogBase B>
Merged Merge(const Shards& s, DType partial = DType::kF32, DType output = DType::kF32,
             LogBase lse_base = B) {
  std::vector<std::vector<std::byte>> out;
  std::vector<MergeSource> sources;
  for (const std::vector<float>& values : s.out) out.push_back(Bytes(values, partial));
  for (int r = 0; r < s.ranks; ++r) {
    sources.push_back({out[r].data(), reinterpret_cast<const std::byte*>(s.lse[r].data())});
  }
  const std::size_t rows = static_cast<std::size_t>(s.tokens) * s.heads;
  std::vector<std::byte> merged(rows * s.d_v * SizeOf(output), std::byte{0x41});
  Merged m{.lse = std::vector<float>(rows, 3.25f)};
  m.faults = MergePartials<B>({.sources = sources.data(),
                               .bounds = s.bounds.data(),
                               .bounds_stride = s.tokens,
                               .ranks = s.ranks,
                               .tokens = s.tokens,
                               .heads = s.heads,
                               .d_v = s.d_v,
                               .partial_dtype = partial,
                               .output_dtype = output,
                               .output = merged.data(),
                               .output_token_stride = std::int64_t{s.heads} * s.d_v,
                               .lse = m.lse.data(),
                               .lse_token_stride = s.heads,
                               .lse_base = lse_base});
  m.out = Floats(merged, output);
  return m;
}

template <LogBase B>
float LogOf(double z) {
  return static_cast<float>(B == LogBase::kTwo ? std::log2(z) : std::log(z));
}

// Random shards of which some own nothing and hold poison there. LSEs are up to 8 nats apart.
template <LogBase B>
Shards RandomShards(int ranks, int tokens, int heads, int d_v, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Shards s{.ranks = ranks, .tokens = tokens, .heads = heads, .d_v = d_v};
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> out;
    std::vector<float> lse;
    for (int t = 0; t < tokens; ++t) {
      const bool owned = r == t % ranks || random() % 4 != 0;
      s.bounds.push_back(owned ? static_cast<int>(random() % 100) + 1 : 0);
      for (int h = 0; h < heads; ++h) {
        lse.push_back(owned ? 20.0f + 1.5f * normal(random) : kInf);
        for (int i = 0; i < d_v; ++i) out.push_back(owned ? normal(random) : kNaN);
      }
    }
    s.out.push_back(out);
    s.lse.push_back(lse);
  }
  return s;
}

template <LogBase B>
void CheckAgainstDouble(DType partial, DType output) {
  for (const int ranks : {1, 2, 3, 5, 8, 64}) {
    for (const int d_v : {512, 64, 13}) {
      const int tokens = 3;
      const int heads = 4;
      const Shards s = RandomShards<B>(ranks, tokens, heads, d_v, 17u * ranks + d_v);
      const Merged m = Merge<B>(s, partial, output);
      CHECK(m.faults == 0);
      const double unit = B == LogBase::kTwo ? std::log(2.0) : 1.0;
      for (int t = 0; t < tokens; ++t) {
        for (int h = 0; h < heads; ++h) {
          const std::size_t row = static_cast<std::size_t>(t) * heads + h;
          double z = 0;
          std::vector<double> sum(static_cast<std::size_t>(d_v));
          for (int r = 0; r < ranks; ++r) {
            if (s.bounds[r * tokens + t] == 0) continue;
            const double weight = std::exp(unit * s.lse[r][row]);
            z += weight;
            for (int i = 0; i < d_v; ++i) {
              const float x = s.out[r][row * d_v + i];
              sum[i] += weight * (partial == DType::kBf16 ? ToFloat(ToBf16(x)) : x);
            }
          }
          double error = 0;
          double norm = 0;
          for (int i = 0; i < d_v; ++i) {
            error += std::pow(m.out[row * d_v + i] - sum[i] / z, 2);
            norm += std::pow(sum[i] / z, 2);
          }
          const double limit = output == DType::kBf16 ? 4e-3 : 1e-6;
          INFO("ranks " << ranks << ", d_v " << d_v);
          CHECK(std::sqrt(error / norm) < limit);
          CHECK(m.lse[row] == Approx(std::log(z) / unit).epsilon(1e-6));
        }
      }
    }
  }
}

template <LogBase B>
void CheckGolden() {
  // Z = 2 and 8 with outputs 0 and 10: 8, and not the 7.2 that the other base gives.
  const Shards s = OneRow({0, 10}, {LogOf<B>(2), LogOf<B>(8)}, {1, 1}, 20);
  const Merged m = Merge<B>(s);
  CHECK(m.faults == 0);
  CHECK(m.lse[0] == Approx(LogOf<B>(10)).epsilon(1e-6));
  for (const float x : m.out) CHECK(x == Approx(8.0).epsilon(1e-6));
  for (const float x : Merge<B>(s, DType::kBf16, DType::kBf16).out) CHECK(x == 8.0f);
  // Far from zero, where a difference of LSEs is all that counts.
  const Shards far = OneRow({0, 10}, {300 + LogOf<B>(2), 300 + LogOf<B>(8)}, {1, 1}, 20);
  for (const float x : Merge<B>(far).out) CHECK(x == Approx(8.0).epsilon(1e-4));
}

// A rank without keys beside one that has some: whatever it holds, it does not count.
template <LogBase B>
void CheckEmptyShards() {
  struct Junk {
    float out;
    float lse;
  };
  const Junk junk[] = {{0, -kInf}, {kNaN, -kInf}, {0, kInf},  {kNaN, kInf},
                       {0, 0},     {kNaN, kNaN},  {kInf, 300}};
  for (const Junk& j : junk) {
    for (const bool first : {true, false}) {
      const Shards s = first ? OneRow({j.out, 1}, {j.lse, -2}, {0, 4}, 21)
                             : OneRow({1, j.out}, {-2, j.lse}, {4, 0}, 21);
      const Merged m = Merge<B>(s);
      INFO("output " << j.out << ", lse " << j.lse);
      CHECK(m.faults == 0);
      CHECK(m.lse[0] == -2);
      for (const float x : m.out) CHECK(x == 1.0f);
    }
  }
  const Merged none = Merge<B>(OneRow({kNaN, 5}, {kInf, 0}, {0, 0}, 21));
  CHECK(none.faults == 0);
  CHECK(none.lse[0] == -kInf);
  for (const float x : none.out) CHECK(x == 0.0f);
}

template <LogBase B>
void CheckFaults() {
  // An owner that reports no number: its empty mark included.
  for (const float lse : {kInf, -kInf, kNaN}) {
    for (const DType output : {DType::kF32, DType::kBf16}) {
      const Merged m = Merge<B>(OneRow({1, 2}, {lse, 3}, {1, 1}, 21), DType::kF32, output);
      CHECK(m.faults == 1);
      CHECK(std::isnan(m.lse[0]));
      for (const float x : m.out) CHECK(std::isnan(x));
    }
  }
  // An owner whose output is not finite, also where its weight has become 0.
  for (const float out : {kNaN, kInf}) {
    for (const float lse : {3.0f, -500.0f}) {
      const Merged m = Merge<B>(OneRow({out, 2}, {lse, 3}, {1, 1}, 21));
      CHECK(m.faults == 1);
      CHECK(std::isfinite(m.lse[0]));
      for (const float x : m.out) CHECK_FALSE(std::isfinite(x));
    }
  }
  // One element is enough, wherever it is; other rows are not touched.
  for (const int i : {0, 7, 15, 16, 20}) {
    Shards s{.ranks = 1, .tokens = 1, .heads = 2, .d_v = 21, .bounds = {1}};
    s.out = {std::vector<float>(42, 1.0f)};
    s.lse = {{0, 0}};
    s.out[0][21 + i] = kNaN;
    const Merged m = Merge<B>(s);
    CHECK(m.faults == 1);
    for (int k = 0; k < 42; ++k) CHECK(std::isnan(m.out[k]) == (k == 21 + i));
  }
  // Finite in fp32, not in what is stored.
  CHECK(Merge<B>(OneRow({3.4e38f}, {0}, {1}, 21)).faults == 0);
  CHECK(Merge<B>(OneRow({3.4e38f}, {0}, {1}, 21), DType::kF32, DType::kBf16).faults == 1);
}

// The bits are those of the definition: weights from MergeWeights, ranks in order, fma.
template <LogBase B>
void CheckBits() {
  const Shards s = RandomShards<B>(5, 4, 3, 77, 99);
  const Merged m = Merge<B>(s);
  for (int t = 0; t < s.tokens; ++t) {
    bool owned[5];
    for (int r = 0; r < 5; ++r) owned[r] = s.bounds[r * s.tokens + t] > 0;
    for (int h = 0; h < s.heads; ++h) {
      const std::size_t row = static_cast<std::size_t>(t) * s.heads + h;
      Lse<B> lse[5];
      float weight[5];
      for (int r = 0; r < 5; ++r) lse[r] = {s.lse[r][row]};
      const RowWeights<B> w = MergeWeights<B>(5, owned, lse, weight);
      CHECK(m.lse[row] == w.lse.raw);
      for (int i = 0; i < s.d_v; ++i) {
        float acc = 0;
        for (int r = 0; r < 5; ++r) {
          if (owned[r]) acc = std::fma(weight[r], s.out[r][row * s.d_v + i], acc);
        }
        CHECK(m.out[row * s.d_v + i] == acc);
      }
    }
  }
}

template <LogBase B>
void CheckScale(DType dtype) {
  const int groups = 2;
  const int per_group = 3;
  const Shards s = RandomShards<B>(4, 3, groups * per_group, 37, 5);
  // [ranks][groups][tokens, per_group]
  std::vector<float> lse;
  for (int r = 0; r < s.ranks; ++r) {
    for (int g = 0; g < groups; ++g) {
      for (int t = 0; t < s.tokens; ++t) {
        for (int h = 0; h < per_group; ++h) {
          lse.push_back(s.lse[r][t * s.heads + g * per_group + h]);
        }
      }
    }
  }
  std::vector<double> sum(static_cast<std::size_t>(s.tokens) * s.heads * s.d_v);
  for (int rank = 0; rank < s.ranks; ++rank) {
    std::vector<float> partial;  // [groups][tokens, per_group, d_v], one junk row between groups
    for (int g = 0; g < groups; ++g) {
      for (int t = 0; t < s.tokens; ++t) {
        for (int h = 0; h < per_group; ++h) {
          for (int i = 0; i < s.d_v; ++i) {
            partial.push_back(s.out[rank][(t * s.heads + g * per_group + h) * s.d_v + i]);
          }
        }
      }
      partial.insert(partial.end(), static_cast<std::size_t>(s.d_v), 42.0f);
    }
    const std::size_t group_items = partial.size() / groups;
    std::vector<std::byte> bytes = Bytes(partial, dtype);
    ScalePartial<B>({.partial = bytes.data(),
                     .group_stride = static_cast<std::int64_t>(group_items * SizeOf(dtype)),
                     .lse = reinterpret_cast<const std::byte*>(lse.data()),
                     .bounds = s.bounds.data(),
                     .bounds_stride = s.tokens,
                     .rank = rank,
                     .ranks = s.ranks,
                     .groups = groups,
                     .tokens = s.tokens,
                     .heads_per_group = per_group,
                     .d_v = s.d_v,
                     .partial_dtype = dtype});
    const std::vector<float> scaled = Floats(bytes, dtype);
    for (int g = 0; g < groups; ++g) {
      for (int i = 0; i < s.d_v; ++i) CHECK(scaled[(g + 1) * group_items - s.d_v + i] == 42.0f);
      for (int t = 0; t < s.tokens; ++t) {
        for (int h = 0; h < per_group; ++h) {
          for (int i = 0; i < s.d_v; ++i) {
            const float x = scaled[g * group_items + (t * per_group + h) * s.d_v + i];
            if (s.bounds[rank * s.tokens + t] == 0) CHECK(x == 0.0f);
            sum[(t * s.heads + g * per_group + h) * s.d_v + i] += x;
          }
        }
      }
    }
  }
  // What a reduce-scatter would add up is what a merge gives.
  const Merged m = Merge<B>(s, dtype, DType::kF32);
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    error += std::pow(sum[i] - m.out[i], 2);
    norm += std::pow(m.out[i], 2);
  }
  CHECK(std::sqrt(error / norm) < (dtype == DType::kBf16 ? 4e-3 : 1e-6));
}

}  // namespace

TEST_CASE("Two shards with Z = 2 and 8 and outputs 0 and 10 give 8") {
  CheckGolden<LogBase::kE>();
  CheckGolden<LogBase::kTwo>();
}

TEST_CASE("A merge equals the weighted mean in double") {
  for (const DType partial : {DType::kF32, DType::kBf16}) {
    for (const DType output : {DType::kF32, DType::kBf16}) {
      CheckAgainstDouble<LogBase::kE>(partial, output);
      CheckAgainstDouble<LogBase::kTwo>(partial, output);
    }
  }
}

TEST_CASE("A rank that owns no key is never read") {
  CheckEmptyShards<LogBase::kE>();
  CheckEmptyShards<LogBase::kTwo>();
}

TEST_CASE("Faults of an owner are shown and counted") {
  CheckFaults<LogBase::kE>();
  CheckFaults<LogBase::kTwo>();
}

TEST_CASE("A merge has the bits of its definition, with every instruction set") {
  test::ForEachTarget([] {
    CheckBits<LogBase::kE>();
    CheckBits<LogBase::kTwo>();
  });
}

TEST_CASE("The merged LSE is reported in the wanted base") {
  const Shards s = OneRow({1, 1}, {std::log(3.0f), std::log(5.0f)}, {1, 1}, 8);
  CHECK(Merge<LogBase::kE>(s, DType::kF32, DType::kF32, LogBase::kE).lse[0] ==
        Approx(std::log(8.0)).epsilon(1e-6));
  CHECK(Merge<LogBase::kE>(s, DType::kF32, DType::kF32, LogBase::kTwo).lse[0] ==
        Approx(3.0).epsilon(1e-6));
}

TEST_CASE("Scaled partials add up to the merge") {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    CheckScale<LogBase::kE>(dtype);
    CheckScale<LogBase::kTwo>(dtype);
  }
}

TEST_CASE("Merge exponentials are exact to 2e-7") {
  for (int i = 0; i <= 100000; ++i) {
    const float x = -87.0f * static_cast<float>(i) / 100000;
    const double e = std::exp(double{x});
    const double two = std::exp2(double{x});
    if (std::fabs(merge_math::Exp<LogBase::kE>(x) - e) > 2e-7 * e) FAIL("e^" << x);
    if (std::fabs(merge_math::Exp<LogBase::kTwo>(x) - two) > 2e-7 * two) FAIL("2^" << x);
  }
  CHECK(merge_math::Exp<LogBase::kE>(0) == 1.0f);
  CHECK(merge_math::Exp<LogBase::kTwo>(-3) == 0.125f);
  CHECK(merge_math::Exp<LogBase::kE>(-1e30f) == 0.0f);
  CHECK(merge_math::Exp<LogBase::kTwo>(-kInf) == 0.0f);
}

}  // namespace dcp
