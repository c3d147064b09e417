#include "base/cuda.h"

#include <stdlib.h>

namespace dcp::cuda {
namespace {

std::string Text(std::string_view s) { return std::string(s); }

// Restores the calling thread's device: a destructor must not change it.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
  }
  ~ScopedDevice() { cudaSetDevice(before_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace

Status Check(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess) return Status::Ok();
  cudaGetLastError();
  return Status(Reason::kInternal,
                Text(call) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

Status CheckLaunch(std::string_view kernel) {
  return Check(cudaGetLastError(), "launch of " + Text(kernel));
}

void SetUpEnvironment() {
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
}

Result<int> DeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return Status(Reason::kConfig, std::string("ranks.device = \"cuda\", but no CUDA device can be "
                                               "used here: ") +
                                       cudaGetErrorString(error));
  }
  return count;
}

Status UseDevice(int device) {
  DCP_ASSIGN_OR_RETURN(const int count, DeviceCount());
  if (device < 0 || device >= count) {
    return Status(Reason::kConfig, "CUDA device " + std::to_string(device) +
                                       " does not exist; this host has devices 0 to " +
                                       std::to_string(count - 1));
  }
  return Check(cudaSetDevice(device), "cudaSetDevice");
}

Result<DeviceInfo> Describe(int device) {
  DCP_RETURN_IF_ERROR(UseDevice(device));
  cudaDeviceProp p{};
  DCP_RETURN_IF_ERROR(Check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties"));
  DeviceInfo info{.name = p.name,
                  .major = p.major,
                  .minor = p.minor,
                  .multiprocessors = p.multiProcessorCount,
                  .shared_per_block = p.sharedMemPerBlockOptin};
  DCP_RETURN_IF_ERROR(Check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "cudaMemGetInfo"));
  return info;
}

Result<std::size_t> FreeBytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  DCP_RETURN_IF_ERROR(Check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  return free;
}

Result<Stream> Stream::Create(int device) {
  const ScopedDevice scope(device);
  Stream s;
  s.device_ = device;
  DCP_RETURN_IF_ERROR(Check(cudaStreamCreateWithFlags(&s.raw_, cudaStreamNonBlocking),
                            "cudaStreamCreateWithFlags"));
  return s;
}

Stream& Stream::operator=(Stream&& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(raw_, o.raw_);
  return *this;
}

Stream::~Stream() {
  if (raw_ == nullptr) return;
  const ScopedDevice scope(device_);
  cudaStreamDestroy(raw_);
}

Status Stream::Synchronize() const {
  return Check(cudaStreamSynchronize(raw_), "cudaStreamSynchronize");
}

Result<Event> Event::Create(int device, Timing timing) {
  const ScopedDevice scope(device);
  Event e;
  e.device_ = device;
  const unsigned flags = timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming;
  DCP_RETURN_IF_ERROR(Check(cudaEventCreateWithFlags(&e.raw_, flags), "cudaEventCreateWithFlags"));
  return e;
}

Event& Event::operator=(Event&& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(raw_, o.raw_);
  return *this;
}

Event::~Event() {
  if (raw_ == nullptr) return;
  const ScopedDevice scope(device_);
  cudaEventDestroy(raw_);
}

Status Event::Record(StreamRef stream) const {
  return Check(cudaEventRecord(raw_, Raw(stream)), "cudaEventRecord");
}

Status Event::RecordInGraph(StreamRef stream) const {
  return Check(cudaEventRecordWithFlags(raw_, Raw(stream), cudaEventRecordExternal),
               "cudaEventRecordWithFlags");
}

Result<float> Event::Milliseconds(const Event& begin, const Event& end) {
  float ms = 0;
  DCP_RETURN_IF_ERROR(
      Check(cudaEventElapsedTime(&ms, begin.raw_, end.raw_), "cudaEventElapsedTime"));
  return ms;
}

Result<DeviceBuffer> DeviceBuffer::Create(int device, std::size_t bytes, std::string_view what) {
  const ScopedDevice scope(device);
  DeviceBuffer b;
  b.device_ = device;
  void* p = nullptr;
  if (const cudaError_t error = cudaMalloc(&p, bytes); error != cudaSuccess) {
    cudaGetLastError();
    std::size_t free = 0;
    std::size_t total = 0;
    cudaMemGetInfo(&free, &total);
    return Status(Reason::kKvCapacity,
                  Text(what) + " needs " + std::to_string(bytes) + " bytes on CUDA device " +
                      std::to_string(device) + ", which has " + std::to_string(free) + " of " +
                      std::to_string(total) + " free: " + cudaGetErrorString(error));
  }
  b.data_ = static_cast<std::byte*>(p);
  b.size_ = bytes;
  return b;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& o) noexcept
    : device_(o.device_),
      data_(std::exchange(o.data_, nullptr)),
      size_(std::exchange(o.size_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  const ScopedDevice scope(device_);
  cudaFree(data_);
}

Result<PinnedBuffer> PinnedBuffer::Create(std::size_t bytes, std::string_view what) {
  PinnedBuffer b;
  void* p = nullptr;
  if (const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocPortable);
      error != cudaSuccess) {
    cudaGetLastError();
    return Status(Reason::kKvCapacity,
                  Text(what) + " needs " + std::to_string(bytes) +
                      " bytes of page-locked host memory: " + cudaGetErrorString(error));
  }
  b.data_ = static_cast<std::byte*>(p);
  b.size_ = bytes;
  return b;
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& o) noexcept
    : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

Status Graph::Begin(const Stream& stream) {
  return Check(cudaStreamBeginCapture(stream.raw(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
}

Result<Graph> Graph::End(const Stream& stream, const Status& enqueued) {
  cudaGraph_t captured = nullptr;
  const Status ended = Check(cudaStreamEndCapture(stream.raw(), &captured), "cudaStreamEndCapture");
  Graph graph;
  Status made = !enqueued.ok() ? enqueued : ended;
  if (made.ok()) {
    made = Check(cudaGraphInstantiate(&graph.exec_, captured, 0), "cudaGraphInstantiate");
  }
  if (made.ok()) made = Check(cudaGraphUpload(graph.exec_, stream.raw()), "cudaGraphUpload");
  if (captured != nullptr) cudaGraphDestroy(captured);
  if (!made.ok()) return made;
  return graph;
}

Graph& Graph::operator=(Graph&& o) noexcept {
  std::swap(exec_, o.exec_);
  return *this;
}

Graph::~Graph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
}

Status Graph::Launch(StreamRef stream) const {
  return Check(cudaGraphLaunch(exec_, Raw(stream)), "cudaGraphLaunch");
}

Status CopyAsync(void* to, const void* from, std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return Status::Ok();
  return Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Raw(stream)), "cudaMemcpyAsync");
}

Status FillAsync(void* to, std::uint8_t byte, std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return Status::Ok();
  return Check(cudaMemsetAsync(to, byte, bytes, Raw(stream)), "cudaMemsetAsync");
}

}  // namespace dcp::cuda
