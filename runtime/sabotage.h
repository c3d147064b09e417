// Named faults that a sabotage build (DCP_SABOTAGE defined) can switch on by the environment
// variable DCP_SABOTAGE_FAULT, so that the tests can be seen to fail. In every other build
// Sabotaged() is constant false and costs nothing.
#pragma once

#include <cstdlib>
#include <string_view>

namespace dcp {

enum class Fault {
  kBaseSwapped,        // rank 1 merges with the other log base
  kLseBf16,            // LSE rounded to bf16 before the exchange
  kBoundLocalMinusK,   // row bound local_length(L) - k
  kLastTokenMissed,    // the row does not see its own token
  kTokenBeyondSeen,    // the row sees the token after its own
  kEmptinessFromBits,  // a partial counts unless its LSE is -inf
  kOwnerOffAtPageEdge,
  kCowSkipped,
  kRewindKeepsOld,  // a rewind does not overwrite old latents
  kReplayAppendsTwice,
  kLayerShifted,    // layer l written to l + 1
  kStalePageTable,  // attention reads the table from before the step
};

inline constexpr std::string_view kFaultNames[] = {
    "base_swapped",           "lse_bf16",          "bound_local_minus_k",
    "last_token_missed",      "token_beyond_seen", "emptiness_from_bits",
    "owner_off_at_page_edge", "cow_skipped",       "rewind_keeps_old",
    "replay_appends_twice",   "layer_shifted",     "stale_page_table",
};

#if defined(DCP_SABOTAGE)
inline bool Sabotaged(Fault fault) {
  static const std::string_view kChosen = [] {
    const char* name = std::getenv("DCP_SABOTAGE_FAULT");
    return std::string_view(name == nullptr ? "" : name);
  }();
  return kFaultNames[static_cast<int>(fault)] == kChosen;
}
#else
constexpr bool Sabotaged(Fault) { return false; }
#endif

}  // namespace dcp
