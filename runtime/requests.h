// The requests an engine serves and their answers. docs/api.md has the rules in full; the wire form
// is proto/dcp/v1/decode.proto.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"
#include "base/time.h"
#include "kernels/lse.h"
#include "runtime/config.h"

namespace dcp {

// Names one life of a sequence: after release and re-creation the generation differs.
struct SequenceRef {
  std::string id;                // 1..128 characters of [A-Za-z0-9._:/-]
  std::uint64_t generation = 0;  // from Create or Fork
};

struct CreateRequest {
  std::string id;
  std::string request_id;    // 1..128 printable ASCII characters
  double softmax_scale = 0;  // must equal the server's
  std::optional<Millis> lease;
  std::optional<std::uint64_t> expected_epoch;
};

struct ForkRequest {
  SequenceRef parent;
  std::string id;  // the child
  std::string request_id;
  std::int64_t at_length = 0;  // <= the parent's shortest layer
  std::optional<Millis> lease;
  std::optional<std::uint64_t> expected_epoch;
};

struct CreateReply {  // of Create and Fork
  std::uint64_t generation = 0;
  std::uint64_t epoch = 0;
};

struct TruncateRequest {
  SequenceRef sequence;
  std::uint64_t step_id = 0;
  std::int64_t to_length = 0;
  std::optional<std::uint64_t> expected_epoch;
};

struct ReleaseRequest {
  std::vector<SequenceRef> sequences;  // unknown ids and old generations are passed over
  std::optional<std::uint64_t> expected_epoch;
};
struct ReleaseReply {
  int released = 0;
  std::uint64_t epoch = 0;
};

struct GetSequenceRequest {
  std::string id;
  std::optional<std::uint64_t> generation;  // absent: whichever lives now
  std::optional<std::uint64_t> expected_epoch;
};

struct SequenceInfo {
  std::string id;
  std::uint64_t generation = 0;
  std::vector<std::int64_t> layer_lengths;  // [layers] tokens
  std::uint64_t max_step_id = 0;
  std::int64_t blocks = 0;         // block table entries, shared ones included
  std::int64_t shared_blocks = 0;  // of those, blocks with more than one owner
  int open_appends = 0;
  std::optional<Millis> lease_remaining;
  std::uint64_t epoch = 0;
};

struct ListRequest {
  int page_size = 0;       // 0: 100; at most 1000
  std::string page_token;  // "" or next_page_token of the page before
  std::optional<std::uint64_t> expected_epoch;
};
struct ListReply {
  std::vector<SequenceInfo> sequences;  // ordered by id; lengths included
  std::string next_page_token;          // "" on the last page
  std::uint64_t epoch = 0;
};

struct StepEntry {
  SequenceRef sequence;
  std::int64_t start = 0;  // position of the entry's first query token
  std::int32_t count = 0;  // query tokens, 1..max_query_tokens
  bool rewind = false;     // start < length is meant
};

struct StepRequest {
  std::uint64_t step_id = 0;  // > 0 when new_kv is present
  std::int32_t layer = 0;
  std::vector<StepEntry> entries;
  TensorView query;                   // [T, H, d_qk] bf16, T = sum of counts, entries in order
  std::optional<TensorView> new_kv;   // [T, d_qk] bf16; absent: every entry is a read
  std::optional<DType> output_dtype;  // required
  std::optional<LogBase> lse_base;    // present: return LSE in this base
  std::optional<Millis> timeout;      // absent: the server's default
  std::optional<std::uint64_t> expected_epoch;
  // Keeps the bytes behind the tensors alive. Held until every rank has returned, which may be
  // after the answer when a rank is stuck.
  std::shared_ptr<const void> keepalive;
};

// Where a step's time went. Rank phases are the slowest rank's.
struct StepTiming {
  Nanos queue{}, plan{}, write{}, attend{}, exchange{}, merge{};
  Nanos total{};  // from Submit to the answer
};

struct StepReply {
  std::string output;      // [T, H, d_v] bf16 | f32; std::string so that it moves into a message
  std::vector<float> lse;  // [T, H] in the asked base; empty when not asked
  std::int64_t faulty_rows = 0;  // rows (token, head) that are not finite
  StepTiming timing;
  std::uint64_t epoch = 0;
};

// An AppendKv in progress, named by a number above 0 that is never used again.
using AppendId = std::uint64_t;

struct AppendRequest {
  SequenceRef sequence;
  std::uint64_t step_id = 0;
  std::int64_t start = 0;  // the present length of every layer in the range
  std::int64_t count = 0;  // tokens
  std::int32_t layer_begin = 0;
  std::int32_t layer_count = 0;
  std::optional<std::uint64_t> expected_epoch;
};
struct AppendChunk {
  std::int32_t layer = 0;
  std::int64_t offset = 0;  // from start
  TensorView latents;       // [n, d_qk] bf16, n >= 1
  std::shared_ptr<const void> keepalive;
};
struct AppendReply {
  std::int64_t length = 0;  // of the layers in the range
  bool replayed = false;    // an append already applied was sent again
  std::uint64_t epoch = 0;
};

struct LoadInfo {
  int sequences = 0;
  int queued = 0;
  int open_appends = 0;
  std::int64_t total_blocks = 0;
  std::int64_t free_blocks = 0;
  std::int64_t cow_blocks = 0;  // blocks copied on write since start
  std::int64_t steps = 0;       // steps answered OK since start
  std::int64_t failed_steps = 0;
  std::int64_t faulty_rows = 0;
  std::int64_t rank_failures = 0;
  std::uint64_t epoch = 0;
};

struct EngineInfo {
  EngineConfig config;
  std::string backend;  // chosen attention backend
  LogBase lse_base{};   // it declares
  EmptyMark empty_mark{};
  std::int64_t block_tokens = 0;
  std::int64_t kv_bytes_per_rank = 0;
  std::uint64_t epoch = 0;
};

enum class EngineState : std::uint8_t {
  kServing,
  kDraining,   // finishes what it has, takes nothing new
  kRanksDown,  // a rank did not come back; every call answers RANKS_DOWN
};

}  // namespace dcp
