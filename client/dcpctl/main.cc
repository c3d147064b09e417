// dcpctl: looks at a dcp-server, and loads and checks it.
#include "client/dcpctl/commands.h"

int main(int argc, char** argv) {
  dcp::Globals globals;
  dcp::Action action;
  CLI::App app("Looks at a dcp-server, and replays traces against it with every answer checked.",
               "dcpctl");
  app.set_version_flag("--version", "dcpctl " DCP_VERSION);
  app.add_option("--server", globals.server, "Address of the server: host:port or unix:PATH")
      ->capture_default_str();
  app.add_flag("--json", globals.json, "Print JSON to stdout");
  app.require_subcommand(1);
  app.fallthrough();
  dcp::AddInspectCommands(app, globals, action);
  dcp::AddStepCommand(app, globals, action);
  dcp::AddReplayCommand(app, globals, action);
  dcp::AddGenerateTraceCommand(app, globals, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? dcp::kExitOk : dcp::kExitUsage;
  }
  return action();
}
