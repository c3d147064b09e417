// A reference to the CUDA stream that orders an operation; null means host execution: the operation
// has completed when the call returns. Needs no CUDA header.
#pragma once

namespace dcp {

class StreamRef {
 public:
  static StreamRef Host() { return StreamRef(nullptr); }
  explicit StreamRef(void* cuda_stream) : raw_(cuda_stream) {}
  void* raw() const { return raw_; }
  bool is_host() const { return raw_ == nullptr; }

 private:
  void* raw_;
};

}  // namespace dcp
