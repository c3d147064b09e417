// CUDA's resources as owners and views, and its errors as Status. The one header through which C++
// sources reach the CUDA runtime; built with DCP_CUDA only.
//
// Every owner remembers its device and makes it current while it creates and frees; none of them is
// copied. Creation and destruction are for start and stop: while a step is in flight on any device
// they may wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/stream.h"

namespace dcp::cuda {

// OK, or INTERNAL "<call>: <CUDA's name and text of the error>". Clears the thread's last error, so
// that it is not blamed on the next call.
Status Check(cudaError_t error, std::string_view call);
// Of the launch just made by this thread.
Status CheckLaunch(std::string_view kernel);

inline cudaStream_t Raw(StreamRef stream) { return static_cast<cudaStream_t>(stream.raw()); }

// What CUDA and NCCL read from the environment once, when they start: all kernels are loaded when a
// context is made (CUDA_MODULE_LOADING=EAGER), every stream has a hardware queue of its own
// (CUDA_DEVICE_MAX_CONNECTIONS=32), and NCCL never uses NVLink multicast (NCCL_NVLS_ENABLE=0). The
// last is forced, the others may be overridden. Call before any thread starts.
void SetUpEnvironment();

Result<int> DeviceCount();     // CONFIG: no driver, no device
Status UseDevice(int device);  // makes it the calling thread's device; CONFIG: no such device

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t shared_per_block = 0;  // bytes a kernel may opt in to
  std::size_t total_bytes = 0, free_bytes = 0;
};
Result<DeviceInfo> Describe(int device);
Result<std::size_t> FreeBytes();  // of the calling thread's device

class Stream {  // does not synchronise with the legacy default stream
 public:
  static Result<Stream> Create(int device);
  Stream(Stream&& o) noexcept : device_(o.device_), raw_(std::exchange(o.raw_, nullptr)) {}
  Stream& operator=(Stream&& o) noexcept;
  ~Stream();
  StreamRef ref() const { return StreamRef(raw_); }
  cudaStream_t raw() const { return raw_; }
  int device() const { return device_; }
  // Blocks until the stream is empty; for start and tests. A step waits with a deadline instead.
  Status Synchronize() const;

 private:
  Stream() = default;
  int device_ = 0;
  cudaStream_t raw_ = nullptr;
};

class Event {
 public:
  enum class Timing : std::uint8_t { kOff, kOn };
  static Result<Event> Create(int device, Timing timing = Timing::kOff);
  Event(Event&& o) noexcept : device_(o.device_), raw_(std::exchange(o.raw_, nullptr)) {}
  Event& operator=(Event&& o) noexcept;
  ~Event();
  Status Record(StreamRef stream) const;
  // Records inside a capture: a node that records anew at every replay.
  Status RecordInGraph(StreamRef stream) const;
  // Both made with Timing::kOn and run.
  static Result<float> Milliseconds(const Event& begin, const Event& end);
  cudaEvent_t raw() const { return raw_; }

 private:
  Event() = default;
  int device_ = 0;
  cudaEvent_t raw_ = nullptr;
};

// Bytes on a device, aligned to 256.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // KV_CAPACITY with the bytes asked and free, for `what`.
  static Result<DeviceBuffer> Create(int device, std::size_t bytes, std::string_view what);
  DeviceBuffer(DeviceBuffer&& o) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept;
  ~DeviceBuffer();
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::size_t size() const { return size_; }
  int device() const { return device_; }

 private:
  int device_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Page-locked host bytes that every device can reach.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  static Result<PinnedBuffer> Create(std::size_t bytes, std::string_view what);
  PinnedBuffer(PinnedBuffer&& o) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& o) noexcept;
  ~PinnedBuffer();
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// What was enqueued on a stream, ready to be launched again. Made at start: instantiating waits for
// the device.
class Graph {
 public:
  // Captures what enqueue() puts on `stream`, for this thread only; nothing runs. An error of
  // `enqueue` ends the capture and is returned.
  template <class F>
  static Result<Graph> Capture(const Stream& stream, F enqueue) {
    DCP_RETURN_IF_ERROR(Begin(stream));
    const Status enqueued = enqueue();
    return End(stream, enqueued);
  }
  Graph(Graph&& o) noexcept : exec_(std::exchange(o.exec_, nullptr)) {}
  Graph& operator=(Graph&& o) noexcept;
  ~Graph();
  Status Launch(StreamRef stream) const;

 private:
  Graph() = default;
  static Status Begin(const Stream& stream);
  static Result<Graph> End(const Stream& stream, const Status& enqueued);
  cudaGraphExec_t exec_ = nullptr;
};

// Enqueues a copy in any direction; host memory should be pinned. No copy for 0 bytes.
Status CopyAsync(void* to, const void* from, std::size_t bytes, StreamRef stream);
// All bytes 0xff are NaN in bf16 and in f32.
Status FillAsync(void* to, std::uint8_t byte, std::size_t bytes, StreamRef stream);

}  // namespace dcp::cuda
