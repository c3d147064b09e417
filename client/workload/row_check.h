// Checks answered rows against the truth, recomputed from the generator alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/bf16.h"
#include "client/workload/synthetic.h"
#include "client/workload/truth.h"

namespace dcp {

// Limits of design §9.
struct RowLimits {
  double output = 4e-3;  // of RelativeError
  double lse = 1e-5;     // of |lse - truth| / max(1, |truth|)
};

// Latents in chunks of consecutive offsets of one content, least recently used dropped first.
// Thread-safe.
class LatentCache {
 public:
  static constexpr std::int64_t kChunkTokens = 16;
  using Chunk = std::shared_ptr<const std::vector<Bf16>>;  // [kChunkTokens, d_qk]

  LatentCache(const Synthetic& synthetic, std::size_t max_bytes);
  // The chunk that holds `token`, at index offset % kChunkTokens.
  Chunk Get(TokenKey token, int layer);

 private:
  struct Key {
    std::uint64_t content;
    std::int64_t chunk;
    int layer;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const;
  };
  using Order = std::list<std::pair<Key, Chunk>>;  // most recent first

  const Synthetic synthetic_;
  const std::size_t max_chunks_;
  std::mutex mutex_;
  Order order_;
  std::unordered_map<Key, Order::iterator, KeyHash> chunks_;
};

// The answered rows of one token in one layer.
struct AnsweredToken {
  const Content* content = nullptr;
  int layer = 0;
  std::int64_t position = 0;
  std::vector<int> heads;         // rows to check
  std::span<const float> output;  // [heads.size(), d_v]
  std::span<const float> lse;     // [heads.size()], base e or 2 as lse_base_two says
  bool lse_base_two = false;
};

struct RowCheckResult {
  std::int64_t rows = 0;
  std::int64_t wrong = 0;
  double max_output_error = 0;
  double max_lse_error = 0;
  void Add(const RowCheckResult& other);
};

// Thread-safe.
class RowChecker {
 public:
  // cache_bytes bounds the latents kept.
  RowChecker(const Synthetic& synthetic, int d_v, const RowLimits& limits,
             std::size_t cache_bytes = std::size_t{256} << 20);
  RowCheckResult Check(const AnsweredToken& token);

 private:
  const Synthetic synthetic_;
  const TruthGeometry geometry_;
  const RowLimits limits_;
  LatentCache cache_;
};

}  // namespace dcp
