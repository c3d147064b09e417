// What one rank computes: MLA decode attention of all query heads over its own tokens.
//
//   o[t, h, :]  = sum_k softmax_k(scale * q[t, h] . kv[k]) * kv[k][0:d_v]      k < bound[t]
//   lse[t, h]   = log_B(sum_k exp(scale * q[t, h] . kv[k]))
//
// A key is a latent row: d_v compressed dims and d_qk - d_v RoPE dims; the value is its first d_v
// dims. One file in backends/ and one line in backends.inc make a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/bf16.h"
#include "base/status.h"
#include "base/stream.h"
#include "base/tensor.h"
#include "kernels/device_step.h"
#include "kernels/lse.h"

namespace dcp {

class WorkerPool;

enum class Arch : std::uint8_t { kHost, kCuda };
enum class KvFormat : std::uint8_t { kBf16 };

std::string_view ArchName(Arch arch);
std::string_view KvFormatName(KvFormat format);

// What a layer looks like to a backend; fixed at start.
struct AttentionGeometry {
  int heads = 0;        // query heads, all of them: every rank attends for every head
  int d_qk = 0;         // kv_lora_rank + rope_dim
  int d_v = 0;          // kv_lora_rank
  int page_tokens = 0;  // tokens of one page of one rank
  double softmax_scale = 0;
  KvFormat kv_format = KvFormat::kBf16;
  DType partial_dtype = DType::kBf16;  // what `out` holds
};

// Where partials go: heads in groups of `heads_per_group` (the heads one rank will own), so that a
// backend writes straight into the exchange's message layout. Strides in bytes.
//   out(t, h) = out + (h / heads_per_group) * out_group_stride
//                   + (t * heads_per_group + h % heads_per_group) * d_v * sizeof(partial)
//   lse(t, h) = lse + (h / heads_per_group) * lse_group_stride
//                   + (t * heads_per_group + h % heads_per_group) * 4
struct PartialLayout {
  std::byte* out = nullptr;  // [groups][tokens, heads_per_group, d_v] bf16 | f32
  std::byte* lse = nullptr;  // [groups][tokens, heads_per_group] f32, in the backend's base
  std::int64_t out_group_stride = 0;
  std::int64_t lse_group_stride = 0;
  int heads_per_group = 0;
};

struct AttentionArgs {
  const Bf16* query = nullptr;  // [tokens, heads, d_qk] bf16
  // Pages of one layer: kv(page, slot) = kv + page * page_stride + slot * d_qk (in elements).
  const Bf16* kv = nullptr;
  std::int64_t page_stride = 0;
  // Entry e owns query tokens [entry_begin[e], entry_begin[e + 1]) and the pages
  // block_table[e * block_table_stride + i]; local key k lies in page i = k / page_tokens.
  // Table items past the last visible key and bytes past the last visible slot are never read.
  const std::int32_t* entry_begin = nullptr;  // [entries + 1]
  const std::int32_t* block_table = nullptr;  // [entries, block_table_stride]
  std::int64_t block_table_stride = 0;
  const std::int32_t* bound = nullptr;  // [tokens] local keys that query token t sees; 0: empty row
  int entries = 0;
  int tokens = 0;
  PartialLayout partial;
  StreamRef stream = StreamRef::Host();
  // Device backends: all pointers above are device addresses, `kv` is the pool's base, and what
  // changes from step to step is read from here, in device memory: entries, tokens, tables, bounds,
  // the layer, the plan. The fields from entry_begin to tokens are not read.
  const DeviceStep* step = nullptr;
};

// What a device backend plans a step from; host memory.
struct AttentionStep {
  const std::int32_t* entry_begin = nullptr;  // [entries + 1]
  const std::int32_t* bound = nullptr;        // [tokens], of this rank
  int entries = 0;
  int tokens = 0;
};

// What a backend declares in its table line. Nothing is inferred from names.
struct Capabilities {
  Arch arch;
  LogBase lse_base;
  EmptyMark empty_mark;  // lse of a row with no keys; its output is not specified
  KvFormat kv_format;
  int max_d_qk;  // any d_v <= d_qk <= max_d_qk, both multiples of dim_multiple
  int dim_multiple;
  int max_query_tokens;   // tokens of one entry in one step
  bool deterministic;     // same inputs, same bits, whatever else is in the batch
  int only_d_v = 0;       // the only d_v; 0: any
  int page_multiple = 1;  // of which page_tokens must be a multiple
};

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  // Writes every (t, h) of `partial`. Allocates nothing. Host backends have finished on return,
  // others have enqueued on args.stream, in launches that do not depend on the step and may be
  // captured in a graph. One caller at a time.
  virtual Status Run(const AttentionArgs& args) = 0;

  // Device backends: the most bytes a plan takes, and the plan of a step, which must reach
  // DeviceStep::plan (aligned to 16) before Run's kernels start. A plan depends on lengths only, so
  // results do not depend on how the step was launched. Returns the bytes used.
  virtual std::size_t MaxPlanBytes() const { return 0; }
  virtual Result<std::size_t> Plan(const AttentionStep&, std::span<std::byte>) {
    return std::size_t{0};
  }
};

struct BackendSetup {
  AttentionGeometry geometry;
  int max_tokens = 0;          // most query tokens of one step
  WorkerPool* pool = nullptr;  // host backends: threads shared by all ranks; outlives the backend
  int device = -1;             // device backends: the CUDA device; their memory is taken there
  std::int64_t max_keys = 0;   // device backends: most local keys of one entry; sizes plans
};

struct BackendEntry {
  std::string_view name;
  int priority;  // `auto` takes the highest that supports the problem
  Capabilities caps;
  Result<std::unique_ptr<AttentionBackend>> (*make)(const BackendSetup& setup);
};

// THE TABLE, kernels/backends.inc.
std::span<const BackendEntry> Backends();

// OK, or UNSUPPORTED with every reason why `entry` cannot serve this geometry on `arch`.
Status Supports(const BackendEntry& entry, const AttentionGeometry& geometry, Arch arch);

// `name` = "auto": the supported entry of highest priority; else that entry, which must be
// supported. Errors: UNSUPPORTED listing what was considered and why each does not fit.
Result<const BackendEntry*> SelectBackend(std::span<const BackendEntry> table,
                                          std::string_view name, const AttentionGeometry& geometry,
                                          Arch arch);

}  // namespace dcp
