#include "client/cpp/rpc_error.h"

#include <catch2/catch.hpp>

#include "client/cpp/tensor.h"
#include "google/rpc/error_details.pb.h"

namespace dcp {
namespace {

google::rpc::Status Overloaded() {
  google::rpc::Status status;
  status.set_code(8);
  status.set_message("the queue holds 256 requests");
  google::rpc::ErrorInfo info;
  info.set_reason("OVERLOADED");
  info.set_domain("dcp");
  (*info.mutable_metadata())["queued"] = "256";
  status.add_details()->PackFrom(info);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(2'500'000);
  status.add_details()->PackFrom(retry);
  return status;
}

TEST_CASE("Errors carry code, reason, metadata and delay", "[rpc_error]") {
  const google::rpc::Status details = Overloaded();
  const RpcError item = ToRpcError(details);
  const RpcError call = ToRpcError(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                                details.message(), details.SerializeAsString()));
  for (const RpcError& error : {item, call}) {
    CHECK(error.ToString() == "RESOURCE_EXHAUSTED/OVERLOADED: the queue holds 256 requests");
    CHECK(error.metadata.at("queued") == "256");
    CHECK(error.retry_delay == Millis(3));
    CHECK(error.overloaded());
  }
}

TEST_CASE("gRPC's own errors have no reason", "[rpc_error]") {
  const RpcError error =
      ToRpcError(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "message too large"));
  CHECK(error.ToString() == "RESOURCE_EXHAUSTED: message too large");
  CHECK(!error.overloaded());
  const RpcError broken =
      ToRpcError(grpc::Status(grpc::StatusCode::ABORTED, "m", "\xff\xff no proto"));
  CHECK(broken.ToString() == "ABORTED: m");
  CHECK(ToRpcError(grpc::Status::OK).ok());
}

TEST_CASE("Tensors of the wire", "[rpc_error]") {
  v1::Tensor tensor;
  const std::span<Bf16> values = MakeBf16(tensor, {2, 3});
  REQUIRE(values.size() == 6);
  for (std::size_t i = 0; i < 6; ++i) values[i] = ToBf16(static_cast<float>(i));
  CHECK(HasForm(tensor, v1::DATA_TYPE_BF16, {2, 3}));
  CHECK(!HasForm(tensor, v1::DATA_TYPE_FP32, {2, 3}));
  CHECK(!HasForm(tensor, v1::DATA_TYPE_BF16, {3, 2}));
  CHECK(!HasForm(tensor, v1::DATA_TYPE_BF16, {6}));
  std::vector<float> floats(2);
  ReadFloats(tensor, 3, floats);
  CHECK(floats == std::vector<float>{3, 4});
  tensor.mutable_data()->pop_back();
  CHECK(!HasForm(tensor, v1::DATA_TYPE_BF16, {2, 3}));
}

}  // namespace
}  // namespace dcp
