#include "tests/kernels/attention_problem.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>

#if defined(DCP_WITH_CUDA)
#include "kernels/staged_attention.h"
#endif

namespace dcp::test {
namespace {

constexpr float kJunk = 5.0625f;  // a believable LSE, exact in bf16
constexpr std::int64_t kMaxKeys = 1 << 17;

// Standard normal values, orthogonal to `direction` (a vector of signs).
std::vector<double> NoiseBeside(const std::vector<double>& direction, double size,
                                std::mt19937& random) {
  std::normal_distribution<double> normal(0, size);
  std::vector<double> x(direction.size());
  double along = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = normal(random);
    along += x[i] * direction[i];
  }
  along /= static_cast<double>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] -= along * direction[i];
  return x;
}

int Largest(const std::vector<int>& bounds) {
  return *std::max_element(bounds.begin(), bounds.end());
}

}  // namespace

AttentionProblem::AttentionProblem(const ProblemSpec& spec)
    : heads(spec.heads),
      d_qk(spec.d_qk),
      d_v(spec.d_v),
      // Neither 1/sqrt(d_qk) nor 1/sqrt(d_v), as in DeepSeek models.
      softmax_scale(1.3 / std::sqrt(d_qk / 3.0)) {
  std::mt19937 random(spec.seed);
  const auto dims = static_cast<std::size_t>(d_qk);
  std::vector<double> direction(dims);
  for (double& sign : direction) sign = random() % 2 == 0 ? 1 : -1;
  const double per_nat = 1 / (softmax_scale * d_qk);  // size along `direction` worth one nat
  const double query_noise = 0.2 / (softmax_scale * std::sqrt(d_qk));

  std::vector<int> planted;
  for (const std::vector<int>& entry : spec.bounds) {
    entry_begin.push_back(tokens());
    bound.insert(bound.end(), entry.begin(), entry.end());
    for (std::size_t t = 0; t < entry.size(); ++t) {
      for (int h = 0; h < heads; ++h) {
        const double size = 1 + 0.04 * (h % 6);  // heads differ in temperature
        const std::vector<double> noise = NoiseBeside(direction, query_noise, random);
        for (std::size_t i = 0; i < dims; ++i) {
          query.push_back(
              ToBf16(static_cast<float>(spec.query_scale * (size * direction[i] + noise[i]))));
        }
      }
    }
    // Hot keys: the last of every token, the one after it, and a planted one that all see.
    const int count = Largest(entry);
    std::vector<bool> hot(static_cast<std::size_t>(count) + 1, false);
    int earliest = count;
    for (const int b : entry) {
      if (b >= 3) earliest = std::min(earliest, b - 1);
      if (b > 0) hot[b - 1] = hot[b] = true;
    }
    planted.push_back(earliest > 0 ? static_cast<int>(random() % earliest) : -1);
    if (planted.back() >= 0) hot[planted.back()] = true;
    const double lift = std::log(count + 1.0) + 1;
    std::vector<Bf16> entry_keys;
    for (int k = 0; k < count; ++k) {
      const double along = (spec.offset + (hot[k] ? lift : 0)) * per_nat;
      const std::vector<double> noise = NoiseBeside(direction, 1, random);
      for (std::size_t i = 0; i < dims; ++i) {
        entry_keys.push_back(ToBf16(static_cast<float>(along * direction[i] + noise[i])));
      }
    }
    keys.push_back(std::move(entry_keys));
  }
  entry_begin.push_back(tokens());
  Solve();
  if (spec.query_scale == 1) {
    for (std::size_t e = 0; e < keys.size(); ++e) {
      CheckDiscriminates(planted[e], static_cast<int>(e));
    }
  }
}

void AttentionProblem::Solve() {
  rows_.clear();
  for (std::size_t e = 0; e < keys.size(); ++e) {
    for (int t = entry_begin[e]; t < entry_begin[e + 1]; ++t) {
      for (int h = 0; h < heads; ++h) rows_.push_back(SolveRow(static_cast<int>(e), t, h));
    }
  }
}

AttentionProblem::Row AttentionProblem::SolveRow(int entry, int token, int head) const {
  const Bf16* const q = query.data() + (static_cast<std::size_t>(token) * heads + head) * d_qk;
  const auto count = static_cast<std::size_t>(bound[token]);
  std::vector<double> logit(count);
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t k = 0; k < count; ++k) {
    const Bf16* const key = keys[entry].data() + k * d_qk;
    double dot = 0;
    for (int i = 0; i < d_qk; ++i) dot += double{ToFloat(q[i])} * double{ToFloat(key[i])};
    logit[k] = dot * softmax_scale;
    top = std::max(top, logit[k]);
  }
  Row row{.lse = -std::numeric_limits<double>::infinity(),
          .out = std::vector<double>(static_cast<std::size_t>(d_v), 0.0)};
  if (count == 0) return row;
  double total = 0;
  for (const double x : logit) total += std::exp(x - top);
  for (std::size_t k = 0; k < count; ++k) {
    const double share = std::exp(logit[k] - top) / total;
    const Bf16* const key = keys[entry].data() + k * d_qk;
    for (int i = 0; i < d_v; ++i) row.out[i] += share * double{ToFloat(key[i])};
  }
  row.lse = top + std::log(total);
  return row;
}

void AttentionProblem::CheckDiscriminates(int planted, int entry) const {
  for (int t = entry_begin[entry]; t < entry_begin[entry + 1]; ++t) {
    const int count = bound[t];
    if (count < 3) continue;
    for (int h = 0; h < heads; ++h) {
      const auto weight = [&](int k) {
        const Bf16* const q = query.data() + (static_cast<std::size_t>(t) * heads + h) * d_qk;
        const Bf16* const key = keys[entry].data() + static_cast<std::size_t>(k) * d_qk;
        double dot = 0;
        for (int i = 0; i < d_qk; ++i) dot += double{ToFloat(q[i])} * double{ToFloat(key[i])};
        return std::exp(dot * softmax_scale - row(t, h).lse);
      };
      INFO("token " << t << " head " << h << " sees " << count << ", planted " << planted);
      REQUIRE(weight(count - 1) >= 0.05);
      REQUIRE(planted < count - 1);
      REQUIRE(weight(planted) >= 0.05);
      if (static_cast<std::size_t>(count + 1) * d_qk <= keys[entry].size()) {
        const double leaked = weight(count);
        REQUIRE(leaked / (1 + leaked) >= 0.05);
      }
    }
  }
}

AttentionProblem AttentionProblem::OnlyToken(int token) const {
  AttentionProblem part = *this;
  const auto entry = static_cast<std::size_t>(
      std::upper_bound(entry_begin.begin(), entry_begin.end(), token) - entry_begin.begin() - 1);
  const auto row_items = static_cast<std::ptrdiff_t>(heads) * d_qk;
  part.entry_begin = {0, 1};
  part.bound = {bound[token]};
  part.query.assign(query.begin() + token * row_items, query.begin() + (token + 1) * row_items);
  part.keys = {std::vector<Bf16>(keys[entry].begin(),
                                 keys[entry].begin() + std::ptrdiff_t{bound[token]} * d_qk)};
  part.rows_.assign(rows_.begin() + token * heads, rows_.begin() + (token + 1) * heads);
  return part;
}

AttentionProblem AttentionProblem::OnlyHeads(int first, int count) const {
  AttentionProblem part = *this;
  part.heads = count;
  part.query.clear();
  part.rows_.clear();
  for (int t = 0; t < tokens(); ++t) {
    const auto begin = query.begin() + (std::ptrdiff_t{t} * heads + first) * d_qk;
    part.query.insert(part.query.end(), begin, begin + std::ptrdiff_t{count} * d_qk);
    for (int h = first; h < first + count; ++h) part.rows_.push_back(row(t, h));
  }
  return part;
}

AttentionGeometry GeometryOf(const AttentionProblem& problem, const RunOptions& options) {
  return {.heads = problem.heads,
          .d_qk = problem.d_qk,
          .d_v = problem.d_v,
          .page_tokens = options.page_tokens,
          .softmax_scale = problem.softmax_scale,
          .partial_dtype = options.partial_dtype};
}

Partial RunBackend(const BackendEntry& entry, const AttentionProblem& problem,
                   const RunOptions& options) {
  const int page_tokens = options.page_tokens;
  const int entries = static_cast<int>(problem.keys.size());
  const auto d_qk = static_cast<std::size_t>(problem.d_qk);
  // Pages in random order; each has a stride of its own choice, and page 0 is nobody's.
  std::size_t table_stride = 1;
  std::int32_t pages = 1;
  for (const std::vector<Bf16>& keys : problem.keys) {
    const std::size_t used = (keys.size() / d_qk + page_tokens - 1) / page_tokens;
    table_stride = std::max(table_stride, used + 2);
    pages += static_cast<std::int32_t>(used);
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages) - 1);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i) + 1;
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  const std::size_t page_stride = page_tokens * d_qk + 2 * d_qk;
  std::vector<Bf16> kv(static_cast<std::size_t>(pages) * page_stride, kBf16NaN);
  std::vector<std::int32_t> table(entries * table_stride, std::numeric_limits<int>::min() / 3);
  std::size_t next = 0;
  for (int e = 0; e < entries; ++e) {
    const std::size_t count = problem.keys[e].size() / d_qk;
    for (std::size_t k = 0; k < count; ++k) {
      std::int32_t& page = table[e * table_stride + k / page_tokens];
      if (k % page_tokens == 0) page = order[next++];
      std::copy_n(
          problem.keys[e].begin() + static_cast<std::ptrdiff_t>(k * d_qk), d_qk,
          kv.begin() + static_cast<std::ptrdiff_t>(page * page_stride + k % page_tokens * d_qk));
    }
  }

  const int per_group = problem.heads / options.head_groups;
  REQUIRE(per_group * options.head_groups == problem.heads);
  const std::size_t item = SizeOf(options.partial_dtype);
  const std::size_t rows = static_cast<std::size_t>(problem.tokens()) * per_group;
  const std::size_t out_stride = rows * problem.d_v * item + 32;
  const std::size_t lse_stride = rows * 4 + 32;
  std::vector<std::byte> out(options.head_groups * out_stride, std::byte{0x7f});
  std::vector<std::byte> lse(options.head_groups * lse_stride);
  for (std::size_t i = 0; i < lse.size(); i += 4) std::memcpy(&lse[i], &kJunk, 4);

  const BackendSetup setup{.geometry = GeometryOf(problem, options),
                           .max_tokens = problem.tokens(),
                           .pool = options.pool,
                           .device = 0,
                           .max_keys = kMaxKeys};
  const auto made = entry.make(setup);
  INFO(made.status().ToString());
  REQUIRE(made.ok());
  AttentionBackend* backend = made->get();
#if defined(DCP_WITH_CUDA)
  std::optional<StagedAttention> staged;
  if (entry.caps.arch == Arch::kCuda) backend = &staged.emplace(*backend, setup);
#endif
  for (int i = 0; i < options.repeat; ++i) {
    const Status status =
        backend->Run({.query = problem.query.data(),
                      .kv = kv.data(),
                      .page_stride = static_cast<std::int64_t>(page_stride),
                      .entry_begin = problem.entry_begin.data(),
                      .block_table = table.data(),
                      .block_table_stride = static_cast<std::int64_t>(table_stride),
                      .bound = problem.bound.data(),
                      .entries = entries,
                      .tokens = problem.tokens(),
                      .partial = {.out = out.data(),
                                  .lse = lse.data(),
                                  .out_group_stride = static_cast<std::int64_t>(out_stride),
                                  .lse_group_stride = static_cast<std::int64_t>(lse_stride),
                                  .heads_per_group = per_group}});
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  Partial partial;
  for (int t = 0; t < problem.tokens(); ++t) {
    for (int h = 0; h < problem.heads; ++h) {
      const std::size_t group = h / per_group;
      const std::size_t row = static_cast<std::size_t>(t) * per_group + h % per_group;
      float x;
      std::memcpy(&x, &lse[group * lse_stride + row * 4], 4);
      partial.lse.push_back(x);
      for (int i = 0; i < problem.d_v; ++i) {
        const std::byte* const at = &out[group * out_stride + (row * problem.d_v + i) * item];
        if (options.partial_dtype == DType::kBf16) {
          Bf16 rounded;
          std::memcpy(&rounded, at, sizeof(rounded));
          x = ToFloat(rounded);
        } else {
          std::memcpy(&x, at, sizeof(x));
        }
        partial.out.push_back(x);
      }
    }
  }
  return partial;
}

std::string Mismatch(const BackendEntry& entry, const AttentionProblem& problem,
                     const Partial& partial, DType partial_dtype) {
  const bool rounded = partial_dtype == DType::kBf16 || entry.caps.arch == Arch::kCuda;
  const double limit = rounded ? 4e-3 : 1e-5;
  const auto at = [](int t, int h) {
    return " at token " + std::to_string(t) + ", head " + std::to_string(h);
  };
  for (int t = 0; t < problem.tokens(); ++t) {
    for (int h = 0; h < problem.heads; ++h) {
      const std::size_t row = static_cast<std::size_t>(t) * problem.heads + h;
      const float lse = partial.lse[row];
      if (problem.bound[t] == 0) {
        const float mark = entry.caps.empty_mark == EmptyMark::kNegInf
                               ? -std::numeric_limits<float>::infinity()
                               : std::numeric_limits<float>::infinity();
        if (lse != mark) return "empty mark " + std::to_string(lse) + at(t, h);
        continue;
      }
      const AttentionProblem::Row& truth = problem.row(t, h);
      const double expected =
          entry.caps.lse_base == LogBase::kTwo ? truth.lse / std::log(2.0) : truth.lse;
      if (!(std::fabs(lse - expected) <= 1e-5 * std::max(1.0, std::fabs(expected)))) {
        return "lse " + std::to_string(lse) + ", expected " + std::to_string(expected) + at(t, h);
      }
      double error = 0;
      double norm = 0;
      for (int i = 0; i < problem.d_v; ++i) {
        const double diff = double{partial.out[row * problem.d_v + i]} - truth.out[i];
        error += diff * diff;
        norm += truth.out[i] * truth.out[i];
      }
      if (!(std::sqrt(error) <= limit * std::sqrt(norm))) {
        return "error " + std::to_string(std::sqrt(error / norm) * 1e6) + "e-6" + at(t, h);
      }
    }
  }
  return "";
}

bool SameBits(const AttentionProblem& part_problem, const Partial& part,
              const AttentionProblem& whole_problem, const Partial& whole, int token, int head) {
  const auto d_v = static_cast<std::size_t>(part_problem.d_v);
  for (int t = 0; t < part_problem.tokens(); ++t) {
    for (int h = 0; h < part_problem.heads; ++h) {
      const std::size_t a = static_cast<std::size_t>(t) * part_problem.heads + h;
      const std::size_t b = static_cast<std::size_t>(t + token) * whole_problem.heads + h + head;
      // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits, NaN included
      if (std::memcmp(&part.lse[a], &whole.lse[b], sizeof(float)) != 0) return false;
      if (part_problem.bound[t] == 0) continue;  // the output of an empty row is not specified
      // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the same
      if (std::memcmp(&part.out[a * d_v], &whole.out[b * d_v], d_v * sizeof(float)) != 0) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace dcp::test
