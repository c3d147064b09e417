#include "runtime/kv_store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/sabotage.h"

namespace dcp {

std::int64_t KvStore::Bytes(const EngineConfig& c) {
  return c.LatentBytes() * c.model.layers * c.kv.blocks * c.kv.page_tokens;
}

void KvStore::Unmap::operator()(Bf16* p) const { ::munmap(p, bytes); }

Result<KvStore> KvStore::Create(const EngineConfig& c, bool poison) {
  // Validate() keeps each factor in range, but not their product.
  const __int128 wanted = static_cast<__int128>(c.LatentBytes()) * c.model.layers * c.kv.blocks *
                          c.kv.page_tokens * c.ranks.count;
  const __int128 memory =
      static_cast<__int128>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  if (wanted > memory) {
    const auto gib = [](__int128 b) { return std::to_string(static_cast<double>(b) / (1 << 30)); };
    return Status(Reason::kKvCapacity, "the KV pools of " + std::to_string(c.ranks.count) +
                                           " ranks need " + gib(wanted) + " GiB, this host has " +
                                           gib(memory) +
                                           "; lower kv.blocks = " + std::to_string(c.kv.blocks));
  }
  const auto bytes = static_cast<std::size_t>(Bytes(c));
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return Status(Reason::kKvCapacity, "cannot map " + std::to_string(bytes) + " bytes of KV pool");
  }
  KvStore store;
  store.base_ = std::unique_ptr<Bf16[], Unmap>(static_cast<Bf16*>(p), Unmap{bytes});
  store.layers_ = c.model.layers;
  store.blocks_ = c.kv.blocks;
  store.page_tokens_ = c.kv.page_tokens;
  store.d_qk_ = c.model.d_qk();
  store.page_stride_ = store.page_tokens_ * store.d_qk_;
  store.layer_stride_ = store.blocks_ * store.page_stride_;
  if (poison) std::fill_n(store.base_.get(), bytes / sizeof(Bf16), kBf16NaN);
  return store;
}

void KvStore::CopyPages(std::span<const PageCopy> copies) {
  if (Sabotaged(Fault::kCowSkipped)) return;
  for (const PageCopy& c : copies) {
    for (int layer = 0; layer < layers_; ++layer) {
      std::copy_n(Slot(layer, c.from * page_tokens_), page_stride_,
                  Slot(layer, c.to * page_tokens_));
    }
  }
}

void KvStore::Write(int layer, std::span<const std::int64_t> slots, ConstBytes latents) {
  if (Sabotaged(Fault::kLayerShifted)) layer = (layer + 1) % layers_;
  const std::size_t bytes = static_cast<std::size_t>(d_qk_) * sizeof(Bf16);
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] >= 0) std::memcpy(Slot(layer, slots[t]), latents.data() + t * bytes, bytes);
  }
}

std::int32_t KvStore::Compare(int layer, std::span<const std::int64_t> slots,
                              ConstBytes latents) const {
  const std::size_t bytes = static_cast<std::size_t>(d_qk_) * sizeof(Bf16);
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] >= 0 &&
        std::memcmp(Slot(layer, slots[t]), latents.data() + t * bytes, bytes) != 0) {
      return static_cast<std::int32_t>(t);
    }
  }
  return -1;
}

bool KvStore::Contains(const StepView& step) const {
  const auto page_ok = [this](std::int32_t page) { return page >= 0 && page < blocks_; };
  return step.header->layer >= 0 && step.header->layer < layers_ &&
         std::ranges::all_of(step.block_table, page_ok) &&
         std::ranges::all_of(step.copies,
                             [&](const PageCopy& c) { return page_ok(c.from) && page_ok(c.to); }) &&
         std::ranges::all_of(step.slots,
                             [this](std::int64_t s) { return s < blocks_ * page_tokens_; });
}

}  // namespace dcp
