// What the engine sends to a rank for one step, and what comes back. Flat, versioned, without
// pointers, so that a rank may live in another process: a common part that is the same for all
// ranks, an own part, and tensors as bytes. docs/design.md has the byte layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "comm/communicator.h"

namespace dcp {

enum class RankMode : std::uint8_t {
  kAgree,    // compare contracts with the other ranks; no tensors
  kAttend,   // copy pages, write new_kv where the rank owns it, attend, exchange, merge
  kWrite,    // copy pages, write new_kv; no peers involved
  kCompare,  // compare new_kv with what is stored; no peers involved
};

enum class RankPhase : std::uint8_t { kIdle, kWrite, kAttend, kExchange, kMerge };
std::string_view PhaseName(RankPhase phase);

// First bytes of the common part.
struct StepHeader {
  static constexpr std::uint32_t kMagic = 0x64637031;  // "dcp1"
  static constexpr std::uint32_t kVersion = 1;
  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint64_t epoch = 0;
  std::uint64_t ticket = 0;     // names this step in results
  std::int64_t timeout_ns = 0;  // bound of the rank's waits for its peers
  std::int32_t layer = 0;
  std::int32_t ranks = 0;
  std::int32_t entries = 0;
  std::int32_t tokens = 0;
  std::int32_t table_stride = 0;  // pages a row of the block table has
  std::int32_t copies = 0;
  std::uint8_t mode = 0;  // RankMode
  std::uint8_t has_new_kv = 0;
  std::uint8_t output_dtype = 0;  // DType
  std::uint8_t return_lse = 0;
  std::uint8_t lse_base = 0;  // LogBase of the returned LSE
  std::uint8_t reserved[3] = {};
};
static_assert(sizeof(StepHeader) == 64);

struct PageCopy {
  std::int32_t from;
  std::int32_t to;
};

// The parts of a message, as spans into its bytes (no copy) once Parse has checked every size and
// index range. They are valid as long as the bytes.
struct StepView {
  const StepHeader* header = nullptr;
  std::span<const std::int32_t> entry_begin;  // [entries + 1] query tokens of each entry
  std::span<const std::int32_t> bounds;       // [ranks, tokens] local keys a token sees on a rank
  std::span<const std::int32_t> block_table;  // [entries, table_stride] pages
  std::span<const PageCopy> copies;           // [copies] whole pages, all layers, before any write
  std::span<const std::int64_t> slots;        // own part: [tokens] page * page_tokens + slot where
                                        // the token's latent lives on this rank, -1: elsewhere
};

// Sizes of the two parts; a writer fills them through MutableStep.
struct MutableStep {
  StepHeader* header;
  std::span<std::int32_t> entry_begin, bounds, block_table;
  std::span<PageCopy> copies;
};
// Resizes `common` for `header` and returns its parts; `common` keeps its capacity between steps.
MutableStep LayOutCommon(const StepHeader& header, std::vector<std::byte>& common);

// Errors: INTERNAL saying which size or index does not fit.
Result<StepView> ParseStep(ConstBytes common, ConstBytes own);

// Rows of equal size at a fixed distance; row i starts at data + i * stride.
struct StridedBytes {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride = 0;
};

struct RankStep {
  ConstBytes common;
  ConstBytes own;
  ConstBytes query;                  // [tokens, heads, d_qk] bf16
  ConstBytes new_kv;                 // [tokens, d_qk] bf16, or empty
  StridedBytes output;               // [tokens][heads / ranks, d_v]: this rank's head slice
  StridedBytes lse;                  // [tokens][heads / ranks] f32, or no rows
  std::shared_ptr<const void> hold;  // owns all of the bytes above
};

struct RankResult {
  std::uint64_t ticket = 0;
  int rank = 0;
  Status status;                       // RANK_FAILED on a fault of this rank or of a peer
  bool own_fault = false;              // `status` arose here, not at a peer
  RankPhase phase = RankPhase::kIdle;  // where `status` arose
  std::int32_t mismatch_token = -1;    // kCompare: first token that differs from what is stored
  std::int64_t faulty_rows = 0;
  Nanos write{}, attend{}, exchange{}, merge{};
};

}  // namespace dcp
