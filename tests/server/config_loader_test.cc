#include "server/config_loader.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

namespace dcp {
namespace {

// The smallest valid file, in sections, so that a test can replace or extend one of them.
struct File {
  std::string server;
  std::string ranks = "count = 2\n";
  std::string model =
      "layers = 2\nheads = 4\nkv_lora_rank = 64\nrope_dim = 16\nsoftmax_scale = 0.1\n";
  std::string kv = "page_tokens = 4\ninterleave = 2\nblocks = 10\n";
  std::string attention, exchange, limits, log, rest;

  std::string Text() const {
    return "[server]\n" + server + "[ranks]\n" + ranks + "[model]\n" + model + "[kv]\n" + kv +
           "[attention]\n" + attention + "[exchange]\n" + exchange + "[limits]\n" + limits +
           "[log]\n" + log + rest;
  }
};

// The message of the error that the file must give.
std::string Error(const File& file) {
  const Result<ServerConfig> config = ParseConfig(file.Text(), "test.toml");
  if (config.ok()) return "no error";
  CHECK(config.status().reason() == Reason::kConfig);
  return config.status().message();
}

auto Has(const std::string& text) { return Catch::Contains(text); }

TEST_CASE("defaults") {
  const Result<ServerConfig> config = ParseConfig(File().Text(), "test.toml");
  REQUIRE(config.status().message().empty());
  CHECK(config->listen == std::vector<std::string>{"127.0.0.1:7400"});
  CHECK(config->poll == PollMode::kBlock);
  CHECK(config->threads == 2);
  CHECK(config->max_message_bytes == 64 << 20);
  CHECK(config->drain_timeout == Millis{10000});
  CHECK(config->log.level == "info");
  CHECK(config->log.format == LogFormat::kText);
  CHECK(config->engine.exchange == ExchangeKind::kA2a);
  CHECK(config->engine.attention.backend == "auto");
  CHECK(config->engine.limits.append_idle_timeout == Millis{30000});
}

TEST_CASE("every key is read") {
  File file;
  file.server =
      "listen = [\"[::1]:0\", \"unix:/tmp/s\"]\npoll = \"spin\"\nthreads = 3\n"
      "max_message_mib = 5\ndrain_timeout_ms = 1500\n";
  file.ranks = "count = 4\ndevice = \"cpu\"\ntimeout_ms = 700\ncpu_threads = 2\n";
  file.attention = "backend = \"cpu_reference\"\npartial_dtype = \"fp32\"\n";
  file.exchange = "algorithm = \"ag_rs\"\n";
  file.limits =
      "max_sequences = 1\nmax_context = 2\nmax_batch = 3\nmax_query_tokens = 4\n"
      "max_step_tokens = 5\nmax_queue = 6\nmax_inflight = 7\nmax_open_appends = 8\n"
      "default_step_timeout_ms = 9\nmax_step_timeout_ms = 10\nappend_idle_timeout_ms = 11\n";
  file.log = "level = \"debug\"\nformat = \"json\"\n";
  const Result<ServerConfig> config = ParseConfig(file.Text(), "test.toml");
  REQUIRE(config.status().message().empty());
  CHECK(config->listen == std::vector<std::string>{"[::1]:0", "unix:/tmp/s"});
  CHECK(config->poll == PollMode::kSpin);
  CHECK(config->threads == 3);
  CHECK(config->max_message_bytes == 5 << 20);
  CHECK(config->drain_timeout == Millis{1500});
  const EngineConfig& e = config->engine;
  CHECK(e.ranks.count == 4);
  CHECK(e.ranks.timeout == Millis{700});
  CHECK(e.ranks.cpu_threads == 2);
  CHECK(e.model.layers == 2);
  CHECK(e.model.heads == 4);
  CHECK(e.model.kv_lora_rank == 64);
  CHECK(e.model.rope_dim == 16);
  CHECK(e.model.softmax_scale == 0.1);
  CHECK(e.kv.page_tokens == 4);
  CHECK(e.kv.interleave == 2);
  CHECK(e.kv.blocks == 10);
  CHECK(e.attention.backend == "cpu_reference");
  CHECK(e.attention.partial_dtype == DType::kF32);
  CHECK(e.exchange == ExchangeKind::kAgRs);
  CHECK(e.limits.max_sequences == 1);
  CHECK(e.limits.max_context == 2);
  CHECK(e.limits.max_batch == 3);
  CHECK(e.limits.max_query_tokens == 4);
  CHECK(e.limits.max_step_tokens == 5);
  CHECK(e.limits.max_queue == 6);
  CHECK(e.limits.max_inflight == 7);
  CHECK(e.limits.max_open_appends == 8);
  CHECK(e.limits.default_step_timeout == Millis{9});
  CHECK(e.limits.max_step_timeout == Millis{10});
  CHECK(e.limits.append_idle_timeout == Millis{11});
  CHECK(config->log.level == "debug");
  CHECK(config->log.format == LogFormat::kJson);
}

TEST_CASE("not TOML: file and line") {
  File file;
  file.server = "threads = = 2\n";
  CHECK_THAT(Error(file), Has("test.toml:2") && Has("not TOML"));
}

TEST_CASE("a file that cannot be read is named") {
  const auto config = LoadConfig("/nonexistent/dcp.toml");
  REQUIRE(!config.ok());
  CHECK_THAT(config.status().message(), Has("/nonexistent/dcp.toml") && Has("cannot be read"));
  CHECK_THAT(LoadConfig(".").status().message(), Has("cannot be read"));
}

TEST_CASE("a file that is too large is not parsed") {
  // The parser would run out of stack in this one.
  std::string key = "a";
  while (key.size() < 400'000) key += ".a";
  const std::string path = "/tmp/dcp_config_" + std::to_string(getpid()) + ".toml";
  std::ofstream(path) << key << " = 1\n";
  const auto config = LoadConfig(path);
  std::remove(path.c_str());
  REQUIRE(!config.ok());
  CHECK_THAT(config.status().message(), Has(path) && Has("16384 bytes"));
}

TEST_CASE("unknown sections and keys are errors") {
  File file;
  file.rest = "[sever]\nthreads = 2\n";
  CHECK_THAT(Error(file), Has("sever") && Has("unknown section") && Has("[server]"));
  file = File();
  file.rest = "[limits.more]\n";
  CHECK_THAT(Error(file), Has("limits.more") && Has("unknown key"));
  file = File();
  file.kv += "pages = 3\n";
  CHECK_THAT(Error(file), Has("kv.pages = 3") && Has("unknown key") && Has("page_tokens"));
  CHECK_THAT(ParseConfig("threads = 2\n", "f").status().message(),
             Has("f:1") && Has("threads") && Has("unknown key"));
  CHECK_THAT(ParseConfig("server = 2\n", "f").status().message(),
             Has("f:1: server: expected a section"));
}

TEST_CASE("required keys") {
  File file;
  file.ranks = "";
  CHECK_THAT(Error(file), Has("ranks.count is missing"));
  for (const std::string key : {"layers", "heads", "kv_lora_rank", "rope_dim", "softmax_scale"}) {
    file = File();
    file.model.replace(file.model.find(key), key.size(), "# " + key);
    CHECK_THAT(Error(file), Has("model." + key + " is missing"));
  }
  file = File();
  file.kv = "page_tokens = 4\n";
  CHECK_THAT(Error(file), Has("kv.blocks is missing"));
}

TEST_CASE("wrong types name key, value and rule, with the line") {
  File file;
  file.server = "threads = \"two\"\n";
  CHECK_THAT(Error(file),
             Has("test.toml:2: server.threads = 'two': expected a whole number") ||
                 Has("test.toml:2: server.threads = \"two\": expected a whole number"));
  file.server = "threads = 2.5\n";
  CHECK_THAT(Error(file), Has("server.threads = 2.5") && Has("whole number"));
  file.server = "listen = \"127.0.0.1:1\"\n";
  CHECK_THAT(Error(file), Has("server.listen") && Has("array"));
  file.server = "listen = []\n";
  CHECK_THAT(Error(file), Has("server.listen") && Has("one or more"));
  file.server = "listen = [1]\n";
  CHECK_THAT(Error(file), Has("server.listen") && Has("strings"));
  file = File();
  file.model = "layers = true\n";
  CHECK_THAT(Error(file), Has("model.layers = true") && Has("whole number"));
  file.model = "softmax_scale = \"1\"\n";
  CHECK_THAT(Error(file), Has("model.softmax_scale") && Has("a number"));
  file.model = "layers = 99999999999\n";
  CHECK_THAT(Error(file), Has("model.layers = 99999999999") && Has("whole number from"));
  file = File();
  file.attention = "backend = 3\n";
  CHECK_THAT(Error(file), Has("attention.backend = 3") && Has("a string"));
}

TEST_CASE("ranges and choices of the server's own keys") {
  File file;
  const auto server = [&](const std::string& text) {
    file.server = text;
    return Error(file);
  };
  CHECK_THAT(server("threads = 0\n"), Has("server.threads = 0") && Has("from 1 to 64"));
  CHECK_THAT(server("max_message_mib = 2048\n"), Has("max_message_mib = 2048") && Has("2047"));
  CHECK_THAT(server("drain_timeout_ms = 1\n"), Has("drain_timeout_ms = 1") && Has("from 100"));
  CHECK_THAT(server("poll = \"busy\"\n"),
             Has("server.poll") && Has("busy") && Has("\"block\" or \"spin\""));
  for (const std::string bad : {"localhost", ":80", "a:b", "a:70000", "unix:", "a:-1"}) {
    CHECK_THAT(server("listen = [\"" + bad + "\"]\n"),
               Has("server.listen") && Has(bad) &&
                       Has("expected host:port"
                           " with a port from 0 to 65535") ||
                   Has("unix:PATH with a path"));
  }
  file = File();
  file.exchange = "algorithm = \"direct\"\n";
  CHECK_THAT(Error(file),
             Has("exchange.algorithm") && Has("direct") && Has("\"ag_rs\" or \"a2a\""));
  file = File();
  file.attention = "partial_dtype = \"fp16\"\n";
  CHECK_THAT(Error(file), Has("attention.partial_dtype") && Has("\"bf16\" or \"fp32\""));
  file = File();
  file.log = "level = \"loud\"\n";
  CHECK_THAT(Error(file), Has("log.level") && Has("\"info\""));
  file.log = "format = \"xml\"\n";
  CHECK_THAT(Error(file), Has("log.format") && Has("\"text\" or \"json\""));
}

TEST_CASE("devices of ranks") {
  File file;
  file.ranks =
      "count = 2\ndevice = \"cuda\"\ndevices = [3, 1]\nshare_devices = true\ngraphs = false\n";
  const Result<ServerConfig> config = ParseConfig(file.Text(), "test.toml");
  REQUIRE(config.status().message().empty());
  CHECK(config->engine.ranks.device == RankDevice::kCuda);
  CHECK(config->engine.ranks.devices == std::vector<int>{3, 1});
  CHECK(config->engine.ranks.share_devices);
  CHECK(config->engine.ranks.graphs == false);
  file.ranks = "count = 2\ndevice = \"tpu\"\n";
  CHECK_THAT(Error(file), Has("ranks.device") && Has("\"cpu\" or \"cuda\""));
  for (const char* devices : {"[0, -1]", "[0, 1.5]", "[\"0\"]", "0"}) {
    file.ranks = std::string("count = 2\ndevice = \"cuda\"\ndevices = ") + devices + "\n";
    CHECK_THAT(Error(file), Has("ranks.devices") && Has("array of whole numbers"));
  }
  file.ranks = "count = 2\ndevice = \"cuda\"\ngraphs = 1\n";
  CHECK_THAT(Error(file), Has("ranks.graphs = 1") && Has("true or false"));
}

TEST_CASE("the engine's rules apply, with file and line") {
  File file;
  file.model = "layers = 2\nheads = 5\nkv_lora_rank = 64\nrope_dim = 16\nsoftmax_scale = 0.1\n";
  CHECK_THAT(Error(file), Has("test.toml:6: model.heads = 5") && Has("ranks.count = 2"));
  file = File();
  file.kv = "page_tokens = 4\ninterleave = 3\nblocks = 10\n";
  CHECK_THAT(Error(file), Has("test.toml:") && Has("interleave") && Has("3"));
  file = File();
  file.kv = "page_tokens = 4\nblocks = 0\n";
  CHECK_THAT(Error(file), Has("kv.blocks = 0"));
  file = File();
  file.limits = "max_batch = 0\n";
  CHECK_THAT(Error(file), Has("limits.max_batch = 0"));
  file.limits = "max_step_timeout_ms = 100\n";
  CHECK_THAT(Error(file), Has("limits.default_step_timeout_ms = 5000"));
  file.limits = "max_step_timeout_ms = -1\n";
  CHECK_THAT(Error(file), Has("limits.max_step_timeout_ms = -1"));
}

TEST_CASE("a message must hold the largest step") {
  File file;
  file.server = "max_message_mib = 1\n";
  file.limits = "max_step_tokens = 2048\n";
  const std::string error = Error(file);
  // Query and latents: 2048 * 5 * 160 bytes; the answer is larger: 2048 * 4 heads * 65 * 4.
  CHECK_THAT(error, Has("test.toml:2: server.max_message_mib = 1") && Has("at least 3") &&
                        Has("limits.max_step_tokens = 2048"));
  file.server = "max_message_mib = 3\n";
  CHECK(Error(file) == "no error");
}

TEST_CASE("the sample configurations are valid") {
  for (const char* name :
       {"cpu_1rank.toml", "cpu_4ranks.toml", "gpu_1.toml", "gpu_2.toml", "gpu_8.toml"}) {
    const auto config = LoadConfig(std::string(DCP_CONFIGS "/") + name);
    CHECK(config.status().message().empty());
    REQUIRE(config.ok());
    CHECK(config->engine.kv.blocks * config->engine.BlockTokens() >= 200'000);
    const double mscale = 0.1 * std::log(40.0) + 1;
    CHECK(config->engine.model.softmax_scale == Approx(mscale * mscale / std::sqrt(192.0)));
  }
}

}  // namespace
}  // namespace dcp
