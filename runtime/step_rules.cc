#include "runtime/step_rules.h"

#include <algorithm>
#include <string>

#include "runtime/sabotage.h"

namespace dcp {
namespace {

Status StepIdMissing(const std::string& name) {
  return Status(Reason::kStepId, name + ": a write needs step_id > 0");
}

Status Stale(const std::string& name, std::uint64_t given, std::uint64_t applied) {
  return Status(Reason::kStaleStep, name + ": step_id " + std::to_string(given) +
                                        " is older than " + std::to_string(applied) +
                                        ", which is applied")
      .With("applied_step_id", std::to_string(applied));
}

Status AppendOpen(const std::string& name) {
  return Status(Reason::kAppendOpen, name + " has an open AppendKv; commit or cancel it first");
}

std::string Range(std::int64_t start, std::int64_t count) {
  return "start " + std::to_string(start) + " count " + std::to_string(count);
}

Status WithLength(Status status, const LayerState& layer) {
  return std::move(status).With("actual_length", std::to_string(layer.length));
}

}  // namespace

Result<Verdict> JudgeWrite(const LayerState& layer, const WriteClaim& claim,
                           std::int64_t max_context, const std::string& name) {
  if (claim.step_id == 0) return StepIdMissing(name);
  if (claim.step_id < layer.step_id) return Stale(name, claim.step_id, layer.step_id);
  if (claim.step_id == layer.step_id) {
    if (claim.start != layer.start || claim.count != layer.count) {
      return Status(Reason::kReplayMismatch,
                    name + ": step_id " + std::to_string(claim.step_id) + " was applied with " +
                        Range(layer.start, layer.count) + ", this one has " +
                        Range(claim.start, claim.count));
    }
    if (layer.length < layer.start + layer.count) {  // a later rewind began and failed
      return WithLength(
          Status(Reason::kLengthConflict,
                 name + ": length is " + std::to_string(layer.length) + ", the tokens of step_id " +
                     std::to_string(claim.step_id) + " are no longer there"),
          layer);
    }
    return Sabotaged(Fault::kReplayAppendsTwice) ? Verdict::kAppend : Verdict::kReplay;
  }
  if (layer.open_append != 0) return AppendOpen(name);
  if (claim.start > layer.length) {
    return WithLength(
        Status(Reason::kPositionGap, name + ": start " + std::to_string(claim.start) +
                                         " is past the length " + std::to_string(layer.length)),
        layer);
  }
  if (claim.start < layer.length && !claim.rewind) {
    return WithLength(
        Status(Reason::kLengthConflict, name + ": length is " + std::to_string(layer.length) +
                                            ", start is " + std::to_string(claim.start) +
                                            "; a step with rewind replaces tokens"),
        layer);
  }
  if (claim.count > max_context - claim.start) {
    return Status(Reason::kContextLimit,
                  name + ": " + Range(claim.start, claim.count) +
                      " passes limits.max_context = " + std::to_string(max_context));
  }
  return claim.start < layer.length ? Verdict::kRewind : Verdict::kAppend;
}

Status JudgeRead(const LayerState& layer, std::int64_t start, std::int64_t count,
                 const std::string& name) {
  if (start <= layer.length - count) return Status::Ok();
  return WithLength(
      Status(Reason::kReadRange, name + ": " + Range(start, count) + " is not below the length " +
                                     std::to_string(layer.length)),
      layer);
}

Result<Verdict> JudgeTruncate(const Sequence& sequence, std::uint64_t step_id,
                              std::int64_t to_length) {
  const std::string name = "sequence \"" + sequence.id + "\"";
  if (step_id == 0) return StepIdMissing(name);
  const std::uint64_t newest = sequence.MaxStepId();
  if (step_id < newest) return Stale(name, step_id, newest);
  if (step_id == newest) {
    const bool same = std::ranges::all_of(sequence.layers, [&](const LayerState& layer) {
      return layer.step_id == step_id && layer.start == to_length && layer.count == 0;
    });
    if (same) return Verdict::kReplay;
    return Status(Reason::kReplayMismatch,
                  name + ": step_id " + std::to_string(step_id) + " was applied as something else");
  }
  if (!sequence.open_appends.empty()) return AppendOpen(name);
  return Verdict::kRewind;
}

}  // namespace dcp
