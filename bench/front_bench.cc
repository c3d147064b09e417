// Front time: what gRPC and the server's handlers add to a step. It is the client's wall time minus
// the engine's own time in the reply, measured from another process than the server, tensors of at
// most 2 KiB each way. The answer is verified against the float64 truth before anything is timed.
#include <benchmark/benchmark.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/decode_stream.h"
#include "client/workload/synthetic.h"
#include "client/workload/truth.h"

extern char** environ;

namespace dcp {
namespace {

constexpr int kHeads = 8;
constexpr int kLora = 64;
constexpr int kRope = 16;
constexpr int kDqk = kLora + kRope;
constexpr double kScale = 0.125;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "front_bench: %s\n", what.c_str());
  std::exit(1);
}

template <class T>
T Must(RpcResult<T> result) {
  if (!result.ok()) Die(result.error().ToString());
  return std::move(*result);
}

// A dcp-server beside this program, on a unix socket, for the life of the object.
class Server {
 public:
  Server(int ranks, const std::string& poll) {
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("front_bench." + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const std::string config = folder / "server.toml";
    address_ = "unix:" + (folder / "socket").string();
    std::ofstream(config) << "[server]\nlisten = [\"" << address_ << "\"]\npoll = \"" << poll
                          << "\"\n[ranks]\ncount = " << ranks
                          << "\ndevice = \"cpu\"\n[model]\nlayers = 1\nheads = " << kHeads
                          << "\nkv_lora_rank = " << kLora << "\nrope_dim = " << kRope
                          << "\nsoftmax_scale = " << kScale
                          << "\n[kv]\npage_tokens = 16\ninterleave = 1\nblocks = 64\n"
                          << "[log]\nlevel = \"error\"\n";
    const std::string program =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dcp-server";
    const char* argv[] = {program.c_str(), "--config", config.c_str(), nullptr};
    if (::posix_spawn(&pid_, program.c_str(), nullptr, nullptr, const_cast<char**>(argv),
                      environ) != 0) {
      Die("cannot start " + program);
    }
  }
  ~Server() {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
  }

  std::unique_ptr<Client> Connect() const {
    for (int i = 0; i < 100; ++i) {
      if (auto client = Client::Connect(address_, Millis(200)); client.ok()) {
        return std::move(*client);
      }
      std::this_thread::sleep_for(Millis(50));
    }
    Die("the server does not answer");
  }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

void Fill(v1::Tensor& tensor, const std::vector<Bf16>& data,
          std::initializer_list<std::int64_t> shape) {
  tensor.set_dtype(v1::DATA_TYPE_BF16);
  for (const std::int64_t dim : shape) tensor.add_shape(dim);
  tensor.set_data(data.data(), data.size() * sizeof(Bf16));
}

// A read of the one token of a sequence, which the constructor has created, appended and verified.
v1::DecodeStepRequest MakeRead(Client& client) {
  v1::CreateSequenceRequest create;
  create.set_sequence_id("s");
  create.set_request_id("r");
  create.set_softmax_scale(kScale);
  const auto sequence = Must(client.CreateSequence(create)).sequence();

  const Synthetic synthetic({.heads = kHeads, .d_qk = kDqk, .softmax_scale = kScale}, 1);
  const Content content(1);
  std::vector<Bf16> query(kHeads * kDqk), latent(kDqk);
  synthetic.Queries(content, 0, 0, query);
  synthetic.Latent(content.At(0), 0, latent);
  v1::DecodeStepRequest request;
  request.set_step_id(1);
  auto* entry = request.add_entries();
  *entry->mutable_sequence() = sequence;
  entry->set_count(1);
  Fill(*request.mutable_query(), query, {1, kHeads, kDqk});
  Fill(*request.mutable_new_kv(), latent, {1, kDqk});
  request.set_output_dtype(v1::DATA_TYPE_BF16);
  const v1::DecodeStepResponse reply = Must(client.DecodeStep(request));
  std::vector<Bf16> output(kHeads * kLora);
  if (reply.output().data().size() != output.size() * sizeof(Bf16)) Die("output size");
  std::memcpy(output.data(), reply.output().data().data(), reply.output().data().size());
  for (std::size_t h = 0; h < kHeads; ++h) {
    std::vector<float> row(kLora);
    for (std::size_t i = 0; i < kLora; ++i) row[i] = ToFloat(output[h * kLora + i]);
    const RowTruth truth =
        AttendRow({kDqk, kLora, kScale}, std::span(query).subspan(h * kDqk, kDqk), latent);
    if (!(RelativeError(row, truth.output) <= 4e-3)) Die("head " + std::to_string(h) + " is wrong");
  }
  request.clear_new_kv();
  return request;
}

double Percentile(std::vector<double>& values, double p) {
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(p * (values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

template <class Call>
void Measure(benchmark::State& state, Call call) {
  std::vector<double> front;
  for (auto _ : state) {
    const TimePoint begin = Clock::now();
    const v1::DecodeStepResponse reply = call();
    const double wall = std::chrono::duration<double>(Clock::now() - begin).count();
    if (reply.output().data().empty()) Die("an empty answer");
    const auto& engine = reply.timing().total();
    front.push_back(wall - static_cast<double>(engine.seconds()) -
                    static_cast<double>(engine.nanos()) * 1e-9);
    state.SetIterationTime(wall);
  }
  state.counters["front_p50_us"] = Percentile(front, 0.5) * 1e6;
  state.counters["front_p99_us"] = Percentile(front, 0.99) * 1e6;
}

void Unary(benchmark::State& state, const std::string& poll) {
  const Server server(static_cast<int>(state.range(0)), poll);
  const std::unique_ptr<Client> client = server.Connect();
  const v1::DecodeStepRequest request = MakeRead(*client);
  Measure(state, [&] { return Must(client->DecodeStep(request)); });
}

void Stream(benchmark::State& state, const std::string& poll) {
  const Server server(static_cast<int>(state.range(0)), poll);
  const std::unique_ptr<Client> client = server.Connect();
  const v1::DecodeStepRequest request = MakeRead(*client);
  const TimePoint deadline = Clock::now() + Millis(120'000);
  const auto stream = Must(DecodeStream::Open(*client, deadline));
  Measure(state, [&] {
    if (const RpcError error = stream->Write(request, deadline); !error.ok()) {
      Die(error.ToString());
    }
    return Must(stream->Read(deadline));
  });
}

BENCHMARK_CAPTURE(Unary, block, "block")
    ->Arg(1)
    ->Arg(4)
    ->ArgName("ranks")
    ->Iterations(3000)
    ->UseManualTime();
BENCHMARK_CAPTURE(Stream, block, "block")
    ->Arg(1)
    ->Arg(4)
    ->ArgName("ranks")
    ->Iterations(3000)
    ->UseManualTime();
BENCHMARK_CAPTURE(Stream, spin, "spin")
    ->Arg(1)
    ->ArgName("ranks")
    ->Iterations(3000)
    ->UseManualTime();

}  // namespace
}  // namespace dcp

BENCHMARK_MAIN();
