// Conformance of every exchange over every communicator: partials are given, not computed, so that
// merging is judged alone. Truth is a float64 merge over the ranks that own keys.
#include "runtime/exchange.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <random>
#include <vector>

#include "tests/runtime/exchange_problem.h"

namespace dcp::testing {
namespace {

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kAgRs, ExchangeKind::kA2a};
constexpr LogBase kBases[] = {LogBase::kE, LogBase::kTwo};

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
        const Answer answer = RunExchangeProblem(
            kind, TwoShards(base, dtype, {0.0f, std::log(2.0), 2}, {10.0f, std::log(8.0), 8}));
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
          const Answer answer =
              RunExchangeProblem(kind, first ? TwoShards(base, DType::kF32, empty, good)
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
        const Answer answer = RunExchangeProblem(kind, TwoShards(base, DType::kF32, empty, empty));
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
        const Answer answer = RunExchangeProblem(kind, TwoShards(base, DType::kF32, good, fault));
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
        const Answer answer = RunExchangeProblem(kind, p);
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

}  // namespace dcp::testing
