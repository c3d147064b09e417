// KV writes, page copies and replay checks on the device against the same on the host.
#include "kernels/kv_cuda.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "tests/kernels/on_device.h"

namespace dcp::test {
namespace {

constexpr int kLayers = 3;
constexpr int kBlocks = 11;

struct Pool {
  int page_tokens;
  int d_qk;
  std::vector<Bf16> kv;  // [kLayers][kBlocks][page_tokens][d_qk]

  Pool(int page_tokens, int d_qk, std::mt19937& random)
      : page_tokens(page_tokens),
        d_qk(d_qk),
        kv(static_cast<std::size_t>(kLayers) * kBlocks * page_tokens * d_qk) {
    for (Bf16& x : kv) x.bits = static_cast<std::uint16_t>(random());
  }
  std::int64_t layer_items() const { return std::int64_t{kBlocks} * page_tokens * d_qk; }
  KvPool On(const cuda::DeviceBuffer& device) const {
    return {.base = device.as<Bf16>(),
            .layers = kLayers,
            .blocks = kBlocks,
            .page_tokens = page_tokens,
            .d_qk = d_qk};
  }
};

std::vector<Bf16> RandomLatents(int tokens, int d_qk, std::mt19937& random) {
  std::vector<Bf16> latents(static_cast<std::size_t>(tokens) * d_qk);
  for (Bf16& x : latents) x.bits = static_cast<std::uint16_t>(random());
  return latents;
}

// Every third token is another rank's.
std::vector<std::int64_t> SomeSlots(int tokens, const Pool& pool, std::mt19937& random) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(kBlocks) * pool.page_tokens);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  std::shuffle(all.begin(), all.end(), random);
  std::vector<std::int64_t> slots(all.begin(), all.begin() + tokens);
  for (int t = 0; t < tokens; t += 3) slots[t] = -1;
  return slots;
}

cuda::DeviceBuffer OneStep(const DeviceStep& step) {
  return ToDevice(std::vector<DeviceStep>{step});
}

}  // namespace

TEST_CASE("Page copies reach every layer and nothing else") {
  std::mt19937 random(1);
  for (const int page_tokens : {1, 16, 64}) {
    for (const int d_qk : {576, 80}) {
      Pool pool(page_tokens, d_qk, random);
      const cuda::DeviceBuffer device = ToDevice(pool.kv);
      const std::vector<DevicePageCopy> copies = {{2, 7}, {0, 10}, {2, 3}};
      const cuda::DeviceBuffer list = ToDevice(copies);
      const cuda::DeviceBuffer step =
          OneStep({.copies = 3, .page_copies = list.as<DevicePageCopy>()});
      RequireOk(CopyPages(pool.On(device), step.as<DeviceStep>(), TestStream().ref()));
      const std::int64_t page = std::int64_t{page_tokens} * d_qk;
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto base = pool.kv.begin() + layer * pool.layer_items();
        for (const DevicePageCopy& copy : copies) {
          std::copy_n(base + copy.from * page, page, base + copy.to * page);
        }
      }
      CHECK(ToHost<Bf16>(device) == pool.kv);
    }
  }
}

TEST_CASE("New latents are stored in one layer, by the ranks that own them") {
  std::mt19937 random(2);
  for (const int tokens : {0, 1, 9}) {
    for (const bool has_new_kv : {true, false}) {
      Pool pool(16, 576, random);
      const cuda::DeviceBuffer device = ToDevice(pool.kv);
      const std::vector<Bf16> latents = RandomLatents(tokens, pool.d_qk, random);
      const std::vector<std::int64_t> slots = SomeSlots(tokens, pool, random);
      const cuda::DeviceBuffer device_latents = ToDevice(latents);
      const cuda::DeviceBuffer device_slots = ToDevice(slots);
      const std::int64_t offset = pool.layer_items();  // layer 1
      const cuda::DeviceBuffer step = OneStep({.tokens = tokens,
                                               .kv_offset = offset,
                                               .slots = device_slots.as<std::int64_t>(),
                                               .has_new_kv = has_new_kv});
      RequireOk(WriteKv(pool.On(device), device_latents.as<Bf16>(), step.as<DeviceStep>(),
                        TestStream().ref()));
      for (int t = 0; t < tokens && has_new_kv; ++t) {
        if (slots[t] < 0) continue;
        std::copy_n(latents.begin() + std::ptrdiff_t{t} * pool.d_qk, pool.d_qk,
                    pool.kv.begin() + offset + slots[t] * pool.d_qk);
      }
      CHECK(ToHost<Bf16>(device) == pool.kv);
    }
  }
}

TEST_CASE("A replay's first difference is found") {
  std::mt19937 random(3);
  constexpr int kTokens = 30;
  Pool pool(16, 576, random);
  std::vector<Bf16> latents = RandomLatents(kTokens, pool.d_qk, random);
  const std::vector<std::int64_t> slots = SomeSlots(kTokens, pool, random);
  const cuda::DeviceBuffer device = ToDevice(pool.kv);
  const cuda::DeviceBuffer device_slots = ToDevice(slots);
  const cuda::DeviceBuffer step = OneStep({.tokens = kTokens,
                                           .kv_offset = 2 * pool.layer_items(),
                                           .slots = device_slots.as<std::int64_t>(),
                                           .has_new_kv = true});
  const auto compare = [&] {
    const cuda::DeviceBuffer sent = ToDevice(latents);
    const cuda::DeviceBuffer first = ToDevice(std::vector<std::int32_t>{12345});
    RequireOk(CompareKv(pool.On(device), sent.as<Bf16>(), step.as<DeviceStep>(),
                        first.as<std::int32_t>(), TestStream().ref()));
    return ToHost<std::int32_t>(first)[0];
  };
  const cuda::DeviceBuffer sent = ToDevice(latents);
  CHECK(compare() == 1);  // token 0 is another rank's
  RequireOk(WriteKv(pool.On(device), sent.as<Bf16>(), step.as<DeviceStep>(), TestStream().ref()));
  CHECK(compare() == -1);
  latents[27u * 576 + 3].bits ^= 1;  // another rank's: not compared
  CHECK(compare() == -1);
  latents[26u * 576 + 575].bits ^= 0x8000;
  CHECK(compare() == 26);
  latents[4u * 576].bits ^= 1;
  CHECK(compare() == 4);
}

}  // namespace dcp::test
