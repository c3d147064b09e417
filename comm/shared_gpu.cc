#include "comm/shared_gpu.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/cuda.h"
#include "comm/meeting.h"
#include "comm/sum_ranks.h"

namespace dcp {
namespace {

// What ranks share. Event r is recorded by rank r before it meets its peers and waited for by them
// before they meet again, so no event is recorded anew while somebody has yet to wait for it.
struct Group {
  explicit Group(int size) : meeting(size) {}
  Meeting meeting;
  std::vector<cuda::Event> ready;  // rank r's input is written
  std::vector<cuda::Event> read;   // rank r has read its peers' input
};

class SharedGpuRank final : public Communicator {
 public:
  SharedGpuRank(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  Rank rank() const override { return Rank(rank_); }
  int size() const override { return group_->meeting.size(); }
  Status CanCapture() const override {
    return Status(Reason::kUnsupported,
                  "ranks that share GPUs meet on the host in every operation: they run eager, "
                  "without graphs");
  }
  void Abort(Status why) override { group_->meeting.Poison(std::move(why)); }

 private:
  Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) override {
    return Exchange(CommOp::kAllGather, in, deadline, stream, [&](int r, ConstBytes theirs) {
      return cuda::CopyAsync(out.data() + Offset(r, in.size()), theirs.data(), in.size(), stream);
    });
  }

  Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) override {
    const std::size_t chunk = in.size() / static_cast<std::size_t>(size());
    return Exchange(CommOp::kAllToAll, in, deadline, stream, [&](int r, ConstBytes theirs) {
      return cuda::CopyAsync(out.data() + Offset(r, chunk), theirs.data() + Offset(rank_, chunk),
                             chunk, stream);
    });
  }

  Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                         StreamRef stream) override {
    SumRanksArgs sum{
        .ranks = size(), .out = out.data(), .elements = out.size() / SizeOf(dtype), .dtype = dtype};
    return Exchange(CommOp::kReduceScatter, in, deadline, stream, [&](int r, ConstBytes theirs) {
      sum.in[r] = theirs.data() + Offset(rank_, out.size());
      return r + 1 < size() ? Status::Ok() : SumRanks(sum, stream);
    });
  }

  Status DoBarrier(TimePoint deadline, StreamRef stream) override {
    DCP_RETURN_IF_ERROR(Exchange(CommOp::kBarrier, {}, deadline, stream,
                                 [](int, ConstBytes) { return Status::Ok(); }));
    return DoWait(deadline, stream);
  }

  Status DoWait(TimePoint deadline, StreamRef stream) override {
    Meeting& meeting = group_->meeting;
    for (;;) {
      const cudaError_t state = cudaStreamQuery(cuda::Raw(stream));
      if (meeting.poisoned()) return meeting.Error();
      if (state == cudaSuccess) return Status::Ok();
      if (state != cudaErrorNotReady) {
        meeting.Poison(Fault(cuda::Check(state, "cudaStreamQuery").message()));
      } else if (Clock::now() >= deadline) {
        meeting.Poison(Fault("its stream did not finish in time"));
      }
      cudaGetLastError();
      std::this_thread::yield();
    }
  }

  Status Fault(const std::string& what) const {
    return Status(Reason::kRankFailed, "rank " + std::to_string(rank_) + ": " + what)
        .With("rank", std::to_string(rank_));
  }

  // take(r, input of rank r), for every rank in order, enqueues on `stream` what reads it.
  template <class Take>
  Status Exchange(CommOp op, ConstBytes in, TimePoint deadline, StreamRef stream, Take take) {
    if (stream.is_host()) {
      return Status(Reason::kInternal, std::string(OpName(op)) + " without a CUDA stream");
    }
    Meeting& meeting = group_->meeting;
    DCP_RETURN_IF_ERROR(OrPoison(Mine(group_->ready).Record(stream)));
    DCP_RETURN_IF_ERROR(meeting.Publish(rank_, op, in, deadline));
    DCP_RETURN_IF_ERROR(OrPoison(WaitForAll(group_->ready, stream)));
    Status taken;
    DCP_RETURN_IF_ERROR(meeting.Read([&] {
      for (int r = 0; r < size() && taken.ok(); ++r) taken = take(r, meeting.seat(r).in);
      if (taken.ok()) taken = Mine(group_->read).Record(stream);
    }));
    DCP_RETURN_IF_ERROR(OrPoison(taken));
    DCP_RETURN_IF_ERROR(meeting.Meet(rank_, op, deadline));
    return OrPoison(WaitForAll(group_->read, stream));
  }

  cuda::Event& Mine(std::vector<cuda::Event>& events) {
    return events[static_cast<std::size_t>(rank_)];
  }

  static Status WaitForAll(const std::vector<cuda::Event>& events, StreamRef stream) {
    for (const cuda::Event& event : events) {
      DCP_RETURN_IF_ERROR(cuda::Check(cudaStreamWaitEvent(cuda::Raw(stream), event.raw(), 0),
                                      "cudaStreamWaitEvent"));
    }
    return Status::Ok();
  }

  Status OrPoison(const Status& status) {
    if (status.ok()) return status;
    group_->meeting.Poison(Fault(status.message()));
    return group_->meeting.Error();
  }

  static std::size_t Offset(int r, std::size_t chunk) {
    return chunk * static_cast<std::size_t>(r);
  }

  std::shared_ptr<Group> group_;
  const int rank_;
};

// Lets kernels of every device read the memory of the others.
Status EnablePeerAccess(const std::vector<int>& devices) {
  int before = 0;
  cudaGetDevice(&before);
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      int can = 0;
      DCP_RETURN_IF_ERROR(
          cuda::Check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer"));
      if (can == 0) {
        return Status(Reason::kConfig, "CUDA device " + std::to_string(from) +
                                           " cannot read the memory of device " +
                                           std::to_string(to));
      }
      DCP_RETURN_IF_ERROR(cuda::UseDevice(from));
      const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        DCP_RETURN_IF_ERROR(cuda::Check(error, "cudaDeviceEnablePeerAccess"));
      }
    }
  }
  return cuda::Check(cudaSetDevice(before), "cudaSetDevice");
}

Result<std::vector<std::unique_ptr<Communicator>>> MakeGroup(const std::vector<int>& devices,
                                                             const GroupSpec& spec) {
  if (spec.size != static_cast<int>(devices.size()) || spec.size > kMaxSumRanks) {
    return Status(Reason::kConfig, "group of " + std::to_string(spec.size) + " ranks on " +
                                       std::to_string(devices.size()) + " devices, at most " +
                                       std::to_string(kMaxSumRanks));
  }
  DCP_RETURN_IF_ERROR(EnablePeerAccess(devices));
  auto group = std::make_shared<Group>(spec.size);
  for (const int device : devices) {
    for (auto* events : {&group->ready, &group->read}) {
      DCP_ASSIGN_OR_RETURN(cuda::Event event, cuda::Event::Create(device));
      events->push_back(std::move(event));
    }
  }
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < spec.size; ++r) ranks.push_back(std::make_unique<SharedGpuRank>(group, r));
  return ranks;
}

}  // namespace

MakeGroupFn SharedGpuGroups(std::vector<int> devices) {
  return [devices = std::move(devices)](const GroupSpec& spec) { return MakeGroup(devices, spec); };
}

}  // namespace dcp
