#include "client/workload/synthetic.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "client/workload/truth.h"

namespace dcp {
namespace {

struct Dims {
  int kv_lora_rank;
  int rope;
};
constexpr Dims kDims[] = {{512, 64}, {512, 0}, {256, 64}, {128, 32}, {64, 16}};
constexpr double kScale = 0.1352;

Content TestContent(std::uint64_t id) { return Content(id, {{id + 1000, 7}, {id + 2000, 40}}); }

double Logit(std::span<const Bf16> q, std::span<const Bf16> k) {
  double sum = 0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    sum += static_cast<double>(ToFloat(q[i])) * static_cast<double>(ToFloat(k[i]));
  }
  return kScale * sum;
}

// What design §9 asks of a row.
struct RowWeights {
  double last;
  double earlier;
  double leaked;  // of the first token beyond the bound
};

RowWeights Weigh(const std::vector<double>& logits, std::int64_t position, std::int64_t earlier) {
  // Not shifted by a maximum: logits are below 20.
  double sum = 0;
  for (std::int64_t p = 0; p <= position; ++p) sum += std::exp(logits[static_cast<std::size_t>(p)]);
  const auto weight = [&](std::int64_t p) { return std::exp(logits[static_cast<std::size_t>(p)]); };
  return {weight(position) / sum, weight(earlier) / sum,
          weight(position + 1) / (sum + weight(position + 1))};
}

// Owner by the definition of the shard map, to see how rank LSEs differ.
double LseSpread(const std::vector<double>& logits, std::int64_t position, int ranks,
                 int interleave) {
  std::vector<double> sums(static_cast<std::size_t>(ranks), 0.0);
  for (std::int64_t p = 0; p <= position; ++p) {
    sums[static_cast<std::size_t>(p / interleave % ranks)] +=
        std::exp(logits[static_cast<std::size_t>(p)]);
  }
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  int owners = 0;
  for (const double s : sums) {
    if (s == 0) continue;
    ++owners;
    low = std::min(low, std::log(s));
    high = std::max(high, std::log(s));
  }
  return owners < 2 ? -1 : high - low;
}

TEST_CASE("Synthetic rows discriminate", "[synthetic]") {
  constexpr int kHeads = 4;
  const std::vector<std::int64_t> lengths = {3,  4,  5,  6,   7,   8,   9,    12,   16,   24,  32,
                                             48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192};
  for (const Dims dims : kDims) {
    const int d = dims.kv_lora_rank + dims.rope;
    const Synthetic synthetic({kHeads, d, kScale}, 42);
    const auto size = static_cast<std::size_t>(d);
    std::int64_t spread_rows = 0, wide_rows = 0;
    double dims_last = 1, dims_earlier = 1, dims_leaked = 1;
    for (const std::int64_t length : lengths) {
      // More samples where they are cheap.
      const int samples = length <= 128 ? 60 : length <= 1024 ? 8 : 2;
      for (int s = 0; s < samples; ++s) {
        const Content content = TestContent(static_cast<std::uint64_t>(s));
        const int layer = s % 3;
        const std::int64_t position = length - 1;
        std::vector<Bf16> latents(static_cast<std::size_t>(length + 1) * size);
        synthetic.Latents(content, layer, 0, latents);
        std::vector<Bf16> queries(kHeads * size);
        synthetic.Queries(content, layer, position, queries);
        for (int h = 0; h < kHeads; ++h) {
          const auto q =
              std::span<const Bf16>(queries).subspan(static_cast<std::size_t>(h) * size, size);
          std::vector<double> logits;
          for (std::int64_t p = 0; p <= length; ++p) {
            logits.push_back(Logit(q, std::span<const Bf16>(latents).subspan(
                                          static_cast<std::size_t>(p) * size, size)));
          }
          const std::int64_t e = synthetic.EarlierToken(content, layer, position, h);
          REQUIRE((e >= 0 && e < position));
          const RowWeights w = Weigh(logits, position, e);
          dims_last = std::min(dims_last, w.last);
          dims_earlier = std::min(dims_earlier, w.earlier);
          dims_leaked = std::min(dims_leaked, w.leaked);
          for (const int ranks : {2, 3, 4, 8}) {
            for (const int interleave : {1, 2, 16, 64}) {
              const double spread = LseSpread(logits, position, ranks, interleave);
              if (spread < 0) continue;
              ++spread_rows;
              if (spread >= 1) ++wide_rows;
            }
          }
        }
      }
    }
    const double wide = static_cast<double>(wide_rows) / static_cast<double>(spread_rows);
    INFO(dims.kv_lora_rank << "+" << dims.rope << ": smallest weight of the last token "
                           << dims_last << ", of the earlier " << dims_earlier << ", of a leak "
                           << dims_leaked << "; ranks differ by 1 nat in " << wide);
    CHECK(dims_last >= 0.05);
    CHECK(dims_earlier >= 0.05);
    CHECK(dims_leaked >= 0.05);
    CHECK(wide >= 0.5);
  }
}

TEST_CASE("Synthetic data is a function of its key", "[synthetic]") {
  const Synthetic a({3, 80, kScale}, 7);
  const Synthetic b({3, 80, kScale}, 7);
  const Synthetic other({3, 80, kScale}, 8);
  const Content content(5);
  std::vector<Bf16> x(240), y(240), z(240);
  a.Queries(content, 1, 9, x);
  b.Queries(content, 1, 9, y);
  other.Queries(content, 1, 9, z);
  CHECK(x == y);
  CHECK(x != z);

  SECTION("one head has the bytes of all heads") {
    std::vector<Bf16> head(80);
    a.Query(content, 1, 9, 2, head);
    CHECK(std::equal(head.begin(), head.end(), x.begin() + 160));
  }
  SECTION("layers, offsets and contents differ") {
    std::vector<Bf16> l0(80), l1(80), l2(80), l3(80);
    a.Latent({5, 3}, 0, l0);
    a.Latent({5, 3}, 1, l1);
    a.Latent({5, 4}, 0, l2);
    a.Latent({6, 3}, 0, l3);
    CHECK(l0 != l1);
    CHECK(l0 != l2);
    CHECK(l0 != l3);
  }
  SECTION("values are what they were: a change of the generator changes recorded results") {
    std::vector<Bf16> latent(80);
    Synthetic({1, 80, kScale}, 1).Latent({2, 3}, 4, latent);
    std::uint64_t hash = 0;
    for (const Bf16 v : latent) hash = HashWords(hash, v.bits);
    CHECK(hash == 12945857691056601589u);
  }
}

TEST_CASE("Synthetic latents have mean 0 and variance 1", "[synthetic]") {
  for (const int d : {576, 512, 80, 77}) {
    const Synthetic synthetic({1, d, kScale}, 3);
    std::vector<Bf16> out(static_cast<std::size_t>(d) * 200);
    synthetic.Latents(Content(1), 0, 0, out);
    double sum = 0, squares = 0;
    for (const Bf16 v : out) {
      sum += static_cast<double>(ToFloat(v));
      squares += static_cast<double>(ToFloat(v) * ToFloat(v));
    }
    const auto n = static_cast<double>(out.size());
    CHECK(std::abs(sum / n) < 0.05);
    CHECK(squares / n == Approx(1).margin(0.05));
  }
}

TEST_CASE("Content maps positions to segments and then to the tail", "[synthetic]") {
  const Content content(9, {{1, 2}, {2, 0}, {3, 3}});
  CHECK(content.segment_tokens() == 5);
  CHECK(content.At(0) == TokenKey{1, 0});
  CHECK(content.At(1) == TokenKey{1, 1});
  CHECK(content.At(2) == TokenKey{3, 0});
  CHECK(content.At(4) == TokenKey{3, 2});
  CHECK(content.At(5) == TokenKey{9, 0});
  CHECK(content.At(1'000'000) == TokenKey{9, 999'995});
}

TEST_CASE("Sequences that begin alike share latents", "[synthetic]") {
  const Synthetic synthetic({1, 80, kScale}, 3);
  const Content a(100, {{1, 4}, {2, 4}});
  const Content b(200, {{1, 4}, {3, 4}});
  std::vector<Bf16> x(80 * 8), y(80 * 8);
  synthetic.Latents(a, 0, 0, x);
  synthetic.Latents(b, 0, 0, y);
  CHECK(std::equal(x.begin(), x.begin() + 320, y.begin()));
  CHECK(!std::equal(x.begin() + 320, x.end(), y.begin() + 320));
}

TEST_CASE("A sequence that repeats one content still has finite queries", "[synthetic]") {
  const Synthetic synthetic({2, 80, kScale}, 3);
  const Content content(100, {{1, 1}, {1, 1}, {1, 1}, {1, 1}});
  std::vector<Bf16> out(160);
  for (int p = 0; p < 4; ++p) {
    synthetic.Queries(content, 0, p, out);
    CHECK(std::all_of(out.begin(), out.end(), [](Bf16 v) { return std::isfinite(ToFloat(v)); }));
  }
}

}  // namespace
}  // namespace dcp
