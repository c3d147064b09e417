// Every line of the backend table, every declared geometry, against a float64 softmax.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "tests/kernels/attention_problem.h"
#include "tests/kernels/for_each_target.h"

namespace dcp::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Small ones keep long problems affordable; not every backend serves them.
constexpr Dims kSmallAndFull[] = {{80, 64}, {576, 512}};
constexpr Dims kDims[] = {{576, 512}, {512, 512}, {320, 256}, {160, 128}, {80, 64}, {16, 16}};

void SetKey(AttentionProblem& p, int entry, int key, int dim, Bf16 value) {
  p.keys[entry][static_cast<std::size_t>(key) * p.d_qk + dim] = value;
}

bool RowIsFinite(const AttentionProblem& p, const Partial& partial, int token, int head) {
  const std::size_t row = static_cast<std::size_t>(token) * p.heads + head;
  const float* const out = &partial.out[row * p.d_v];
  return std::isfinite(partial.lse[row]) &&
         std::all_of(out, out + p.d_v, [](float x) { return std::isfinite(x); });
}

double RelativeError(const std::vector<double>& truth, const float* out) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    error += (out[i] - truth[i]) * (out[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace

TEST_CASE("Backends equal a float64 softmax in every declared geometry") {
  for (const Dims dims : kDims) {
    // Tile, chunk and page borders; entries of one and of several tokens; empty rows.
    const AttentionProblem p(
        {.heads = 6,
         .d_qk = dims.d_qk,
         .d_v = dims.d_v,
         .bounds = {{1}, {64}, {0}, {65, 66, 67}, {2, 0, 3}, {513}, {700, 698}},
         .seed = static_cast<unsigned>(dims.d_qk)});
    ForEachBackend(dims, [&](const BackendEntry& entry) {
      for (const int page_tokens : {1, 16, 24, 64, 256}) {
        if (!Serves(entry, dims, page_tokens)) continue;
        for (const DType dtype : {DType::kF32, DType::kBf16}) {
          INFO("page_tokens " << page_tokens << ", " << DTypeName(dtype));
          const RunOptions options{
              .page_tokens = page_tokens, .partial_dtype = dtype, .head_groups = 2};
          CHECK(Mismatch(entry, p, RunBackend(entry, p, options), dtype) == "");
        }
      }
    });
  }
}

TEST_CASE("Backends serve any number of heads") {
  for (const int heads : {1, 2, 5, 8, 9, 16, 17, 24, 31, 128}) {
    const AttentionProblem p({.heads = heads, .bounds = {{70, 71}, {3}}, .seed = 3});
    ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
      INFO("heads " << heads);
      CHECK(Mismatch(entry, p, RunBackend(entry, p, {}), DType::kF32) == "");
    });
  }
}

TEST_CASE("Backends serve any page size") {
  const AttentionProblem p({.heads = 3, .d_qk = 80, .d_v = 64, .bounds = {{600}, {130, 7}}});
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    for (const int page_tokens : {1, 2, 3, 5, 7, 31, 32, 63, 100, 128, 255, 256}) {
      INFO("page_tokens " << page_tokens);
      const Partial partial = RunBackend(entry, p, {.page_tokens = page_tokens});
      CHECK(Mismatch(entry, p, partial, DType::kF32) == "");
    }
  });
}

TEST_CASE("Long contexts and large logits stay within the error limits") {
  const AttentionProblem longest({.heads = 4, .bounds = {{8192}}, .seed = 5});
  const AttentionProblem high({.heads = 4, .bounds = {{600}, {900}}, .offset = 120, .seed = 6});
  const AttentionProblem low({.heads = 4, .bounds = {{600}, {900}}, .offset = -120, .seed = 7});
  const AttentionProblem steep(
      {.heads = 4, .bounds = {{600}, {900}}, .query_scale = 30, .seed = 8});
  ForEachBackend({576, 512}, [&](const BackendEntry& entry) {
    for (const AttentionProblem* p : {&longest, &high, &low, &steep}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        const Partial partial = RunBackend(entry, *p, {.partial_dtype = dtype});
        CHECK(Mismatch(entry, *p, partial, dtype) == "");
      }
    }
  });
}

TEST_CASE("A key with nearly all of the weight gives its own values") {
  // However coarse the weights are: 1.004 times the values would pass the usual limits. The key
  // with nearly all of the weight stands far behind another one that is at most 5.4 nats below it,
  // so that a backend that rescales only now and then has a reference that is not the maximum.
  AttentionProblem p({.bounds = {{2}, {65}, {130}, {200}, {700}}, .query_scale = 0});
  const auto dims = static_cast<std::size_t>(p.d_qk);
  for (std::size_t row = 0; row < p.query.size() / dims; ++row) {
    p.query[row * dims + dims - 1] =
        ToBf16(1 - static_cast<float>(row % static_cast<std::size_t>(p.heads)) / 64);
  }
  for (std::size_t e = 0; e < p.keys.size(); ++e) {
    const int count = p.bound[e];
    for (int k = 0; k < count; ++k) {
      const double nats = k == 0 ? 0 : k == count - 1 ? 5.4 : -40;
      SetKey(p, static_cast<int>(e), k, p.d_qk - 1,
             ToBf16(static_cast<float>(nats / p.softmax_scale)));
    }
  }
  p.Solve();
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    const Partial partial = RunBackend(entry, p, {});
    CHECK(Mismatch(entry, p, partial, DType::kF32) == "");
    for (int t = 0; t < p.tokens(); ++t) {
      for (int h = 0; h < p.heads; ++h) {
        const auto row = static_cast<std::size_t>(t * p.heads + h);
        INFO("token " << t << " head " << h);
        CHECK(RelativeError(p.row(t, h).out, &partial.out[row * static_cast<std::size_t>(p.d_v)]) <=
              2e-4);
      }
    }
  });
}

TEST_CASE("A row's bits depend on nothing but its own query, keys and bound") {
  // Small dims keep many rows affordable; chunk borders at 512 are crossed.
  const AttentionProblem p({.heads = 16,
                            .d_qk = 80,
                            .d_v = 64,
                            .bounds = {{1100}, {5}, {0}, {700, 701, 64, 0}, {513}, {1025, 1}},
                            .seed = 11});
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    if (!entry.caps.deterministic) return;
    const Partial whole = RunBackend(entry, p, {});
    for (int t = 0; t < p.tokens(); ++t) {
      INFO("token " << t);
      const AttentionProblem part = p.OnlyToken(t);
      CHECK(SameBits(part, RunBackend(entry, part, {}), p, whole, t, 0));
    }
    for (const auto& [first, count] : {std::pair{0, 1}, {3, 5}, {7, 9}, {15, 1}}) {
      INFO("heads from " << first << ", " << count);
      const AttentionProblem part = p.OnlyHeads(first, count);
      // All tokens, but each has fewer heads than in `whole`.
      const Partial some = RunBackend(entry, part, {});
      for (int t = 0; t < p.tokens(); ++t) {
        const AttentionProblem one = part.OnlyToken(t);
        const Partial row = RunBackend(entry, one, {});
        CHECK(SameBits(one, row, part, some, t, 0));
        CHECK(SameBits(one, row, p, whole, t, first));
      }
    }
    for (const int groups : {2, 4, 16}) {
      CHECK(SameBits(p, RunBackend(entry, p, {.head_groups = groups}), p, whole, 0, 0));
    }
    for (const int page_tokens : {1, 64, 100}) {
      CHECK(SameBits(p, RunBackend(entry, p, {.page_tokens = page_tokens}), p, whole, 0, 0));
    }
  });
}

TEST_CASE("A key that is not finite reaches the rows that see it and no other") {
  for (const Bf16 poison : {kBf16NaN, ToBf16(kInf), ToBf16(-kInf)}) {
    // In the value part and in the rest of the key, of small and of large dims.
    struct Place {
      Dims dims;
      int dim;
    };
    for (const Place place : {Place{kSmallAndFull[0], 5},
                              {kSmallAndFull[0], 70},
                              {kSmallAndFull[1], 5},
                              {kSmallAndFull[1], 510},
                              {kSmallAndFull[1], 570}}) {
      const Dims dims = place.dims;
      const int dim = place.dim;
      // With 7 heads no border between tokens is one between blocks of rows in a register tile.
      AttentionProblem p({.heads = 7,
                          .d_qk = dims.d_qk,
                          .d_v = dims.d_v,
                          .bounds = {{9, 10, 11, 12}, {520, 519, 521}, {40}},
                          .seed = 13});
      const AttentionProblem clean = p;
      SetKey(p, 0, 10, dim, poison);   // seen by tokens 2 and 3 of entry 0
      SetKey(p, 1, 519, dim, poison);  // seen by tokens 0 and 2 of entry 1
      const bool sees[] = {false, false, true, true, true, false, true, false};
      ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
        const Partial partial = RunBackend(entry, p, {});
        const Partial expected = RunBackend(entry, clean, {});
        for (int t = 0; t < p.tokens(); ++t) {
          INFO("token " << t << ", dim " << dim << ", poison " << ToFloat(poison));
          const AttentionProblem one = clean.OnlyToken(t);
          if (!sees[t]) {
            Partial rows;
            rows.lse.assign(&partial.lse[t * p.heads], &partial.lse[t * p.heads] + p.heads);
            const std::size_t items = static_cast<std::size_t>(p.heads) * p.d_v;
            rows.out.assign(&partial.out[t * items], &partial.out[t * items] + items);
            CHECK(SameBits(one, rows, clean, expected, t, 0));
            continue;
          }
          for (int h = 0; h < p.heads; ++h) {
            // A score of -inf is a weight of 0: only 0 * inf in the value can show it then.
            const bool hidden = dim >= p.d_v && !std::isnan(ToFloat(poison));
            if (!hidden) CHECK_FALSE(RowIsFinite(p, partial, t, h));
          }
        }
      });
    }
  }
}

TEST_CASE("Infinite scores give what IEEE arithmetic gives") {
  const Dims dims = GENERATE(from_range(std::begin(kSmallAndFull), std::end(kSmallAndFull)));
  const int dim = dims.d_qk - 10;  // beyond the values
  AttentionProblem p({.heads = 2,
                      .d_qk = dims.d_qk,
                      .d_v = dims.d_v,
                      .bounds = {{6}, {6}, {6}, {70}, {1030}},
                      .seed = 14});
  for (std::size_t row = 0; row < std::size_t{5} * 2; ++row) {
    p.query[row * dims.d_qk + dim] = ToBf16(3e38f);
  }
  const auto set = [&p, dim](int entry, int begin, int end, float value) {
    for (int k = begin; k < end; ++k) SetKey(p, entry, k, dim, ToBf16(value));
  };
  for (int e = 0; e < 5; ++e) set(e, 0, p.bound[e], 0);
  set(0, 2, 3, -kInf);     // one key weighs nothing
  set(1, 0, 6, -kInf);     // no key weighs anything
  set(2, 2, 3, kInf);      // one key weighs everything
  set(3, 0, 66, -kInf);    // nothing has a weight for a whole tile
  set(4, 0, 1026, -kInf);  // nor for two chunks
  p.Solve();
  const bool finite[] = {true, false, false, true, true};
  ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
    const Partial partial = RunBackend(entry, p, {});
    for (int t = 0; t < p.tokens(); ++t) {
      INFO("token " << t);
      for (int h = 0; h < 2; ++h) CHECK(RowIsFinite(p, partial, t, h) == finite[t]);
      if (!finite[t]) continue;
      const AttentionProblem one = p.OnlyToken(t);
      CHECK(Mismatch(entry, one, RunBackend(entry, one, {}), DType::kF32) == "");
    }
  });
}

TEST_CASE("Backends are right with every instruction set") {
  const AttentionProblem p({.heads = 9, .bounds = {{70, 71, 0}, {3}, {520}}, .seed = 15});
  ForEachTarget([&] {
    ForEachBackend({p.d_qk, p.d_v}, [&](const BackendEntry& entry) {
      CHECK(Mismatch(entry, p, RunBackend(entry, p, {}), DType::kF32) == "");
    });
  });
}

}  // namespace dcp::test
