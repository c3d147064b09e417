// dcp-server with one fault, for tests:
//   DCP_TEST_FAULT="rank=1,phase=attend,kind=fail,step=5"
// In the step-th request that brings the rank to the phase (write, attend, exchange, merge) it
// fails there (kind=fail), never returns (kind=stall), or takes `ms` longer (kind=delay).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "runtime/rank_message.h"
#include "server/server_main.h"

namespace dcp {
namespace {

std::map<std::string, std::string> ParseFault(const std::string& text) {
  std::map<std::string, std::string> fields;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string field = text.substr(begin, end - begin);
    const std::size_t equals = field.find('=');
    if (equals == std::string::npos) {
      std::fprintf(stderr, "DCP_TEST_FAULT: \"%s\" is not key=value\n", field.c_str());
      std::exit(2);
    }
    fields[field.substr(0, equals)] = field.substr(equals + 1);
    begin = end + 1;
  }
  return fields;
}

RankFaultHook MakeFault(std::map<std::string, std::string> fields) {
  const int wanted_rank = std::stoi(fields["rank"]);
  const int wanted_step = std::stoi(fields["step"]);
  const Millis delay{fields.contains("ms") ? std::stoi(fields["ms"]) : 0};
  // Of the wanted rank, whose thread alone uses it. A phase may be entered more than once per
  // request, and outside of any (ranks agree through an exchange at start).
  struct Progress {
    bool counting = false;
    int count = 0;
  };
  auto progress = std::make_shared<Progress>();
  return [=, phase_name = fields["phase"], kind = fields["kind"]](int rank, RankPhase phase) {
    if (rank != wanted_rank) return Status::Ok();
    if (phase == RankPhase::kWrite) progress->counting = true;  // where each begins
    if (PhaseName(phase) != phase_name || !progress->counting) return Status::Ok();
    progress->counting = false;
    if (++progress->count != wanted_step) return Status::Ok();
    if (kind == "fail") return Status(Reason::kRankFailed, "fault of the test");
    if (kind == "delay") std::this_thread::sleep_for(delay);
    while (kind == "stall") std::this_thread::sleep_for(std::chrono::hours(1));
    return Status::Ok();
  };
}

}  // namespace
}  // namespace dcp

int main(int argc, char** argv) {
  dcp::EngineHooks hooks;
  hooks.poison_kv = true;
  if (const char* fault = std::getenv("DCP_TEST_FAULT")) {
    hooks.rank_fault = dcp::MakeFault(dcp::ParseFault(fault));
  }
  return dcp::ServerMain(argc, argv, std::move(hooks));
}
