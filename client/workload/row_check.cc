#include "client/workload/row_check.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace dcp {

std::size_t LatentCache::KeyHash::operator()(const Key& key) const {
  return HashWords(key.content, static_cast<std::uint64_t>(key.chunk),
                   static_cast<std::uint64_t>(key.layer));
}

LatentCache::LatentCache(const Synthetic& synthetic, std::size_t max_bytes)
    : synthetic_(synthetic),
      max_chunks_(std::max<std::size_t>(
          1, max_bytes / (static_cast<std::size_t>(kChunkTokens) * sizeof(Bf16) *
                          static_cast<std::size_t>(synthetic.geometry().d_qk)))) {}

LatentCache::Chunk LatentCache::Get(TokenKey token, int layer) {
  const Key key{token.content, token.offset / kChunkTokens, layer};
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = chunks_.find(key); it != chunks_.end()) {
      order_.splice(order_.begin(), order_, it->second);
      return it->second->second;
    }
  }
  // Made outside the lock; two threads may make the same chunk, and one copy is dropped.
  const auto d = static_cast<std::size_t>(synthetic_.geometry().d_qk);
  auto made = std::make_shared<std::vector<Bf16>>(static_cast<std::size_t>(kChunkTokens) * d);
  for (std::int64_t i = 0; i < kChunkTokens; ++i) {
    synthetic_.Latent({token.content, key.chunk * kChunkTokens + i}, layer,
                      std::span(*made).subspan(static_cast<std::size_t>(i) * d, d));
  }
  const std::lock_guard lock(mutex_);
  if (const auto it = chunks_.find(key); it != chunks_.end()) return it->second->second;
  order_.emplace_front(key, std::move(made));
  chunks_.emplace(key, order_.begin());
  if (chunks_.size() > max_chunks_) {
    chunks_.erase(order_.back().first);
    order_.pop_back();
  }
  return order_.front().second;
}

void RowCheckResult::Add(const RowCheckResult& other) {
  rows += other.rows;
  wrong += other.wrong;
  max_output_error = std::max(max_output_error, other.max_output_error);
  max_lse_error = std::max(max_lse_error, other.max_lse_error);
}

RowChecker::RowChecker(const Synthetic& synthetic, int d_v, const RowLimits& limits,
                       std::size_t cache_bytes)
    : synthetic_(synthetic),
      geometry_{synthetic.geometry().d_qk, d_v, synthetic.geometry().softmax_scale},
      limits_(limits),
      cache_(synthetic, cache_bytes) {}

RowCheckResult RowChecker::Check(const AnsweredToken& token) {
  const auto d_qk = static_cast<std::size_t>(geometry_.d_qk);
  const auto d_v = static_cast<std::size_t>(geometry_.d_v);
  const std::size_t rows = token.heads.size();
  DCP_CHECK(token.output.size() == rows * d_v && token.lse.size() == rows);

  std::vector<LatentCache::Chunk> held;  // keeps the pointers alive
  std::vector<const Bf16*> latents;
  latents.reserve(static_cast<std::size_t>(token.position) + 1);
  TokenKey before{0, -1};
  for (std::int64_t p = 0; p <= token.position; ++p) {
    const TokenKey key = token.content->At(p);
    constexpr std::int64_t kChunk = LatentCache::kChunkTokens;
    if (held.empty() || key.content != before.content ||
        key.offset / kChunk != before.offset / kChunk) {
      held.push_back(cache_.Get(key, token.layer));
    }
    before = key;
    latents.push_back(held.back()->data() + static_cast<std::size_t>(key.offset % kChunk) * d_qk);
  }
  std::vector<Bf16> queries(rows * d_qk);
  for (std::size_t r = 0; r < rows; ++r) {
    synthetic_.Query(*token.content, token.layer, token.position, token.heads[r],
                     std::span(queries).subspan(r * d_qk, d_qk));
  }
  const std::vector<RowTruth> truths = AttendRows(geometry_, queries, latents);

  RowCheckResult result;
  for (std::size_t r = 0; r < rows; ++r) {
    const double error = RelativeError(token.output.subspan(r * d_v, d_v), truths[r].output);
    const double lse =
        static_cast<double>(token.lse[r]) * (token.lse_base_two ? std::numbers::ln2 : 1.0);
    const double lse_error = std::abs(lse - truths[r].lse) / std::max(1.0, std::abs(truths[r].lse));
    ++result.rows;
    // NaN compares false and is wrong.
    if (!(error <= limits_.output && lse_error <= limits_.lse)) ++result.wrong;
    // A NaN must be seen in the report, and std::max would drop it.
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    result.max_output_error =
        std::max(result.max_output_error, std::isnan(error) ? kInfinity : error);
    result.max_lse_error =
        std::max(result.max_lse_error, std::isnan(lse_error) ? kInfinity : lse_error);
  }
  return result;
}

}  // namespace dcp
