#include "runtime/rank_message.h"

#include <cstring>
#include <string>

namespace dcp {
namespace {

// The sections of the common part, in order. Each is a whole number of 8 bytes from the start.
struct Sections {
  std::size_t entry_begin, bounds, block_table, copies;  // counts of items
  std::size_t bounds_at, table_at, copies_at, end;       // byte offsets

  static std::size_t Pad(std::size_t bytes) { return (bytes + 7) & ~std::size_t{7}; }

  explicit Sections(const StepHeader& h)
      : entry_begin(h.entries > 0 ? static_cast<std::size_t>(h.entries) + 1 : 0),
        bounds(h.entries > 0
                   ? static_cast<std::size_t>(h.ranks) * static_cast<std::size_t>(h.tokens)
                   : 0),
        block_table(static_cast<std::size_t>(h.entries) * static_cast<std::size_t>(h.table_stride)),
        copies(static_cast<std::size_t>(h.copies)) {
    bounds_at = sizeof(StepHeader) + Pad(entry_begin * sizeof(std::int32_t));
    table_at = bounds_at + Pad(bounds * sizeof(std::int32_t));
    copies_at = table_at + Pad(block_table * sizeof(std::int32_t));
    end = copies_at + Pad(copies * sizeof(PageCopy));
  }
};

Status Malformed(std::string what) {
  return Status(Reason::kInternal, "rank message: " + std::move(what));
}

}  // namespace

std::string_view PhaseName(RankPhase phase) {
  switch (phase) {
    case RankPhase::kIdle: return "idle";
    case RankPhase::kWrite: return "write";
    case RankPhase::kAttend: return "attend";
    case RankPhase::kExchange: return "exchange";
    case RankPhase::kMerge: return "merge";
  }
  return "?";
}

MutableStep LayOutCommon(const StepHeader& header, std::vector<std::byte>& common) {
  const Sections s(header);
  common.resize(s.end);
  std::byte* base = common.data();
  std::memcpy(base, &header, sizeof(header));
  const auto ints = [base](std::size_t at, std::size_t n) {
    return std::span(reinterpret_cast<std::int32_t*>(base + at), n);
  };
  return {.header = reinterpret_cast<StepHeader*>(base),
          .entry_begin = ints(sizeof(StepHeader), s.entry_begin),
          .bounds = ints(s.bounds_at, s.bounds),
          .block_table = ints(s.table_at, s.block_table),
          .copies = std::span(reinterpret_cast<PageCopy*>(base + s.copies_at), s.copies)};
}

Result<StepView> ParseStep(ConstBytes common, ConstBytes own) {
  if (common.size() < sizeof(StepHeader)) {
    return Malformed(std::to_string(common.size()) + " bytes, expected a header");
  }
  const std::byte* base = common.data();
  const auto* h = reinterpret_cast<const StepHeader*>(base);
  if (h->magic != StepHeader::kMagic || h->version != StepHeader::kVersion) {
    return Malformed("version " + std::to_string(h->version) + ", expected " +
                     std::to_string(StepHeader::kVersion));
  }
  if (h->ranks < 1 || h->entries < 0 || h->tokens < 0 || h->table_stride < 0 || h->copies < 0) {
    return Malformed("a negative count");
  }
  const Sections s(*h);
  if (s.end != common.size()) {
    return Malformed(std::to_string(common.size()) + " bytes, expected " + std::to_string(s.end));
  }
  if (own.size() != static_cast<std::size_t>(h->tokens) * sizeof(std::int64_t)) {
    return Malformed("own part has " + std::to_string(own.size()) + " bytes for " +
                     std::to_string(h->tokens) + " tokens");
  }
  const auto ints = [base](std::size_t at, std::size_t n) {
    return std::span(reinterpret_cast<const std::int32_t*>(base + at), n);
  };
  StepView view{
      .header = h,
      .entry_begin = ints(sizeof(StepHeader), s.entry_begin),
      .bounds = ints(s.bounds_at, s.bounds),
      .block_table = ints(s.table_at, s.block_table),
      .copies = std::span(reinterpret_cast<const PageCopy*>(base + s.copies_at), s.copies),
      .slots = std::span(reinterpret_cast<const std::int64_t*>(own.data()),
                         static_cast<std::size_t>(h->tokens))};
  for (std::size_t e = 0; e < view.entry_begin.size(); ++e) {
    const std::int32_t low = e == 0 ? 0 : view.entry_begin[e - 1];
    if (view.entry_begin[e] < low || view.entry_begin[e] > h->tokens) {
      return Malformed("entry " + std::to_string(e) + " is out of order");
    }
  }
  return view;
}

}  // namespace dcp
