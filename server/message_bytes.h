// Messages of the raw streams: bytes of gRPC to message and back.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

namespace dcp {

// Parses `bytes` and leaves them empty; false if they do not decode. Each piece is freed once it is
// read, so that a large message is in memory about once, not twice.
bool ParseAndClear(grpc::ByteBuffer* bytes, google::protobuf::MessageLite* message);

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message);

}  // namespace dcp
