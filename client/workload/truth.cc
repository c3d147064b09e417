#include "client/workload/truth.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "base/check.h"

namespace dcp {
namespace {

double Dot(const double* a, const double* b, std::size_t n) {
  std::array<double, 8> acc{};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) acc[j] += a[i + j] * b[i + j];
  }
  double sum = 0;
  for (const double v : acc) sum += v;
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

std::vector<RowTruth> AttendRows(const TruthGeometry& geometry, std::span<const Bf16> queries,
                                 std::span<const Bf16* const> latents) {
  const auto d_qk = static_cast<std::size_t>(geometry.d_qk);
  const auto d_v = static_cast<std::size_t>(geometry.d_v);
  DCP_CHECK(d_qk > 0 && d_v <= d_qk && queries.size() % d_qk == 0);
  const std::size_t rows = queries.size() / d_qk;
  const std::size_t visible = latents.size();

  std::vector<double> q(queries.size());
  std::transform(queries.begin(), queries.end(), q.begin(),
                 [](Bf16 x) { return static_cast<double>(ToFloat(x)); });
  std::vector<double> k(d_qk);
  const auto load = [&](std::size_t position, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      k[i] = static_cast<double>(ToFloat(latents[position][i]));
    }
  };

  std::vector<double> logits(rows * visible);
  for (std::size_t p = 0; p < visible; ++p) {
    load(p, d_qk);
    for (std::size_t r = 0; r < rows; ++r) {
      logits[r * visible + p] = geometry.softmax_scale * Dot(q.data() + r * d_qk, k.data(), d_qk);
    }
  }
  std::vector<RowTruth> truths(rows);
  for (std::size_t r = 0; r < rows; ++r) {
    truths[r].output.assign(d_v, 0.0);
    truths[r].lse = -std::numeric_limits<double>::infinity();
    if (visible == 0) continue;
    const std::span<double> row(logits.data() + r * visible, visible);
    const double max = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const double l : row) sum += std::exp(l - max);
    truths[r].lse = max + std::log(sum);
    for (double& l : row) l = std::exp(l - truths[r].lse);
  }
  for (std::size_t p = 0; p < visible; ++p) {
    load(p, d_v);
    for (std::size_t r = 0; r < rows; ++r) {
      const double weight = logits[r * visible + p];
      double* const output = truths[r].output.data();
      for (std::size_t i = 0; i < d_v; ++i) output[i] += weight * k[i];
    }
  }
  return truths;
}

RowTruth AttendRow(const TruthGeometry& geometry, std::span<const Bf16> query,
                   std::span<const Bf16> latents) {
  const auto d_qk = static_cast<std::size_t>(geometry.d_qk);
  DCP_CHECK(query.size() == d_qk && latents.size() % d_qk == 0);
  std::vector<const Bf16*> rows;
  for (std::size_t i = 0; i < latents.size(); i += d_qk) rows.push_back(&latents[i]);
  return AttendRows(geometry, query, rows).front();
}

double RelativeError(std::span<const float> output, std::span<const double> truth) {
  DCP_CHECK(output.size() == truth.size());
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double e = static_cast<double>(output[i]) - truth[i];
    difference += e * e;
    norm += truth[i] * truth[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace dcp
