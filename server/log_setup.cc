#include "server/log_setup.h"

#include <grpc/support/log.h>
#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <cstdio>
#include <ctime>
#include <memory>
#include <string_view>

#include "base/log.h"

namespace dcp {
namespace {

void AppendJsonString(std::string_view text, spdlog::memory_buf_t& out) {
  out.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      const int n = std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out.append(escaped, escaped + n);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

void Append(std::string_view text, spdlog::memory_buf_t& out) {
  out.append(text.data(), text.data() + text.size());
}

// One object per line: {"time":"...Z","level":"info","message":"..."}.
class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const auto since_epoch = message.time.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
    const auto micros =
        std::chrono::duration_cast<std::chrono::microseconds>(since_epoch - seconds).count();
    const std::time_t time = seconds.count();
    std::tm utc{};
    gmtime_r(&time, &utc);
    char text[64];
    std::size_t n = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
    n += static_cast<std::size_t>(
        std::snprintf(text + n, sizeof(text) - n, ".%06dZ", static_cast<int>(micros)));
    Append(R"({"time":")", out);
    Append({text, n}, out);
    Append(R"(","level":")", out);
    const auto level = spdlog::level::to_string_view(message.level);
    Append({level.data(), level.size()}, out);
    Append(R"(","message":)", out);
    AppendJsonString({message.payload.data(), message.payload.size()}, out);
    Append("}\n", out);
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

// gRPC reports as errors what is the peer's doing (a client that vanished, garbage on the port).
void LogFromGrpc(gpr_log_func_args* args) {
  const bool error = args->severity == GPR_LOG_SEVERITY_ERROR;
  spdlog::log(error ? spdlog::level::warn : spdlog::level::debug, "grpc: {}", args->message);
}

}  // namespace

void SetUpLogging(const LogConfig& config) {
  auto logger =
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  if (config.format == LogFormat::kJson) {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %-8l %v");
  }
  logger->set_level(spdlog::level::from_str(config.level == "warn" ? "warning" : config.level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(&LogFromGrpc);
}

}  // namespace dcp
