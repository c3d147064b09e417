#include <catch2/catch.hpp>
#include <cmath>
#include <set>
#include <string>

#include "kernels/attention_backend.h"

namespace dcp {
namespace {

AttentionGeometry DeepSeek() {
  return {.heads = 128, .d_qk = 576, .d_v = 512, .page_tokens = 64, .softmax_scale = 0.0721688};
}

Result<std::unique_ptr<AttentionBackend>> MakeNothing(const BackendSetup&) {
  return Status(Reason::kInternal, "never made");
}

constexpr Capabilities Host() {
  return {.arch = Arch::kHost,
          .lse_base = LogBase::kE,
          .empty_mark = EmptyMark::kNegInf,
          .kv_format = KvFormat::kBf16,
          .max_d_qk = 576,
          .dim_multiple = 16,
          .max_query_tokens = 1,
          .deterministic = true,
          .only_d_v = 0,
          .page_multiple = 1};
}

bool Contains(const Status& status, std::string_view text) {
  return status.message().find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("The table has unique names and the declared contracts") {
  std::set<std::string_view> names;
  for (const BackendEntry& entry : Backends()) {
    CHECK(names.insert(entry.name).second);
    CHECK(entry.make != nullptr);
    CHECK(entry.caps.max_d_qk >= 576);
  }
  CHECK(names.count("cpu_reference") == 1);
  CHECK(names.count("cpu_simd") == 1);
}

TEST_CASE("auto takes the highest priority that fits") {
  const auto best = SelectBackend(Backends(), "auto", DeepSeek(), Arch::kHost);
  REQUIRE(best.ok());
  CHECK((*best)->name == "cpu_simd");
  AttentionGeometry odd = DeepSeek();
  odd.d_v = 500;
  const auto fallback = SelectBackend(Backends(), "auto", odd, Arch::kHost);
  REQUIRE(fallback.ok());
  CHECK((*fallback)->name == "cpu_reference");
}

TEST_CASE("A named backend is taken or refused, never replaced") {
  const auto named = SelectBackend(Backends(), "cpu_reference", DeepSeek(), Arch::kHost);
  REQUIRE(named.ok());
  CHECK((*named)->name == "cpu_reference");
  AttentionGeometry odd = DeepSeek();
  odd.d_v = 500;
  const Status refused = SelectBackend(Backends(), "cpu_simd", odd, Arch::kHost).status();
  CHECK(refused.reason() == Reason::kUnsupported);
  CHECK(Contains(refused, "cpu_simd"));
  CHECK(Contains(refused, "d_v = 500"));
  const Status unknown = SelectBackend(Backends(), "flash", DeepSeek(), Arch::kHost).status();
  CHECK(unknown.reason() == Reason::kUnsupported);
  CHECK(Contains(unknown, "'flash'"));
  CHECK(Contains(unknown, "cpu_reference"));
}

TEST_CASE("Supports lists every reason") {
  const BackendEntry entry{.name = "toy", .priority = 1, .caps = Host(), .make = &MakeNothing};
  CHECK(Supports(entry, DeepSeek(), Arch::kHost).ok());
  const AttentionGeometry bad{
      .heads = 0, .d_qk = 577, .d_v = 600, .page_tokens = 0, .softmax_scale = 0};
  const Status status = Supports(entry, bad, Arch::kCuda);
  CHECK(status.reason() == Reason::kUnsupported);
  for (const char* text : {"toy", "host", "cuda", "heads = 0", "d_qk = 577", "at most 576",
                           "d_v = 600", "multiple of 16", "page_tokens = 0", "softmax_scale"}) {
    INFO(text);
    CHECK(Contains(status, text));
  }
  for (const double scale : {-1.0, std::nan(""), HUGE_VAL}) {
    AttentionGeometry g = DeepSeek();
    g.softmax_scale = scale;
    CHECK_FALSE(Supports(entry, g, Arch::kHost).ok());
  }
}

TEST_CASE("A backend for one d_v and some page sizes refuses the others") {
  BackendEntry entry{.name = "toy", .priority = 1, .caps = Host(), .make = &MakeNothing};
  entry.caps.only_d_v = 512;
  entry.caps.page_multiple = 8;
  CHECK(Supports(entry, DeepSeek(), Arch::kHost).ok());
  AttentionGeometry bad = DeepSeek();
  bad.d_v = 256;
  bad.page_tokens = 12;
  const Status status = Supports(entry, bad, Arch::kHost);
  CHECK(Contains(status, "d_v = 256, needs 512"));
  CHECK(Contains(status, "page_tokens = 12, needs a multiple of 8"));
}

TEST_CASE("A failed selection says why for each backend") {
  const BackendEntry table[] = {{"one", 1, Host(), &MakeNothing}, {"two", 2, Host(), &MakeNothing}};
  AttentionGeometry wide = DeepSeek();
  wide.d_qk = 1152;
  const Status status = SelectBackend(table, "auto", wide, Arch::kHost).status();
  CHECK(status.reason() == Reason::kUnsupported);
  CHECK(Contains(status, "[one: d_qk = 1152"));
  CHECK(Contains(status, "[two: d_qk = 1152"));
  CHECK_FALSE(SelectBackend({}, "auto", wide, Arch::kHost).ok());
}

}  // namespace dcp
