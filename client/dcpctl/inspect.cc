// info, health, sequences, load: one question each.
#include <fmt/core.h>

#include <algorithm>

#include "client/cpp/client.h"
#include "client/dcpctl/commands.h"
#include "client/dcpctl/output.h"

namespace dcp {
namespace {

void Print(const Globals& globals, const Json& object) {
  if (globals.json) {
    fmt::print("{}\n", object.dump(2));
  } else {
    PrintFields(object);
  }
}

int Info(const Globals& globals) {
  auto client = Client::Connect(globals.server);
  if (!client.ok()) return Fail(globals, client.error());
  Print(globals, ToJson((*client)->info()));
  return kExitOk;
}

int Load(const Globals& globals) {
  auto client = Client::Connect(globals.server);
  if (!client.ok()) return Fail(globals, client.error());
  auto load = (*client)->GetLoad();
  if (!load.ok()) return Fail(globals, load.error());
  Print(globals, ToJson(*load));
  return kExitOk;
}

int ShowHealth(const Globals& globals) {
  auto health = CheckHealth(globals.server);
  if (!health.ok()) return Fail(globals, health.error());
  const bool serving = *health == Health::kServing;
  const char* name = serving                          ? "SERVING"
                     : *health == Health::kNotServing ? "NOT_SERVING"
                                                      : "UNKNOWN";
  if (globals.json) {
    fmt::print("{}\n", Json{{"status", name}}.dump(2));
  } else {
    fmt::print("{}\n", Painted(serving ? Paint::kGood : Paint::kBad, name));
  }
  return serving ? kExitOk : kExitFailed;
}

int Sequences(const Globals& globals) {
  auto client = Client::Connect(globals.server);
  if (!client.ok()) return Fail(globals, client.error());
  Json all = Json::array();
  if (!globals.json) {
    fmt::print("{}\n",
               Painted(Paint::kBold,
                       fmt::format("{:<40} {:>10} {:>9} {:>9} {:>8} {:>8} {:>7}", "SEQUENCE",
                                   "GENERATION", "LENGTH", "STEP", "BLOCKS", "SHARED", "APPENDS")));
  }
  v1::ListSequencesRequest request;
  request.set_page_size(1000);
  do {
    auto page = (*client)->ListSequences(request);
    if (!page.ok()) return Fail(globals, page.error());
    for (const v1::Sequence& s : page->sequences()) {
      if (globals.json) {
        all.push_back(ToJson(s));
        continue;
      }
      // Layers differ only in the middle of a step.
      const auto [low, high] =
          std::minmax_element(s.layer_lengths().begin(), s.layer_lengths().end());
      std::string length = "0";
      if (s.layer_lengths_size() > 0) {
        length = *low == *high ? fmt::format("{}", *low) : fmt::format("{}..{}", *low, *high);
      }
      fmt::print("{:<40} {:>10} {:>9} {:>9} {:>8} {:>8} {:>7}\n", s.ref().sequence_id(),
                 s.ref().generation(), length, s.max_step_id(), s.blocks(), s.shared_blocks(),
                 s.open_appends());
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  if (globals.json) fmt::print("{}\n", Json{{"sequences", std::move(all)}}.dump(2));
  return kExitOk;
}

}  // namespace

void AddInspectCommands(CLI::App& app, const Globals& globals, Action& action) {
  const auto add = [&](const char* name, const char* help, int (*run)(const Globals&)) {
    app.add_subcommand(name, help)->fallthrough()->callback([&globals, &action, run] {
      action = [&globals, run] { return run(globals); };
    });
  };
  add("info", "What the server is: geometry, limits, choices made at start", Info);
  add("health", "Whether the server serves; exit code 1 when not", ShowHealth);
  add("sequences", "All live sequences", Sequences);
  add("load", "Queue, KV blocks, counters", Load);
}

}  // namespace dcp
