// The KV bytes of one CPU rank: [layers][blocks][page_tokens][d_qk] bf16, one allocation.
// Reserved at start, touched when written. Used by the rank's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/bf16.h"
#include "base/status.h"
#include "comm/communicator.h"
#include "runtime/config.h"
#include "runtime/rank_message.h"

namespace dcp {

class KvStore {
 public:
  // `poison` fills the pool with NaN. Errors: KV_CAPACITY with the bytes asked.
  static Result<KvStore> Create(const EngineConfig& config, bool poison);
  static std::int64_t Bytes(const EngineConfig& config);

  const Bf16* layer(int layer) const { return base_.get() + layer * layer_stride_; }
  std::int64_t page_stride() const { return page_stride_; }  // elements

  // Slots are page * page_tokens + slot in page; token t of `latents` [tokens, d_qk] belongs to
  // slots[t], or to another rank where that is negative.
  void CopyPages(std::span<const PageCopy> copies);  // every layer
  void Write(int layer, std::span<const std::int64_t> slots, ConstBytes latents);
  // The first token whose stored latent differs, or -1.
  std::int32_t Compare(int layer, std::span<const std::int64_t> slots, ConstBytes latents) const;

  // Whether every index of a message lies inside the pool.
  bool Contains(const StepView& step) const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(Bf16* p) const;
  };
  KvStore() = default;
  Bf16* Slot(int layer, std::int64_t slot) const {
    return base_.get() + layer * layer_stride_ + slot * d_qk_;
  }

  std::unique_ptr<Bf16[], Unmap> base_;
  int layers_ = 0;
  std::int64_t blocks_ = 0;
  std::int64_t page_tokens_ = 0;
  std::int64_t d_qk_ = 0;
  std::int64_t page_stride_ = 0;   // elements
  std::int64_t layer_stride_ = 0;  // elements
};

}  // namespace dcp
