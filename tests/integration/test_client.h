// What the tests say to a server, over real gRPC, and how answers are judged. Failures are
// exceptions, not Catch2's assertions, because those are for one thread only.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/workload/row_check.h"
#include "client/workload/synthetic.h"
#include "dcp/v1/decode.grpc.pb.h"
#include "tests/integration/server_process.h"

namespace dcp {

// Throws unless `condition`.
void Expect(bool condition, const std::string& what);

// What google.rpc.Status says beside the code.
struct RpcError {
  int code = 0;
  std::string reason;  // "" without ErrorInfo
  std::string message;
  std::map<std::string, std::string> metadata;
  bool retry = false;  // has RetryInfo
};
RpcError ErrorOf(const grpc::Status& status);
RpcError ErrorOf(const google::rpc::Status& status);

// "NOT_FOUND/SEQUENCE_NOT_FOUND"; "OK".
std::string CodeAndReason(const grpc::Status& status);
std::string CodeAndReason(const google::rpc::Status& status);

// A sequence as the client knows it: its content decides every latent and query.
struct TestSequence {
  v1::SequenceRef ref;
  Content content{0};
};

struct StepPart {
  const TestSequence* sequence = nullptr;
  std::int64_t start = 0;
  int count = 1;
  bool rewind = false;
};

class TestClient {
 public:
  TestClient(const std::string& address, const TestConfig& config);

  v1::DecodeService::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() { return channel_; }
  const TestConfig& config() const { return config_; }

  // A context with a deadline, so that no test waits for ever.
  static std::unique_ptr<grpc::ClientContext> Context(Millis timeout = Millis{20000});

  // These throw if the call fails.
  TestSequence Create(const std::string& id, std::uint64_t content = 0);
  TestSequence Fork(const TestSequence& parent, const std::string& id, std::int64_t at);
  int Release(const std::vector<const TestSequence*>& sequences);
  v1::Sequence Get(const TestSequence& sequence);
  v1::GetLoadResponse Load();
  v1::GetServerInfoResponse Info();

  // Messages.
  v1::DecodeStepRequest Step(std::uint64_t step_id, int layer, const std::vector<StepPart>& parts,
                             bool write = true) const;
  v1::AppendKvRequest Header(const TestSequence& sequence, std::uint64_t step_id,
                             std::int64_t start, std::int64_t count, int layer_begin,
                             int layer_count) const;
  v1::AppendKvRequest Chunk(const TestSequence& sequence, int layer, std::int64_t start,
                            std::int64_t offset, std::int64_t count) const;

  grpc::Status Call(const v1::DecodeStepRequest& request, v1::DecodeStepResponse* response);
  // One step on every layer that appends `count` tokens at `start`; throws unless all is right.
  void Append(const TestSequence& sequence, std::uint64_t step_id, std::int64_t start, int count);

  // Whether every row of the answer is the truth. Returns "" or what is wrong.
  std::string Verify(int layer, const std::vector<StepPart>& parts,
                     const v1::DecodeStepResponse& response);

  const Synthetic& synthetic() const { return synthetic_; }

 private:
  TestConfig config_;
  Synthetic synthetic_;
  RowChecker checker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::DecodeService::Stub> stub_;
};

}  // namespace dcp
