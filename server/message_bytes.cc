#include "server/message_bytes.h"

#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <utility>
#include <vector>

#include "base/check.h"

namespace dcp {
namespace {

class ConsumingStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit ConsumingStream(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {}

  bool Next(const void** data, int* size) override {
    if (unread_ == 0) {
      do {
        if (next_ > 0) slices_[next_ - 1] = grpc::Slice();
        if (next_ == slices_.size()) return false;
        unread_ = slices_[next_++].size();
      } while (unread_ == 0);
    }
    const grpc::Slice& current = slices_[next_ - 1];
    *data = current.end() - unread_;
    *size = static_cast<int>(unread_);
    count_ += *size;
    unread_ = 0;
    return true;
  }

  void BackUp(int count) override {
    unread_ = static_cast<std::size_t>(count);
    count_ -= count;
  }

  bool Skip(int count) override {
    const void* data = nullptr;
    for (int size = 0; count > 0; count -= size) {
      if (!Next(&data, &size)) return false;
      if (size > count) {
        BackUp(size - count);
        return true;
      }
    }
    return true;
  }

  std::int64_t ByteCount() const override { return count_; }

 private:
  std::vector<grpc::Slice> slices_;
  std::size_t next_ = 0;    // the slice after the one being read
  std::size_t unread_ = 0;  // bytes at the end of the one being read
  std::int64_t count_ = 0;
};

}  // namespace

bool ParseAndClear(grpc::ByteBuffer* bytes, google::protobuf::MessageLite* message) {
  std::vector<grpc::Slice> slices;
  const bool readable = bytes->Dump(&slices).ok();
  bytes->Clear();
  if (!readable) return false;
  ConsumingStream stream(std::move(slices));
  return message->ParseFromZeroCopyStream(&stream);
}

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::MessageLite>(message,
                                                                                     &bytes, &own);
  DCP_CHECK(status.ok());
  return bytes;
}

}  // namespace dcp
