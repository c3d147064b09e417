// An engine, sequences made of synthetic content, and the float64 truth of every
// answer. What tests of the runtime drive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/workload/synthetic.h"
#include "client/workload/truth.h"
#include "runtime/engine.h"

namespace dcp::testing {

struct ClusterOptions {
  int ranks = 2;
  int layers = 2;
  int heads = 8;
  int kv_lora_rank = 64;
  int rope_dim = 16;
  int page_tokens = 16;
  int interleave = 1;
  std::int64_t blocks = 64;
  ExchangeKind exchange = ExchangeKind::kA2a;
  DType partial_dtype = DType::kF32;
  std::string backend = "auto";
  int timeout_ms = 5000;
  int max_step_tokens = 128;
  RanksConfig on = {};  // device, devices, share_devices, graphs; the rest is not read
  EngineHooks hooks = {};
};

EngineConfig MakeConfig(const ClusterOptions& options);

// The client's picture of a sequence: which tokens it holds, by content.
class TestSequence {
 public:
  TestSequence(std::string id, std::uint64_t tail) : id_(std::move(id)), tail_(tail) {}

  const std::string& id() const { return id_; }
  SequenceRef ref() const { return {id_, generation}; }
  Content content() const { return Content(tail_, segments_); }
  // Keeps the first `at` tokens; what follows is content `tail`.
  void Diverge(std::int64_t at, std::uint64_t tail);
  // What a fork holds: these tokens up to `at`, then content `tail`. Not created by this.
  TestSequence Forked(std::string id, std::int64_t at, std::uint64_t tail) const;

  std::uint64_t generation = 0;

 private:
  friend class Cluster;
  std::string id_;
  std::vector<Segment> segments_;
  std::uint64_t tail_;
};

struct StepItem {
  const TestSequence* sequence = nullptr;
  std::int64_t start = 0;
  std::int32_t count = 1;
  bool rewind = false;
};

struct StepSpec {
  std::uint64_t step_id = 0;
  std::int32_t layer = 0;
  std::vector<StepItem> items;
  bool write = true;
  DType output_dtype = DType::kF32;
  LogBase lse_base = LogBase::kE;
};

struct RowErrors {
  double output = 0;  // largest ||o - t|| / ||t|| of a row
  double lse = 0;     // largest |lse - t| / max(1, |t|)
  std::int64_t rows = 0;
};

class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);  // fails the test when the engine does not start

  Engine& engine() { return *engine_; }
  const EngineConfig& config() const { return config_; }
  const Synthetic& synthetic() const { return synthetic_; }
  std::int64_t FreeBlocks() const { return engine_->load().free_blocks; }

  // Helpers that fail the test on an error.
  TestSequence Create(const std::string& id, std::uint64_t content);
  TestSequence Fork(const TestSequence& parent, const std::string& id, std::int64_t at,
                    std::uint64_t content);
  void Append(const TestSequence& sequence, std::uint64_t step_id, std::int64_t start,
              std::int64_t count);  // all layers, through BeginAppend .. CommitAppend
  void Release(const TestSequence& sequence);
  SequenceInfo Info(const TestSequence& sequence);

  // Requests with bytes that the request itself keeps alive.
  StepRequest MakeStep(const StepSpec& spec) const;
  AppendChunk MakeChunk(const TestSequence& sequence, std::int32_t layer, std::int64_t start,
                        std::int64_t offset, std::int64_t count) const;

  Result<StepReply> Step(const StepSpec& spec);
  Result<StepReply> Submit(StepRequest request);
  Result<AppendId> BeginAppend(const AppendRequest& request);
  Result<AppendId> WriteAppend(AppendId id, AppendChunk chunk);
  Result<AppendReply> CommitAppend(AppendId id);

  // Every row of the answer against the truth.
  RowErrors Check(const StepSpec& spec, const StepReply& reply) const;
  // Step, then Check against the limits that the dtypes and the exchange allow.
  void StepChecked(const StepSpec& spec);
  double OutputLimit(DType output_dtype) const;

 private:
  EngineConfig config_;
  Synthetic synthetic_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace dcp::testing
