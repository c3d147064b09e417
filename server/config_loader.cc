#include "server/config_loader.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <utility>

namespace dcp {
namespace {

constexpr std::array<std::string_view, 7> kLogLevels = {"trace", "debug",    "info", "warn",
                                                        "error", "critical", "off"};

std::string Quoted(std::string_view text) { return '"' + std::string(text) + '"'; }

std::string Shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&out](const auto& n) { out << n; });
  return out.str();
}

// One section of the file. Collects the first error; keys that nobody asked for are errors.
class Section {
 public:
  Section(const toml::table& root, std::string_view file, std::string_view name)
      : file_(file), name_(name) {
    const toml::node* node = root.get(name);
    if (node == nullptr) return;
    table_ = node->as_table();
    if (table_ == nullptr) Fail(*node, std::string(name_), "expected a section");
  }

  void Get(std::string_view key, std::int64_t low, std::int64_t high, std::int64_t* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    const auto value = node->is_integer() ? node->value<std::int64_t>() : std::nullopt;
    if (!value || *value < low || *value > high) {
      return Reject(key, *node,
                    "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    }
    *out = *value;
  }

  // The engine says which integers it takes (Validate); here it only has to fit.
  void Get(std::string_view key, int* out) {
    std::int64_t value = *out;
    Get(key, std::numeric_limits<int>::min(), std::numeric_limits<int>::max(), &value);
    *out = static_cast<int>(value);
  }
  void Get(std::string_view key, std::int64_t* out) {
    Get(key, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max(),
        out);
  }
  void Get(std::string_view key, Millis* out) {
    std::int64_t value = out->count();
    Get(key, 0, 86'400'000, &value);
    *out = Millis{value};
  }
  void Get(std::string_view key, double* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    if (!node->is_number()) return Reject(key, *node, "a number");
    *out = *node->value<double>();
  }
  void Get(std::string_view key, std::string* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    if (!node->is_string()) return Reject(key, *node, "a string");
    *out = *node->value<std::string>();
  }

  // A string that must be one of `names`; its index.
  std::optional<std::size_t> Choice(std::string_view key, std::span<const std::string_view> names) {
    const toml::node* node = Find(key);
    if (node == nullptr) return std::nullopt;
    const auto value = node->value<std::string>();
    const auto found = std::find(names.begin(), names.end(), value.value_or(""));
    if (!node->is_string() || found == names.end()) {
      std::string rule;
      for (const std::string_view n : names) rule += (rule.empty() ? "" : " or ") + Quoted(n);
      Reject(key, *node, rule);
      return std::nullopt;
    }
    return static_cast<std::size_t>(found - names.begin());
  }

  void Get(std::string_view key, std::vector<std::string>* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    const toml::array* array = node->as_array();
    const bool strings = array != nullptr && !array->empty() &&
                         std::all_of(array->begin(), array->end(),
                                     [](const toml::node& n) { return n.is_string(); });
    if (!strings) return Reject(key, *node, "an array of one or more strings");
    out->clear();
    for (const toml::node& n : *array) out->push_back(*n.value<std::string>());
  }

  void Get(std::string_view key, std::vector<int>* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    const toml::array* array = node->as_array();
    const auto fits = [](const toml::node& n) {
      const auto value = n.is_integer() ? n.value<std::int64_t>() : std::nullopt;
      return value && *value >= 0 && *value <= std::numeric_limits<int>::max();
    };
    if (array == nullptr || !std::all_of(array->begin(), array->end(), fits)) {
      return Reject(key, *node, "an array of whole numbers from 0");
    }
    out->clear();
    for (const toml::node& n : *array) out->push_back(static_cast<int>(*n.value<std::int64_t>()));
  }

  void Get(std::string_view key, bool* out) {
    const toml::node* node = Find(key);
    if (node == nullptr) return;
    if (!node->is_boolean()) return Reject(key, *node, "true or false");
    *out = *node->value<bool>();
  }
  void Get(std::string_view key, std::optional<bool>* out) {
    bool value = false;
    if (Find(key) == nullptr) return;
    Get(key, &value);
    *out = value;
  }

  void Require(std::string_view key) {
    if (table_ != nullptr && table_->contains(key)) return;
    if (error_.ok()) {
      error_ = Status(Reason::kConfig, file_ + ": " + Name(key) + " is missing, it is required");
    }
  }

  // The key's value is not what `rule` says.
  void Reject(std::string_view key, const toml::node& node, const std::string& rule) {
    Fail(node, Name(key) + " = " + Shown(node), "expected " + rule);
  }
  void Reject(std::string_view key, const std::string& rule) { Reject(key, *Find(key), rule); }

  Status Finish() {
    if (!error_.ok() || table_ == nullptr) return error_;
    for (const auto& [key, node] : *table_) {
      if (known_.contains(key.str())) continue;
      std::string keys;
      for (const std::string& k : known_) keys += (keys.empty() ? "" : ", ") + k;
      Fail(node, Name(key.str()) + " = " + Shown(node),
           "unknown key, section [" + name_ + "] has " + keys);
      break;
    }
    return error_;
  }

 private:
  const toml::node* Find(std::string_view key) {
    known_.emplace(key);
    return table_ == nullptr ? nullptr : table_->get(key);
  }

  std::string Name(std::string_view key) const { return name_ + "." + std::string(key); }

  void Fail(const toml::node& node, const std::string& what, const std::string& rule) {
    if (!error_.ok()) return;
    error_ = Status(Reason::kConfig, file_ + ":" + std::to_string(node.source().begin.line) + ": " +
                                         what + ": " + rule);
  }

  std::string file_;
  std::string name_;
  const toml::table* table_ = nullptr;
  std::set<std::string, std::less<>> known_;
  Status error_;
};

Status ReadServer(Section section, ServerConfig& config) {
  section.Get("listen", &config.listen);
  for (const std::string& address : config.listen) {
    if (const Status s = CheckAddress(address); !s.ok()) section.Reject("listen", s.message());
  }
  constexpr std::string_view kPoll[] = {"block", "spin"};
  if (const auto poll = section.Choice("poll", kPoll)) {
    config.poll = *poll == 0 ? PollMode::kBlock : PollMode::kSpin;
  }
  std::int64_t threads = config.threads;
  section.Get("threads", 1, 64, &threads);
  config.threads = static_cast<int>(threads);
  std::int64_t mib = config.max_message_bytes >> 20;
  section.Get("max_message_mib", 1, 2047, &mib);  // gRPC and protobuf count in 32 bits
  config.max_message_bytes = mib << 20;
  std::int64_t drain_ms = config.drain_timeout.count();
  section.Get("drain_timeout_ms", 100, 3'600'000, &drain_ms);
  config.drain_timeout = Millis{drain_ms};
  return section.Finish();
}

Status ReadRanks(Section section, RanksConfig& ranks) {
  section.Get("count", &ranks.count);
  std::string device = "cpu";
  section.Get("device", &device);
  if (device == "cuda") {
    ranks.device = RankDevice::kCuda;
  } else if (device != "cpu") {
    section.Reject("device", "\"cpu\" or \"cuda\"");
  }
  section.Get("devices", &ranks.devices);
  section.Get("share_devices", &ranks.share_devices);
  section.Get("graphs", &ranks.graphs);
  section.Get("timeout_ms", &ranks.timeout);
  section.Get("cpu_threads", &ranks.cpu_threads);
  section.Require("count");
  return section.Finish();
}

Status ReadModel(Section section, ModelConfig& model) {
  section.Get("layers", &model.layers);
  section.Get("heads", &model.heads);
  section.Get("kv_lora_rank", &model.kv_lora_rank);
  section.Get("rope_dim", &model.rope_dim);
  section.Get("softmax_scale", &model.softmax_scale);
  for (const auto key : {"layers", "heads", "kv_lora_rank", "rope_dim", "softmax_scale"}) {
    section.Require(key);
  }
  return section.Finish();
}

Status ReadKv(Section section, KvConfig& kv) {
  section.Get("page_tokens", &kv.page_tokens);
  section.Get("interleave", &kv.interleave);
  section.Get("blocks", &kv.blocks);
  section.Require("blocks");
  return section.Finish();
}

Status ReadAttention(Section section, AttentionConfig& attention) {
  section.Get("backend", &attention.backend);
  constexpr std::string_view kDTypes[] = {"bf16", "fp32"};
  if (const auto dtype = section.Choice("partial_dtype", kDTypes)) {
    attention.partial_dtype = *dtype == 0 ? DType::kBf16 : DType::kF32;
  }
  return section.Finish();
}

Status ReadExchange(Section section, ExchangeKind& exchange) {
  constexpr std::string_view kAlgorithms[] = {ExchangeName(ExchangeKind::kAgRs),
                                              ExchangeName(ExchangeKind::kA2a)};
  if (const auto algorithm = section.Choice("algorithm", kAlgorithms)) {
    exchange = *algorithm == 0 ? ExchangeKind::kAgRs : ExchangeKind::kA2a;
  }
  return section.Finish();
}

Status ReadLimits(Section section, LimitsConfig& limits) {
  section.Get("max_sequences", &limits.max_sequences);
  section.Get("max_context", &limits.max_context);
  section.Get("max_batch", &limits.max_batch);
  section.Get("max_query_tokens", &limits.max_query_tokens);
  section.Get("max_step_tokens", &limits.max_step_tokens);
  section.Get("max_queue", &limits.max_queue);
  section.Get("max_inflight", &limits.max_inflight);
  section.Get("max_open_appends", &limits.max_open_appends);
  section.Get("default_step_timeout_ms", &limits.default_step_timeout);
  section.Get("max_step_timeout_ms", &limits.max_step_timeout);
  section.Get("append_idle_timeout_ms", &limits.append_idle_timeout);
  return section.Finish();
}

Status ReadLog(Section section, LogConfig& log) {
  if (const auto level = section.Choice("level", kLogLevels)) {
    log.level = std::string(kLogLevels[*level]);
  }
  constexpr std::string_view kFormats[] = {"text", "json"};
  if (const auto format = section.Choice("format", kFormats)) {
    log.format = *format == 0 ? LogFormat::kText : LogFormat::kJson;
  }
  return section.Finish();
}

// The parser calls itself for every part of a dotted key: a long enough one would end the stack.
constexpr std::size_t kMaxConfigBytes = 16 << 10;

constexpr std::array<std::string_view, 8> kSections = {"server",    "ranks",    "model",  "kv",
                                                       "attention", "exchange", "limits", "log"};

Status Unknown(const std::string& file, std::string_view key, const toml::node& node) {
  std::string names;
  for (const std::string_view n : kSections) {
    names.append(names.empty() ? "[" : ", [").append(n).append("]");
  }
  return Status(Reason::kConfig, file + ":" + std::to_string(node.source().begin.line) + ": " +
                                     std::string(key) +
                                     (node.is_table() ? ": unknown section" : ": unknown key") +
                                     ", expected one of " + names);
}

Status CheckSections(const toml::table& root, const std::string& file) {
  for (const auto& [key, node] : root) {
    if (std::find(kSections.begin(), kSections.end(), key.str()) == kSections.end()) {
      return Unknown(file, key.str(), node);
    }
  }
  return Status::Ok();
}

Result<toml::table> ParseToml(std::string_view text, const std::string& file) {
  try {
    return toml::parse(text, file);
  } catch (const toml::parse_error& e) {
    return Status(Reason::kConfig, file + ":" + std::to_string(e.source().begin.line) +
                                       ": not TOML: " + std::string(e.description()));
  }
}

// "FILE:LINE: " of the key that a message of Validate begins with ("kv.interleave = 3, ...").
std::string Where(const toml::table& root, const std::string& file, std::string_view message) {
  const std::string_view path = message.substr(0, message.find_first_of(" ,:"));
  const auto node = root.at_path(path);
  if (!node) return file + ": ";
  return file + ":" + std::to_string(node.node()->source().begin.line) + ": ";
}

}  // namespace

bool IsLogLevel(std::string_view level) {
  return std::find(kLogLevels.begin(), kLogLevels.end(), level) != kLogLevels.end();
}

Status CheckAddress(std::string_view address) {
  constexpr std::string_view kUnix = "unix:";
  constexpr std::size_t kMaxUnixPath = 107;  // sockaddr_un
  if (address.starts_with(kUnix)) {
    const std::size_t length = address.size() - kUnix.size();
    if (length >= 1 && length <= kMaxUnixPath) return Status::Ok();
    return Status(Reason::kConfig, "unix:PATH with a path of 1 to 107 characters");
  }
  const std::size_t colon = address.rfind(':');
  if (colon != std::string_view::npos && colon > 0) {
    const std::string_view port = address.substr(colon + 1);
    unsigned value = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), value);
    if (error == std::errc() && end == port.data() + port.size() && value <= 65535) {
      return Status::Ok();
    }
  }
  return Status(Reason::kConfig, "host:port with a port from 0 to 65535, or unix:PATH");
}

std::int64_t LargestStepMessage(const EngineConfig& config) {
  const std::int64_t tokens = config.limits.max_step_tokens;
  const std::int64_t heads = config.model.heads;
  // Ids of up to 128 characters, positions, field tags.
  constexpr std::int64_t kEntryBytes = 192;
  constexpr std::int64_t kRestBytes = 4096;
  const std::int64_t entries = std::min<std::int64_t>(config.limits.max_batch, tokens);
  const std::int64_t request = tokens * (heads + 1) * config.LatentBytes() + entries * kEntryBytes;
  const std::int64_t answer = tokens * heads * 4 * (std::int64_t{config.model.kv_lora_rank} + 1);
  return std::max(request, answer) + kRestBytes;
}

Result<ServerConfig> ParseConfig(std::string_view text, std::string_view name) {
  const std::string file(name);
  DCP_ASSIGN_OR_RETURN(const toml::table root, ParseToml(text, file));
  const auto section = [&](std::string_view n) { return Section(root, file, n); };
  ServerConfig config;
  DCP_RETURN_IF_ERROR(CheckSections(root, file));
  DCP_RETURN_IF_ERROR(ReadServer(section("server"), config));
  DCP_RETURN_IF_ERROR(ReadRanks(section("ranks"), config.engine.ranks));
  DCP_RETURN_IF_ERROR(ReadModel(section("model"), config.engine.model));
  DCP_RETURN_IF_ERROR(ReadKv(section("kv"), config.engine.kv));
  DCP_RETURN_IF_ERROR(ReadAttention(section("attention"), config.engine.attention));
  DCP_RETURN_IF_ERROR(ReadExchange(section("exchange"), config.engine.exchange));
  DCP_RETURN_IF_ERROR(ReadLimits(section("limits"), config.engine.limits));
  DCP_RETURN_IF_ERROR(ReadLog(section("log"), config.log));
  if (const Status s = Validate(config.engine); !s.ok()) {
    return Status(s.reason(), Where(root, file, s.message()) + s.message());
  }
  const std::int64_t needed = LargestStepMessage(config.engine);
  if (config.max_message_bytes < needed) {
    const std::int64_t mib = config.max_message_bytes >> 20;
    return Status(Reason::kConfig,
                  Where(root, file, "server.max_message_mib") +
                      "server.max_message_mib = " + std::to_string(mib) + ": expected at least " +
                      std::to_string((needed + (1 << 20) - 1) >> 20) +
                      ", the largest step that limits.max_step_tokens = " +
                      std::to_string(config.engine.limits.max_step_tokens) + " allows");
  }
  return config;
}

Result<ServerConfig> LoadConfig(const std::string& path) {
  std::error_code error;
  std::ifstream in;
  if (!std::filesystem::is_directory(path, error)) in.open(path, std::ios::binary);
  // One byte more than may be there. read() reports what goes wrong in flags, unlike iterators.
  std::string text(kMaxConfigBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in.is_open() || in.bad()) {
    return Status(Reason::kConfig, path + ": cannot be read, expected a TOML file");
  }
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kMaxConfigBytes) {
    return Status(Reason::kConfig, path + ": has more than " + std::to_string(kMaxConfigBytes) +
                                       " bytes, expected a TOML file of at most so many");
  }
  return ParseConfig(text, path);
}

}  // namespace dcp
