#include "client/workload/trace.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

namespace dcp {
namespace {

// Longest input or output that a row may have: scaled lengths must not overflow.
constexpr std::int64_t kMaxLength = std::int64_t{1} << 40;

Status RowError(std::string_view name, std::size_t line, std::string_view what) {
  return Status(Reason::kConfig, fmt::format("{}:{}: {}", name, line, what));
}

template <class T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// What is wrong with a length, or empty.
std::string LengthProblem(std::string_view key, std::int64_t value) {
  if (value >= 1 && value <= kMaxLength) return {};
  return fmt::format("{} is {}, expected 1 to {}", key, value, kMaxLength);
}

// ---- Mooncake ----

// Fills `value` from an integer field, or says what is wrong.
std::string GetLength(const nlohmann::json& object, const char* key, std::int64_t& value) {
  const auto it = object.find(key);
  if (it == object.end()) return fmt::format("{} is missing", key);
  if (!it->is_number_integer())
    return fmt::format("{} is {}, expected an integer", key, it->dump());
  value = it->get<std::int64_t>();
  return LengthProblem(key, value);
}

std::string ParseMooncakeRow(const std::string& line, TraceRow& row) {
  const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return "not JSON";
  if (!object.is_object()) return "not a JSON object";
  const auto timestamp = object.find("timestamp");
  if (timestamp == object.end()) return "timestamp is missing";
  if (!timestamp->is_number()) {
    return fmt::format("timestamp is {}, expected milliseconds", timestamp->dump());
  }
  row.timestamp_ms = timestamp->get<double>();
  if (!(row.timestamp_ms >= 0))
    return fmt::format("timestamp is {}, expected >= 0", timestamp->dump());
  std::string problem = GetLength(object, "input_length", row.input_length);
  if (problem.empty()) problem = GetLength(object, "output_length", row.output_length);
  if (!problem.empty()) return problem;
  const auto ids = object.find("hash_ids");
  if (ids == object.end()) return {};
  if (!ids->is_array()) return "hash_ids is not an array";
  const std::int64_t blocks = (row.input_length + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (static_cast<std::int64_t>(ids->size()) > blocks) {
    return fmt::format("{} hash_ids, expected at most {} for input_length {}", ids->size(), blocks,
                       row.input_length);
  }
  for (const nlohmann::json& id : *ids) {
    if (!id.is_number_unsigned()) {
      return fmt::format("hash id {}, expected an integer >= 0", id.dump());
    }
    row.hash_ids.push_back(id.get<std::uint64_t>());
  }
  return {};
}

// ---- Azure ----

constexpr std::string_view kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";

// "2023-11-16 18:15:46.6805900" to milliseconds since 1970.
std::optional<double> ParseAzureTime(std::string_view text) {
  if (text.size() < 19 || text[4] != '-' || text[7] != '-' || text[10] != ' ' || text[13] != ':' ||
      text[16] != ':') {
    return std::nullopt;
  }
  const auto year = ParseNumber<int>(text.substr(0, 4));
  const auto month = ParseNumber<unsigned>(text.substr(5, 2));
  const auto day = ParseNumber<unsigned>(text.substr(8, 2));
  const auto hour = ParseNumber<unsigned>(text.substr(11, 2));
  const auto minute = ParseNumber<unsigned>(text.substr(14, 2));
  const auto second = ParseNumber<double>(text.substr(17));
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(*month),
                                         std::chrono::day(*day)};
  if (!date.ok() || *hour > 23 || *minute > 59 || !(*second >= 0 && *second < 61)) {
    return std::nullopt;
  }
  const auto days = std::chrono::sys_days(date).time_since_epoch().count();
  return ((static_cast<double>(days) * 24 + *hour) * 60 + *minute) * 60000.0 + *second * 1000.0;
}

std::string ParseAzureRow(std::string_view line, TraceRow& row) {
  const std::size_t first = line.find(',');
  const std::size_t second = first == line.npos ? line.npos : line.find(',', first + 1);
  if (second == line.npos || line.find(',', second + 1) != line.npos) {
    return fmt::format("expected 3 fields ({})", kAzureHeader);
  }
  const std::string_view time = line.substr(0, first);
  const std::string_view input = line.substr(first + 1, second - first - 1);
  const std::string_view output = line.substr(second + 1);
  const std::optional<double> ms = ParseAzureTime(time);
  if (!ms) return fmt::format("TIMESTAMP is '{}', expected YYYY-MM-DD HH:MM:SS.fff", time);
  row.timestamp_ms = *ms;
  const auto length = [](std::string_view key, std::string_view text, std::int64_t& value) {
    const auto number = ParseNumber<std::int64_t>(text);
    if (!number) return fmt::format("{} is '{}', expected an integer", key, text);
    value = *number;
    return LengthProblem(key, value);
  };
  const std::string problem = length("ContextTokens", input, row.input_length);
  return problem.empty() ? length("GeneratedTokens", output, row.output_length) : problem;
}

}  // namespace

Result<std::vector<TraceRow>> ParseTrace(std::istream& in, std::string_view name,
                                         TraceFormat format, std::size_t max_rows) {
  std::vector<TraceRow> rows;
  std::string line;
  std::size_t number = 0;
  while (rows.size() < max_rows && std::getline(in, line)) {
    ++number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (format == TraceFormat::kAzure && number == 1) {
      if (line != kAzureHeader) {
        return RowError(name, 1, fmt::format("header is '{}', expected '{}'", line, kAzureHeader));
      }
      continue;
    }
    if (line.empty()) continue;
    TraceRow row;
    const std::string problem =
        format == TraceFormat::kAzure ? ParseAzureRow(line, row) : ParseMooncakeRow(line, row);
    if (!problem.empty()) return RowError(name, number, problem);
    rows.push_back(std::move(row));
  }
  if (rows.empty()) {
    return Status(Reason::kConfig, fmt::format("{}: no rows, expected at least 1", name));
  }
  if (format == TraceFormat::kAzure) {
    const double begin = rows.front().timestamp_ms;
    for (TraceRow& row : rows) row.timestamp_ms = std::max(0.0, row.timestamp_ms - begin);
  }
  return rows;
}

Result<std::vector<TraceRow>> ReadTrace(const std::string& path, TraceFormat format,
                                        std::size_t max_rows) {
  std::ifstream in(path);
  if (!in) return Status(Reason::kConfig, fmt::format("{}: cannot be opened", path));
  return ParseTrace(in, path, format, max_rows);
}

TraceFormat GuessTraceFormat(std::string_view path) {
  return path.ends_with(".csv") ? TraceFormat::kAzure : TraceFormat::kMooncake;
}

void WriteMooncake(std::ostream& out, const std::vector<TraceRow>& rows) {
  for (const TraceRow& row : rows) {
    // By hand: a JSON library would sort the keys.
    out << fmt::format(
        "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}\n",
        std::llround(row.timestamp_ms), row.input_length, row.output_length,
        fmt::join(row.hash_ids, ", "));
  }
}

Result<LengthScale> LengthScale::Parse(std::string_view text) {
  const auto error = [&](std::string_view rule) {
    return Status(Reason::kConfig, fmt::format("length scale is '{}', expected {}", text, rule));
  };
  const std::size_t slash = text.find('/');
  const auto numerator = ParseNumber<double>(text.substr(0, slash));
  const auto denominator =
      slash == text.npos ? std::optional<double>(1.0) : ParseNumber<double>(text.substr(slash + 1));
  if (!numerator || !denominator || !(*numerator > 0) || !(*denominator > 0)) {
    return error("a positive number or fraction such as 0.03125 or 1/32");
  }
  const double tokens = static_cast<double>(kTraceBlockTokens) * *numerator / *denominator;
  if (!(tokens <= 1 << 20)) return error("at most 2048");
  if (tokens < 1 || std::abs(tokens - std::round(tokens)) > 1e-9) {
    return error("512 times it to be a whole number >= 1");
  }
  return LengthScale(std::llround(tokens));
}

std::int64_t LengthScale::Apply(std::int64_t length) const {
  // Split, so that nothing overflows.
  const std::int64_t blocks = length / kTraceBlockTokens;
  const std::int64_t rest = length % kTraceBlockTokens;
  return std::max<std::int64_t>(
      1,
      blocks * block_tokens_ + (rest * block_tokens_ + kTraceBlockTokens / 2) / kTraceBlockTokens);
}

}  // namespace dcp
