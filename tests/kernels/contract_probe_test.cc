// Honest backends pass in every geometry; each kind of lie is refused by name.
#include "kernels/contract_probe.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"

namespace dcp {
namespace {

AttentionGeometry Geometry() {
  return {.heads = 4,
          .d_qk = 96,
          .d_v = 64,
          .page_tokens = 4,
          .softmax_scale = 0.15,
          .partial_dtype = DType::kF32};
}

const BackendEntry& Reference() {
  const auto entry = SelectBackend(Backends(), "cpu_reference", Geometry(), Arch::kHost);
  REQUIRE(entry.ok());
  return **entry;
}

// cpu_reference with its arguments or its results changed.
class Liar final : public AttentionBackend {
 public:
  std::function<void(AttentionArgs&)> before = [](AttentionArgs&) {};
  // Called for every row that was written: LSE, output, keys that the row sees.
  std::function<void(float& lse, float* out, int keys)> after = [](float&, float*, int) {};

  explicit Liar(const BackendSetup& setup) : geometry_(setup.geometry) {
    auto honest = Reference().make(setup);
    REQUIRE(honest.ok());
    honest_ = *std::move(honest);
  }

  Status Run(const AttentionArgs& args) override {
    AttentionArgs changed = args;
    before(changed);
    DCP_RETURN_IF_ERROR(honest_->Run(changed));
    const PartialLayout& to = args.partial;
    for (int t = 0; t < args.tokens; ++t) {
      for (int h = 0; h < geometry_.heads; ++h) {
        const int group = h / to.heads_per_group;
        const int row = t * to.heads_per_group + h % to.heads_per_group;
        after(*reinterpret_cast<float*>(to.lse + group * to.lse_group_stride + row * 4),
              reinterpret_cast<float*>(to.out + group * to.out_group_stride) + row * geometry_.d_v,
              args.bound[t]);
      }
    }
    return Status::Ok();
  }

 private:
  const AttentionGeometry geometry_;
  std::unique_ptr<AttentionBackend> honest_;
};

BackendSetup Setup(int max_tokens = 4) {
  return {.geometry = Geometry(), .max_tokens = max_tokens};
}

BackendEntry Named() {
  BackendEntry entry = Reference();
  entry.name = "liar";
  return entry;
}

void CheckRefused(const BackendEntry& entry, AttentionBackend& backend, std::string_view what) {
  for (const int max_tokens : {1, 4}) {
    const Status status = ProbeContract(entry, Setup(max_tokens), backend);
    INFO(status.ToString());
    CHECK(status.reason() == Reason::kBackendContract);
    CHECK(status.message().find("liar") != std::string::npos);
    CHECK(status.message().find(what) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("Honest backends pass in every geometry") {
  for (const BackendEntry& entry : Backends()) {
    if (entry.caps.arch != Arch::kHost) continue;
    for (const int heads : {1, 3, 16, 128}) {
      for (const int page_tokens : {1, 16, 256}) {
        for (const DType dtype : {DType::kF32, DType::kBf16}) {
          for (const int max_tokens : {1, 2, 8}) {
            if (heads == 128 && (page_tokens != 16 || max_tokens != 8)) continue;
            const AttentionGeometry geometry{.heads = heads,
                                             .d_qk = heads == 3 ? 80 : 576,
                                             .d_v = heads == 3 ? 64 : 512,
                                             .page_tokens = page_tokens,
                                             .softmax_scale = heads == 3 ? 1.7 : 0.0721688,
                                             .partial_dtype = dtype};
            const BackendSetup setup{.geometry = geometry, .max_tokens = max_tokens};
            auto backend = entry.make(setup);
            REQUIRE(backend.ok());
            const Status status = ProbeContract(entry, setup, **backend);
            INFO(status.ToString());
            CHECK(status.ok());
          }
        }
      }
    }
  }
}

TEST_CASE("A wrong LSE base is refused, in both directions") {
  Liar two(Setup());
  two.after = [](float& lse, float*, int) { lse *= static_cast<float>(kLog2E); };
  CheckRefused(Named(), two, "base 2");

  BackendEntry declares_two = Named();
  declares_two.caps.lse_base = LogBase::kTwo;
  Liar e(Setup());
  CheckRefused(declares_two, e, "base e");
}

TEST_CASE("A wrong empty mark is refused") {
  for (const float mark :
       {std::numeric_limits<float>::infinity(), 0.0f, std::numeric_limits<float>::quiet_NaN()}) {
    Liar liar(Setup());
    liar.after = [mark](float& lse, float*, int keys) {
      if (keys == 0) lse = mark;
    };
    CheckRefused(Named(), liar, "row with no keys");
  }
  BackendEntry declares = Named();
  declares.caps.empty_mark = EmptyMark::kPosInf;
  Liar honest(Setup());
  CheckRefused(declares, honest, "row with no keys");
}

TEST_CASE("Reading past the bound is refused") {
  Liar liar(Setup());
  std::vector<std::int32_t> bound;
  liar.before = [&bound](AttentionArgs& args) {
    bound.assign(args.bound, args.bound + args.tokens);
    for (std::int32_t& b : bound) b += b > 0 ? 1 : 0;
    args.bound = bound.data();
  };
  CheckRefused(Named(), liar, "beyond the bound");
}

TEST_CASE("Reading values past the bound is refused even where the weight is 0") {
  Liar liar(Setup());
  liar.after = [](float&, float* out, int keys) {
    if (keys > 0) out[3] += 0 * std::numeric_limits<float>::quiet_NaN();
  };
  CheckRefused(Named(), liar, "beyond the bound");
}

TEST_CASE("Missing the last key is refused") {
  Liar liar(Setup());
  std::vector<std::int32_t> bound;
  liar.before = [&bound](AttentionArgs& args) {
    bound.assign(args.bound, args.bound + args.tokens);
    for (std::int32_t& b : bound) b -= b > 1 ? 1 : 0;
    args.bound = bound.data();
  };
  CheckRefused(Named(), liar, "LSE");
}

TEST_CASE("A wrong softmax scale is refused") {
  for (const double factor : {0.5, 1.02, kLog2E, std::sqrt(96.0 / 64.0)}) {
    BackendSetup setup = Setup();
    setup.geometry.softmax_scale *= factor;
    Liar liar(setup);
    CheckRefused(Named(), liar, "LSE");
  }
}

TEST_CASE("An LSE that is not written, or only for rows with keys, is refused") {
  Liar silent(Setup());
  std::vector<std::byte> elsewhere(1 << 16);
  silent.before = [&elsewhere](AttentionArgs& args) { args.partial.lse = elsewhere.data(); };
  CheckRefused(Named(), silent, "does not write the LSE");

  // An early return for empty rows leaves what the buffer held.
  Liar stale(Setup());
  float held = 0;
  stale.before = [&held](AttentionArgs& args) { std::memcpy(&held, args.partial.lse, 4); };
  stale.after = [&held](float& lse, float*, int keys) {
    if (keys == 0) lse = held;
  };
  CheckRefused(Named(), stale, "does not write the LSE");
}

TEST_CASE("Wrong outputs and stray writes are refused") {
  Liar swapped(Setup());
  swapped.after = [](float&, float* out, int) { std::swap(out[0], out[1]); };
  CheckRefused(Named(), swapped, "wrong output");

  Liar stray(Setup());
  stray.before = [](AttentionArgs& args) {
    const std::int64_t end = std::int64_t{args.tokens} * args.partial.heads_per_group * 64 * 4;
    args.partial.out[end] = std::byte{0};
  };
  CheckRefused(Named(), stray, "outside its rows");
}

}  // namespace dcp
