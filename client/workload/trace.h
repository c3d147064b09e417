// Request traces: reading Mooncake (JSON lines) and Azure (CSV), writing Mooncake, scaling.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dcp {

// Tokens that one hash id stands for.
inline constexpr std::int64_t kTraceBlockTokens = 512;

struct TraceRow {
  double timestamp_ms = 0;  // from the trace's beginning
  std::int64_t input_length = 0;
  std::int64_t output_length = 0;
  // One id per kTraceBlockTokens of input, the last block possibly partial. An id names a block
  // and all before it. May be shorter than the input, also empty: the rest is private.
  std::vector<std::uint64_t> hash_ids;
};

enum class TraceFormat : std::uint8_t { kMooncake, kAzure };

inline constexpr std::size_t kAllRows = std::numeric_limits<std::size_t>::max();

// The first max_rows rows. Errors are INVALID_ARGUMENT/CONFIG and begin "<name>:<line>: ".
Result<std::vector<TraceRow>> ParseTrace(std::istream& in, std::string_view name,
                                         TraceFormat format, std::size_t max_rows = kAllRows);
Result<std::vector<TraceRow>> ReadTrace(const std::string& path, TraceFormat format,
                                        std::size_t max_rows = kAllRows);
// By file name: .csv is Azure, everything else Mooncake.
TraceFormat GuessTraceFormat(std::string_view path);

void WriteMooncake(std::ostream& out, const std::vector<TraceRow>& rows);

// Scales lengths by F, inputs and outputs alike. 512 * F is whole, so that shared blocks stay
// whole.
class LengthScale {
 public:
  // "0.03125" or "1/32".
  static Result<LengthScale> Parse(std::string_view text);
  std::int64_t block_tokens() const { return block_tokens_; }  // 512 * F
  std::int64_t Apply(std::int64_t length) const;               // rounded, at least 1

 private:
  explicit LengthScale(std::int64_t block_tokens) : block_tokens_(block_tokens) {}
  std::int64_t block_tokens_;
};

}  // namespace dcp
