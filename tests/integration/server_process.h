// Runs the real server program as a child process.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"

namespace dcp {

// A folder of its own below the temporary one, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A small server: 2 ranks, 2 layers, 4 heads, 64 + 16 dims, pages of 4 tokens (blocks of 8), all
// in fp32 with the reference backend, so that answers are right to 1e-5.
struct TestConfig {
  int ranks = 2;
  int layers = 2;
  int heads = 4;
  int kv_lora_rank = 64;
  int rope_dim = 16;
  double softmax_scale = 0.2;
  int page_tokens = 4;
  int blocks = 32;
  std::string backend = "cpu_reference";
  std::string partial_dtype = "fp32";
  std::string server;  // more lines of [server]
  std::string limits;  // more lines of [limits]
  int rank_timeout_ms = 2000;

  int d_qk() const { return kv_lora_rank + rope_dim; }
  int block_tokens() const { return page_tokens * ranks; }
  std::string Toml() const;
};

struct ServerOptions {
  std::string program = DCP_SERVER_PROGRAM;
  std::string config = TestConfig().Toml();
  std::string listen = "127.0.0.1:0";  // "" : no flag
  std::vector<std::string> arguments;
  std::vector<std::pair<std::string, std::string>> environment;
};

class ServerProcess {
 public:
  // Fails the test if the server is not ready within 20 s.
  explicit ServerProcess(const ServerOptions& options = {});
  explicit ServerProcess(const TestConfig& config)
      : ServerProcess(ServerOptions{.config = config.Toml()}) {}
  ~ServerProcess();  // kills it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  int port() const;
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // The exit code, or minus the signal that ended it; nothing if it still runs then.
  std::optional<int> WaitForExit(Millis timeout);
  bool Runs() { return !WaitForExit(Millis{0}); }
  std::int64_t ResidentBytes() const;
  std::string Log() const;  // what it wrote to stderr

 private:
  pid_t pid_ = -1;
  int stdout_ = -1;
  TemporaryFolder folder_;
  std::string address_;
  std::optional<int> exit_;
};

// Runs the program to its end; its exit code and what it wrote.
struct ProgramResult {
  int exit = -1;
  std::string output;  // stdout and stderr
};
ProgramResult RunServerProgram(const std::vector<std::string>& arguments);

}  // namespace dcp
