// NCCL and the communicator for shared GPUs, behind host memory: every operation stages its input
// into device buffers, runs on a stream of its own and waits.
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/cuda.h"
#include "comm/nccl.h"
#include "comm/shared_gpu.h"
#include "tests/comm/communicators.h"

namespace dcp::testing {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

class Staged final : public Communicator {
 public:
  static Result<std::unique_ptr<Communicator>> Create(std::unique_ptr<Communicator> inner,
                                                      int device) {
    DCP_ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create(device));
    DCP_ASSIGN_OR_RETURN(auto in, cuda::DeviceBuffer::Create(device, kBufferBytes, "input"));
    DCP_ASSIGN_OR_RETURN(auto out, cuda::DeviceBuffer::Create(device, kBufferBytes, "output"));
    return std::unique_ptr<Communicator>(
        new Staged(std::move(inner), std::move(stream), std::move(in), std::move(out)));
  }

  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Status CanCapture() const override { return inner_->CanCapture(); }
  void Abort(Status why) override { inner_->Abort(std::move(why)); }

 private:
  Staged(std::unique_ptr<Communicator> inner, cuda::Stream stream, cuda::DeviceBuffer in,
         cuda::DeviceBuffer out)
      : stream_(std::move(stream)),
        in_(std::move(in)),
        out_(std::move(out)),
        inner_(std::move(inner)) {}

  Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    return Run(in, out, deadline, [&](ConstBytes i, MutBytes o) {
      return inner_->AllGather(i, o, deadline, stream_.ref());
    });
  }
  Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    return Run(in, out, deadline, [&](ConstBytes i, MutBytes o) {
      return inner_->AllToAll(i, o, deadline, stream_.ref());
    });
  }
  Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                         StreamRef) override {
    return Run(in, out, deadline, [&](ConstBytes i, MutBytes o) {
      return inner_->ReduceScatter(i, o, dtype, deadline, stream_.ref());
    });
  }
  Status DoBarrier(TimePoint deadline, StreamRef) override {
    DCP_RETURN_IF_ERROR(cuda::UseDevice(stream_.device()));
    return inner_->Barrier(deadline, stream_.ref());
  }
  Status DoWait(TimePoint deadline, StreamRef) override {
    return inner_->Wait(deadline, stream_.ref());
  }

  template <class F>
  Status Run(ConstBytes in, MutBytes out, TimePoint deadline, F f) {
    DCP_RETURN_IF_ERROR(cuda::UseDevice(stream_.device()));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(in_.data(), in.data(), in.size(), stream_.ref()));
    DCP_RETURN_IF_ERROR(cuda::FillAsync(out_.data(), 0xa5, out.size(), stream_.ref()));
    DCP_RETURN_IF_ERROR(f({in_.data(), in.size()}, {out_.data(), out.size()}));
    DCP_RETURN_IF_ERROR(inner_->Wait(deadline, stream_.ref()));
    DCP_RETURN_IF_ERROR(cuda::CopyAsync(out.data(), out_.data(), out.size(), stream_.ref()));
    return stream_.Synchronize();
  }

  cuda::Stream stream_;
  cuda::DeviceBuffer in_, out_;
  std::unique_ptr<Communicator> inner_;  // goes first: it may have kernels on the stream
};

// Rank r on device r % devices.
std::vector<int> Spread(int size, int devices) {
  std::vector<int> list;
  for (int r = 0; r < size; ++r) list.push_back(r % devices);
  return list;
}

MakeGroupFn StagedGroups(int devices, bool shared) {
  return [=](const GroupSpec& spec) -> Result<std::vector<std::unique_ptr<Communicator>>> {
    const std::vector<int> on = Spread(spec.size, devices);
    const MakeGroupFn make = shared ? SharedGpuGroups(on) : NcclGroups(on, Millis(60000));
    DCP_ASSIGN_OR_RETURN(auto group, make(spec));
    for (std::size_t r = 0; r < group.size(); ++r) {
      DCP_ASSIGN_OR_RETURN(group[r], Staged::Create(std::move(group[r]), on[r]));
    }
    return group;
  };
}

}  // namespace

std::vector<CommunicatorEntry> Communicators() {
  cuda::SetUpEnvironment();
  const Result<int> devices = cuda::DeviceCount();
  if (!devices.ok()) throw std::runtime_error(devices.status().ToString());
  return {{.name = "shared_gpu", .max_size = 8, .make = StagedGroups(*devices, true)},
          {.name = "nccl", .max_size = *devices, .make = StagedGroups(*devices, false)}};
}

}  // namespace dcp::testing
