#include "tests/integration/server_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace dcp {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

int ExitOf(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
}

// The child's end of a fork; only async-signal-safe calls.
[[noreturn]] void Exec(const std::vector<std::string>& arguments, int out, int err,
                       const std::vector<std::pair<std::string, std::string>>& environment) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes leaves no server behind
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  for (const auto& [key, value] : environment) setenv(key.c_str(), value.c_str(), 1);
  std::vector<char*> argv;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

}  // namespace

std::string TestConfig::Toml() const {
  std::ostringstream out;
  out.precision(17);
  out << "[server]\n"
      << server << "[ranks]\ncount = " << ranks << "\ntimeout_ms = " << rank_timeout_ms
      << "\n[model]\nlayers = " << layers << "\nheads = " << heads
      << "\nkv_lora_rank = " << kv_lora_rank << "\nrope_dim = " << rope_dim
      << "\nsoftmax_scale = " << softmax_scale << "\n[kv]\npage_tokens = " << page_tokens
      << "\ninterleave = 1\nblocks = " << blocks << "\n[attention]\nbackend = \"" << backend
      << "\"\npartial_dtype = \"" << partial_dtype << "\"\n[limits]\n"
      << limits << "[log]\nlevel = \"debug\"\n";
  return out.str();
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "dcp-test-XXXXXX").string();
  REQUIRE(mkdtemp(name.data()) != nullptr);
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ServerProcess::ServerProcess(const ServerOptions& options) {
  const std::string config = folder_.path() + "/config.toml";
  std::ofstream(config) << options.config;

  std::vector<std::string> arguments = {options.program, "--config", config};
  if (!options.listen.empty()) {
    arguments.insert(arguments.end(), {"--listen", options.listen});
  }
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());

  int out[2];
  REQUIRE(pipe2(out, O_CLOEXEC) == 0);
  const std::string log = folder_.path() + "/log";
  const int err = open(log.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  REQUIRE(err >= 0);
  pid_ = fork();
  REQUIRE(pid_ >= 0);
  if (pid_ == 0) Exec(arguments, out[1], err, options.environment);
  close(out[1]);
  close(err);
  stdout_ = out[0];

  std::string text;
  const TimePoint deadline = Clock::now() + std::chrono::seconds(20);
  while (text.find('\n') == std::string::npos) {
    const auto left = std::chrono::duration_cast<Millis>(deadline - Clock::now()).count();
    pollfd wait{.fd = stdout_, .events = POLLIN, .revents = 0};
    char buffer[512];
    const ssize_t n = left > 0 && poll(&wait, 1, static_cast<int>(left)) == 1
                          ? read(stdout_, buffer, sizeof(buffer))
                          : 0;
    if (n <= 0) FAIL("the server is not ready: " << Log());
    text.append(buffer, static_cast<std::size_t>(n));
  }
  const std::string prefix = "listening on ";
  REQUIRE(text.starts_with(prefix));
  address_ = text.substr(prefix.size(), text.find('\n') - prefix.size());
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0 && !exit_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (stdout_ >= 0) close(stdout_);
}

int ServerProcess::port() const { return std::stoi(address_.substr(address_.rfind(':') + 1)); }

void ServerProcess::Signal(int signal) const { REQUIRE(kill(pid_, signal) == 0); }

std::optional<int> ServerProcess::WaitForExit(Millis timeout) {
  const TimePoint deadline = Clock::now() + timeout;
  while (!exit_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_ = ExitOf(status);
    } else if (Clock::now() >= deadline) {
      return std::nullopt;
    } else {
      std::this_thread::sleep_for(Millis{5});
    }
  }
  return exit_;
}

std::int64_t ServerProcess::ResidentBytes() const {
  std::istringstream statm(ReadFile("/proc/" + std::to_string(pid_) + "/statm"));
  std::int64_t total = 0;
  std::int64_t resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string ServerProcess::Log() const { return ReadFile(folder_.path() + "/log"); }

ProgramResult RunServerProgram(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {DCP_SERVER_PROGRAM};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  int out[2];
  REQUIRE(pipe2(out, O_CLOEXEC) == 0);
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) Exec(argv, out[1], out[1], {});
  close(out[1]);
  ProgramResult result;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(out[0], buffer, sizeof(buffer))) > 0;) {
    result.output.append(buffer, static_cast<std::size_t>(n));
  }
  close(out[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  result.exit = ExitOf(status);
  return result;
}

}  // namespace dcp
