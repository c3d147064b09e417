#include "bench/report.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "base/cuda.h"
#include "base/version.h"
#include "comm/nccl.h"

namespace dcp::bench {

Status WriteReport(const std::string& path, const std::string& command, const std::string& rows) {
  DCP_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::Describe(0));
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto text = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  const Result<NcclVersion> nccl = LoadedNccl();
  const char* const hash = std::getenv("DCP_GIT_HASH");
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));

  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return Status(Reason::kConfig, "cannot write " + path);
  std::fprintf(
      file,
      "{\n\"gpu\": \"%s\", \"driver\": \"%s\", \"cuda\": \"%s\", \"nccl\": \"%s\",\n"
      "\"git_hash\": \"%s\", \"date\": \"%s\",\n\"command\": \"%s\",\n\"results\": [\n%s\n]\n}\n",
      device.name.c_str(), text(driver).c_str(), text(runtime).c_str(),
      nccl.ok() ? std::to_string(nccl->code).c_str() : "none",
      hash != nullptr ? hash : std::string(kGitHash).c_str(), date, command.c_str(), rows.c_str());
  const bool written = std::ferror(file) == 0;
  if (std::fclose(file) == 0 && written) return Status::Ok();
  return Status(Reason::kConfig, "cannot write " + path);
}

std::string CommandLine(int argc, char** argv) {
  std::string line = argv[0];
  line.erase(0, line.rfind('/') + 1);  // where the program lies says nothing about the result
  for (int i = 1; i < argc; ++i) line.append(" ").append(argv[i]);
  return line;
}

}  // namespace dcp::bench
