// What every checked-in result says about its origin.
#pragma once

#include <string>

#include "base/status.h"

namespace dcp::bench {

// Writes {gpu, driver, cuda, nccl, git_hash, date, command, results: [rows]}; `rows` are JSON
// objects, separated by commas. The commit is $DCP_GIT_HASH where that is set, else the build's.
Status WriteReport(const std::string& path, const std::string& command, const std::string& rows);

// The command line as one string, the program without its folder.
std::string CommandLine(int argc, char** argv);

}  // namespace dcp::bench
