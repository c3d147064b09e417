// Conformance of every exchange over every communicator: partials are given, not computed, so that
// merging is judged alone. Truth is a float64 merge over the ranks that own keys.
#include "runtime/exchange.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "comm/in_process.h"

namespace dcp {
namespace {

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kAgRs, ExchangeKind::kA2a};
constexpr LogBase kBases[] = {LogBase::kE, LogBase::kTwo};

// What each rank's attention is said to have produced.
struct Problem {
  ExchangeShape shape;
  int tokens = 1;
  LogBase base = LogBase::kE;
  std::vector<std::vector<float>> out;  // [ranks][tokens, heads, d_v]
  std::vector<std::vector<float>> lse;  // [ranks][tokens, heads] in `base`
  std::vector<std::int32_t> bounds;     // [ranks, tokens]

  std::size_t Row(int t, int h) const { return static_cast<std::size_t>(t * shape.heads + h); }
};

struct Answer {
  std::vector<float> out;  // [tokens, heads, d_v]
  std::vector<float> lse;  // [tokens, heads] base e
  std::int64_t faulty_rows = 0;
};

void Store(std::byte* to, float x, DType dtype) {
  const Bf16 half = ToBf16(x);
  std::memcpy(to, dtype == DType::kBf16 ? static_cast<const void*>(&half) : &x, SizeOf(dtype));
}

Answer Run(ExchangeKind kind, const Problem& p) {
  const auto ranks = static_cast<std::size_t>(p.shape.ranks);
  const auto d_v = static_cast<std::size_t>(p.shape.d_v);
  auto group = MakeInProcessGroup({.epoch = 1, .size = p.shape.ranks});
  REQUIRE(group.ok());
  Answer answer;
  answer.out.assign(p.out[0].size(), 12345.0f);
  answer.lse.assign(p.lse[0].size(), 12345.0f);
  std::vector<Status> statuses(ranks);
  std::vector<std::int64_t> faulty(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      ExchangeBuffers buffers(kind, p.shape, p.tokens + 3);
      const PartialLayout layout = buffers.Layout(p.tokens);
      const int group_heads = layout.heads_per_group;
      for (int t = 0; t < p.tokens; ++t) {
        for (int h = 0; h < p.shape.heads; ++h) {
          const std::int64_t in_group = t * group_heads + h % group_heads;
          std::byte* out =
              layout.out + (h / group_heads) * layout.out_group_stride +
              in_group * p.shape.d_v * static_cast<std::int64_t>(SizeOf(p.shape.partial_dtype));
          for (std::size_t i = 0; i < d_v; ++i) {
            Store(out + i * SizeOf(p.shape.partial_dtype), p.out[r][p.Row(t, h) * d_v + i],
                  p.shape.partial_dtype);
          }
          std::memcpy(layout.lse + (h / group_heads) * layout.lse_group_stride + in_group * 4,
                      &p.lse[r][p.Row(t, h)], 4);
        }
      }
      const std::int64_t slice = static_cast<std::int64_t>(group_heads) * p.shape.d_v * 4;
      const ExchangeArgs args{.tokens = p.tokens,
                              .bounds = p.bounds,
                              .partial_base = p.base,
                              .output_dtype = DType::kF32,
                              .output = {.data = reinterpret_cast<std::byte*>(answer.out.data()) +
                                                 static_cast<std::int64_t>(r) * slice,
                                         .rows = p.tokens,
                                         .row_bytes = slice,
                                         .stride = slice * p.shape.ranks},
                              .lse = {.data = reinterpret_cast<std::byte*>(answer.lse.data()) +
                                              static_cast<std::int64_t>(r) * group_heads * 4,
                                      .rows = p.tokens,
                                      .row_bytes = group_heads * 4,
                                      .stride = p.shape.heads * 4},
                              .lse_base = LogBase::kE,
                              .deadline = Clock::now() + Millis(20000)};
      const auto result =
          RunExchange(buffers, *(*group)[r], args, [](RankPhase) { return Status::Ok(); });
      statuses[r] = result.status();
      if (result.ok()) faulty[r] = result->faulty_rows;
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& s : statuses) REQUIRE(s.ok());
  for (const std::int64_t f : faulty) answer.faulty_rows += f;
  return answer;
}

float InBase(double natural, LogBase base) {
  return static_cast<float>(base == LogBase::kE ? natural : natural * kLog2E);
}

// One token, two heads (one of each rank), d_v = 4; every value of a rank's partial is the same.
struct Shard {
  float out;
  double lse;  // natural; given to the exchange in the declared base, infinities as they are
  int keys;
};
Problem TwoShards(LogBase base, DType dtype, Shard a, Shard b) {
  Problem p{.shape = {.ranks = 2, .heads = 2, .d_v = 4, .partial_dtype = dtype}, .base = base};
  for (const Shard& s : {a, b}) {
    p.out.push_back(std::vector<float>(8, s.out));
    p.lse.push_back(std::vector<float>(2, InBase(s.lse, base)));
    p.bounds.push_back(s.keys);
  }
  return p;
}

}  // namespace

TEST_CASE("golden: weights 2 and 8, outputs 0 and 10, make 8") {
  for (const ExchangeKind kind : kExchanges) {
    for (const LogBase base : kBases) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        const Answer answer =
            Run(kind, TwoShards(base, dtype, {0.0f, std::log(2.0), 2}, {10.0f, std::log(8.0), 8}));
        INFO(ExchangeName(kind) << " base " << LogBaseName(base));
        for (const float x : answer.out)
          CHECK(x == Approx(8.0).epsilon(dtype == DType::kF32 ? 1e-6 : 4e-3));
        for (const float x : answer.lse) CHECK(x == Approx(std::log(10.0)).epsilon(1e-6));
        CHECK(answer.faulty_rows == 0);
      }
    }
  }
}

TEST_CASE("a rank without keys of the row is never read") {
  const Shard good{1.0f, std::log(2.0), 2};
  const Shard empties[] = {{0.0f, -INFINITY, 0}, {NAN, -INFINITY, 0}, {0.0f, INFINITY, 0},
                           {NAN, INFINITY, 0},   {0.0f, 0.0, 0},      {NAN, NAN, 0}};
  for (const ExchangeKind kind : kExchanges) {
    for (const LogBase base : kBases) {
      for (const Shard& empty : empties) {
        for (const bool first : {false, true}) {
          const Answer answer = Run(kind, first ? TwoShards(base, DType::kF32, empty, good)
                                                : TwoShards(base, DType::kF32, good, empty));
          INFO(ExchangeName(kind) << " base " << LogBaseName(base) << " empty (" << empty.out
                                  << ", " << empty.lse << ")");
          for (const float x : answer.out) CHECK(x == 1.0f);
          for (const float x : answer.lse) CHECK(x == Approx(std::log(2.0)).epsilon(1e-6));
          CHECK(answer.faulty_rows == 0);
        }
      }
    }
  }
}

TEST_CASE("no rank has keys: output 0, LSE -inf") {
  for (const ExchangeKind kind : kExchanges) {
    for (const LogBase base : kBases) {
      for (const Shard& empty :
           {Shard{0.0f, -INFINITY, 0}, Shard{NAN, INFINITY, 0}, Shard{7.0f, 0.0, 0}}) {
        const Answer answer = Run(kind, TwoShards(base, DType::kF32, empty, empty));
        for (const float x : answer.out) CHECK(x == 0.0f);
        for (const float x : answer.lse) CHECK(x == -INFINITY);
        CHECK(answer.faulty_rows == 0);
      }
    }
  }
}

TEST_CASE("faults of a rank that owns keys come through and are counted") {
  const Shard good{1.0f, std::log(2.0), 2};
  // An LSE that is not finite, the backend's own empty mark included, or a NaN output, even where
  // its weight is 0.
  const Shard faults[] = {
      {1.0f, -INFINITY, 3}, {1.0f, INFINITY, 3}, {1.0f, NAN, 3}, {NAN, 0.0, 3}, {NAN, -1e6, 3}};
  for (const ExchangeKind kind : kExchanges) {
    for (const LogBase base : kBases) {
      for (const Shard& fault : faults) {
        const Answer answer = Run(kind, TwoShards(base, DType::kF32, good, fault));
        INFO(ExchangeName(kind) << " fault (" << fault.out << ", " << fault.lse << ")");
        for (const float x : answer.out) CHECK(std::isnan(x));
        CHECK(answer.faulty_rows == 2);  // one row of each rank's head
      }
    }
  }
}

TEST_CASE("random partials merge to the float64 answer") {
  std::mt19937_64 rng(7);
  std::normal_distribution<float> normal;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const LogBase base : kBases) {
      Problem p{
          .shape = {.ranks = ranks, .heads = ranks * 3, .d_v = 20, .partial_dtype = DType::kF32},
          .tokens = 5,
          .base = base};
      std::vector<std::vector<double>> natural;
      for (int r = 0; r < ranks; ++r) {
        auto& out = p.out.emplace_back(static_cast<std::size_t>(5 * ranks * 3 * 20));
        for (float& x : out) x = normal(rng);
        auto& lse = p.lse.emplace_back();
        auto& nat = natural.emplace_back();
        for (int i = 0; i < 5 * ranks * 3; ++i) {
          nat.push_back(2.0 * normal(rng));
          lse.push_back(InBase(nat.back(), base));
        }
        // Token 0: nobody but the last rank; token 1: nobody; others: everybody but rank t % N.
        for (int t = 0; t < 5; ++t) {
          const bool owns = t == 0 ? r == ranks - 1 : t == 1 ? false : ranks == 1 || r != t % ranks;
          p.bounds.push_back(owns ? 1 + r : 0);
        }
      }
      for (const ExchangeKind kind : kExchanges) {
        const Answer answer = Run(kind, p);
        CHECK(answer.faulty_rows == 0);
        for (int t = 0; t < 5; ++t) {
          for (int h = 0; h < p.shape.heads; ++h) {
            const std::size_t row = p.Row(t, h);
            double sum = 0;
            std::vector<double> want(20, 0.0);
            for (int r = 0; r < ranks; ++r) {
              if (p.bounds[static_cast<std::size_t>(r * 5 + t)] == 0) continue;
              const double w = std::exp(natural[static_cast<std::size_t>(r)][row]);
              sum += w;
              for (std::size_t i = 0; i < 20; ++i) {
                want[i] += w * p.out[static_cast<std::size_t>(r)][row * 20 + i];
              }
            }
            double error = 0, norm = 0;
            for (std::size_t i = 0; i < 20; ++i) {
              const double t_i = sum > 0 ? want[i] / sum : 0;
              error += std::pow(answer.out[row * 20 + i] - t_i, 2);
              norm += t_i * t_i;
            }
            INFO(ExchangeName(kind) << " ranks " << ranks << " token " << t << " head " << h);
            CHECK(std::sqrt(error) <= 1e-5 * std::sqrt(norm));
            if (sum > 0) {
              CHECK(std::abs(answer.lse[row] - std::log(sum)) <=
                    1e-5 * std::max(1.0, std::abs(std::log(sum))));
            } else {
              CHECK(answer.lse[row] == -INFINITY);
            }
          }
        }
      }
    }
  }
}

}  // namespace dcp
