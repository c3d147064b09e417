#include "bench/report.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "base/cuda.h"
#include "base/version.h"
#include "comm/nccl.h"

namespace dcp::bench {
namespace {

// The kernel driver's, such as 580.95.05: the first word with a dot that begins with a digit; what
// CUDA it serves, where the driver's file is not there.
std::string DriverVersion() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word[0])) != 0 &&
        word.find('.') != std::string::npos) {
      return word;
    }
  }
  int cuda = 0;
  cudaDriverGetVersion(&cuda);
  return "for CUDA " + std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

}  // namespace

Status WriteReport(const std::string& path, const std::string& command, const std::string& rows) {
  DCP_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::Describe(0));
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
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
      device.name.c_str(), DriverVersion().c_str(),
      (std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10)).c_str(),
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
