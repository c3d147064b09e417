#include <cmath>
#include <string>

#include "kernels/attention_backend.h"

namespace dcp {

using enum Arch;
using enum LogBase;
using enum EmptyMark;
using enum KvFormat;

#define DCP_BACKEND(factory, ...) \
  Result<std::unique_ptr<AttentionBackend>> factory(const BackendSetup& setup);
#include "kernels/backends.inc"
#undef DCP_BACKEND

namespace {

constexpr BackendEntry kBackends[] = {
#define DCP_BACKEND(factory, name, priority, ...) {name, priority, {__VA_ARGS__}, &factory},
#include "kernels/backends.inc"
#undef DCP_BACKEND
};

std::string Text(std::string_view text) { return std::string(text); }

// Every reason, separated by "; ". Empty: supported.
std::string WhyNot(const Capabilities& caps, const AttentionGeometry& g, Arch arch) {
  std::string why;
  const auto unless = [&why](bool ok, const std::string& reason) {
    if (!ok) why += (why.empty() ? "" : "; ") + reason;
  };
  const std::string d_qk = "d_qk = " + std::to_string(g.d_qk);
  const std::string d_v = "d_v = " + std::to_string(g.d_v);
  unless(caps.arch == arch,
         "runs on " + Text(ArchName(caps.arch)) + ", wanted " + Text(ArchName(arch)));
  unless(caps.kv_format == g.kv_format, "reads kv format " + Text(KvFormatName(caps.kv_format)) +
                                            ", wanted " + Text(KvFormatName(g.kv_format)));
  unless(g.heads >= 1, "heads = " + std::to_string(g.heads) + ", needs 1 or more");
  unless(g.d_qk <= caps.max_d_qk, d_qk + ", at most " + std::to_string(caps.max_d_qk));
  unless(g.d_v >= 1 && g.d_v <= g.d_qk, d_v + ", needs 1 to d_qk = " + std::to_string(g.d_qk));
  const std::string multiple = ", needs a multiple of " + std::to_string(caps.dim_multiple);
  unless(g.d_qk % caps.dim_multiple == 0, d_qk + multiple);
  unless(g.d_v % caps.dim_multiple == 0, d_v + multiple);
  unless(caps.only_d_v == 0 || g.d_v == caps.only_d_v,
         d_v + ", needs " + std::to_string(caps.only_d_v));
  const std::string page_tokens = "page_tokens = " + std::to_string(g.page_tokens);
  unless(g.page_tokens >= 1, page_tokens + ", needs 1 or more");
  unless(g.page_tokens % caps.page_multiple == 0,
         page_tokens + ", needs a multiple of " + std::to_string(caps.page_multiple));
  unless(std::isfinite(g.softmax_scale) && g.softmax_scale > 0,
         "softmax_scale = " + std::to_string(g.softmax_scale) + ", needs a positive number");
  return why;
}

}  // namespace

std::string_view ArchName(Arch arch) { return arch == kHost ? "host" : "cuda"; }

std::string_view KvFormatName(KvFormat format) {
  switch (format) {
    case kBf16: return "bf16";
  }
  return "unknown";
}

std::span<const BackendEntry> Backends() { return kBackends; }

Status Supports(const BackendEntry& entry, const AttentionGeometry& geometry, Arch arch) {
  const std::string why = WhyNot(entry.caps, geometry, arch);
  if (why.empty()) return Status::Ok();
  return Status(Reason::kUnsupported, "attention backend " + Text(entry.name) + ": " + why);
}

Result<const BackendEntry*> SelectBackend(std::span<const BackendEntry> table,
                                          std::string_view name, const AttentionGeometry& geometry,
                                          Arch arch) {
  const BackendEntry* best = nullptr;
  std::string considered;
  for (const BackendEntry& entry : table) {
    if (name != "auto" && name != entry.name) continue;
    const std::string why = WhyNot(entry.caps, geometry, arch);
    if (!why.empty()) {
      considered.append(" [").append(entry.name).append(": ").append(why).append("]");
    } else if (best == nullptr || entry.priority > best->priority) {
      best = &entry;
    }
  }
  if (best != nullptr) return best;
  if (!considered.empty()) {
    return Status(Reason::kUnsupported, "no attention backend fits:" + considered);
  }
  std::string known;
  for (const BackendEntry& entry : table) known.append(" ").append(entry.name);
  return Status(Reason::kUnsupported, "no attention backend is named '" + Text(name) +
                                          "'; there are:" + (known.empty() ? " none" : known));
}

}  // namespace dcp
