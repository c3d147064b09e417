#include "comm/nccl.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/cuda.h"
#include "base/log.h"
#include "base/wait.h"
#include "comm/meeting.h"
#include "comm/nccl_api.h"

namespace dcp {
namespace {

constexpr Nanos kCloseBound = std::chrono::seconds(5);

Status Failed(const NcclApi& nccl, int rank, std::string_view op, ncclResult_t result) {
  return Status(Reason::kRankFailed, "rank " + std::to_string(rank) + ": " + std::string(op) +
                                         ": NCCL: " + nccl.get_error_string(result));
}

// What the ranks of one group share: the first error, and how many operations each has begun, which
// says who is late when another waits in vain.
class Group {
 public:
  explicit Group(int size) : begun_(static_cast<std::size_t>(size)) {}
  int size() const { return static_cast<int>(begun_.size()); }

  void Poison(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (poisoned_.load(std::memory_order_relaxed)) return;
    error_ = why;
    poisoned_.store(true, std::memory_order_release);
  }
  bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }
  Status Error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  void Begin(int rank) { begun_[static_cast<std::size_t>(rank)].fetch_add(1); }
  // The rank that has begun the fewest operations, if fewer than `rank`; else -1.
  int Behind(int rank) const {
    int behind = -1;
    std::uint64_t least = begun_[static_cast<std::size_t>(rank)].load();
    for (int r = 0; r < size(); ++r) {
      if (begun_[static_cast<std::size_t>(r)].load() < least) {
        least = begun_[static_cast<std::size_t>(r)].load();
        behind = r;
      }
    }
    return behind;
  }

 private:
  std::vector<std::atomic<std::uint64_t>> begun_;
  std::atomic<bool> poisoned_{false};
  std::mutex mutex_;
  Status error_;  // guarded by mutex_
};

// An ncclComm_t that can be given up from any thread. Shared with the thread that aborts it, so
// that nothing dangles when NCCL does not come back.
class Handle {
 public:
  Handle(const NcclApi& nccl, ncclComm_t comm, int device)
      : nccl_(nccl), comm_(comm), device_(device) {}

  // Calls f(comm) unless the communicator has been given up; NCCL is entered by one thread at a
  // time.
  template <class F>
  ncclResult_t With(F f) {
    const std::lock_guard lock(entry_);
    return given_up_ ? ncclRemoteError : f(comm_);
  }

  static void Abort(const std::shared_ptr<Handle>& handle) {
    if (handle->closing_.exchange(true)) return;
    std::thread([handle] { handle->Close(&NcclApi::comm_abort); }).detach();
  }

  // In good health: waits for NCCL to finish what was enqueued; otherwise for the abort.
  static void Destroy(const std::shared_ptr<Handle>& handle) {
    if (!handle->closing_.exchange(true)) {
      std::thread([handle] {
        handle->nccl_.comm_finalize(handle->comm_);
        handle->Poll(Clock::now() + kCloseBound, [] { return false; });
        handle->Close(&NcclApi::comm_destroy);
      }).detach();
    }
    std::unique_lock lock(handle->closed_mutex_);
    if (!WaitUntil(handle->changed_, lock, Clock::now() + kCloseBound,
                   [&] { return handle->closed_; })) {
      log::error("NCCL did not give back a communicator of device {}; it is leaked",
                 handle->device_);
    }
  }

  // What NCCL came to by the deadline; ncclInProgress if nothing, or if it is given up: when stop()
  // says so or by Abort.
  template <class Stop>
  ncclResult_t PollUntil(TimePoint deadline, Stop stop) {
    return Poll(deadline, [&] { return closing_.load(std::memory_order_relaxed) || stop(); });
  }

 private:
  template <class Stop>
  ncclResult_t Poll(TimePoint deadline, Stop stop) {
    ncclResult_t state = ncclInProgress;
    do {
      if (nccl_.comm_get_async_error(comm_, &state) != ncclSuccess) return ncclInternalError;
      if (state != ncclInProgress || stop()) return state;
      std::this_thread::yield();
    } while (Clock::now() < deadline);
    return state;
  }

  void Close(ncclResult_t (*NcclApi::*close)(ncclComm_t)) {
    cudaSetDevice(device_);
    {
      const std::lock_guard lock(entry_);
      given_up_ = true;
    }
    (nccl_.*close)(comm_);
    const std::lock_guard lock(closed_mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  const NcclApi& nccl_;
  const ncclComm_t comm_;
  const int device_;
  std::mutex entry_;
  bool given_up_ = false;  // guarded by entry_
  std::atomic<bool> closing_{false};
  std::mutex closed_mutex_;
  std::condition_variable changed_;
  bool closed_ = false;  // guarded by closed_mutex_
};

class NcclRank final : public Communicator {
 public:
  NcclRank(const NcclApi& nccl, std::shared_ptr<Group> group, std::shared_ptr<Handle> handle,
           int rank, cuda::DeviceBuffer token)
      : nccl_(nccl),
        group_(std::move(group)),
        handle_(std::move(handle)),
        rank_(rank),
        token_(std::move(token)) {}
  ~NcclRank() override {
    if (group_->poisoned()) Handle::Abort(handle_);
    Handle::Destroy(handle_);
  }

  Rank rank() const override { return Rank(rank_); }
  int size() const override { return group_->size(); }
  Status CanCapture() const override { return Status::Ok(); }
  void Abort(Status why) override {
    group_->Poison(why);
    Handle::Abort(handle_);
  }

 private:
  Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) override {
    return Run(CommOp::kAllGather, deadline, stream, [&](ncclComm_t comm) {
      return nccl_.all_gather(in.data(), out.data(), in.size(), ncclInt8, comm, cuda::Raw(stream));
    });
  }

  Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) override {
    const std::size_t chunk = in.size() / static_cast<std::size_t>(size());
    return Run(CommOp::kAllToAll, deadline, stream, [&](ncclComm_t comm) {
      ncclResult_t result = nccl_.group_start();
      for (int i = 0; i < size() && Accepted(result); ++i) {
        const std::size_t at = chunk * static_cast<std::size_t>(i);
        result = nccl_.send(in.data() + at, chunk, ncclInt8, i, comm, cuda::Raw(stream));
        if (!Accepted(result)) break;
        result = nccl_.recv(out.data() + at, chunk, ncclInt8, i, comm, cuda::Raw(stream));
      }
      const ncclResult_t end = nccl_.group_end();
      return Accepted(result) ? end : result;
    });
  }

  Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                         StreamRef stream) override {
    const ncclDataType_t type = dtype == DType::kBf16 ? ncclBfloat16 : ncclFloat32;
    return Run(CommOp::kReduceScatter, deadline, stream, [&](ncclComm_t comm) {
      return nccl_.reduce_scatter(in.data(), out.data(), out.size() / SizeOf(dtype), type, ncclSum,
                                  comm, cuda::Raw(stream));
    });
  }

  // NCCL has no barrier; the sum of one number is one, and its wait is the host's.
  Status DoBarrier(TimePoint deadline, StreamRef stream) override {
    DCP_RETURN_IF_ERROR(Run(CommOp::kBarrier, deadline, stream, [&](ncclComm_t comm) {
      return nccl_.all_reduce(token_.data(), token_.data(), 1, ncclInt32, ncclSum, comm,
                              cuda::Raw(stream));
    }));
    return DoWait(deadline, stream);
  }

  Status DoWait(TimePoint deadline, StreamRef stream) override {
    for (;;) {
      const cudaError_t state = cudaStreamQuery(cuda::Raw(stream));
      if (group_->poisoned()) return GiveUp(group_->Error());
      if (state == cudaSuccess) return Status::Ok();
      if (state != cudaErrorNotReady) {
        return GiveUp(
            Status(Reason::kRankFailed, "rank " + std::to_string(rank_) + ": " +
                                            cuda::Check(state, "cudaStreamQuery").message()));
      }
      cudaGetLastError();
      ncclResult_t async = ncclSuccess;
      handle_->With([&](ncclComm_t comm) { return nccl_.comm_get_async_error(comm, &async); });
      if (async != ncclSuccess && async != ncclInProgress) {
        return GiveUp(Failed(nccl_, rank_, OpName(last_op_), async));
      }
      if (Clock::now() >= deadline) return GiveUp(Late());
      std::this_thread::yield();
    }
  }

  // Begins an operation and waits until NCCL has taken it on.
  template <class F>
  Status Run(CommOp op, TimePoint deadline, StreamRef stream, F f) {
    if (stream.is_host()) {
      return Status(Reason::kInternal, "NCCL: " + std::string(OpName(op)) + " without a stream");
    }
    last_op_ = op;
    if (group_->poisoned()) return GiveUp(group_->Error());
    group_->Begin(rank_);
    const ncclResult_t result = handle_->With([&](ncclComm_t comm) {
      const ncclResult_t begun = f(comm);
      return begun == ncclInProgress
                 ? handle_->PollUntil(deadline, [this] { return group_->poisoned(); })
                 : begun;
    });
    if (group_->poisoned()) return GiveUp(group_->Error());
    if (result == ncclInProgress) return GiveUp(Late());
    if (result != ncclSuccess) return GiveUp(Failed(nccl_, rank_, OpName(op), result));
    return Status::Ok();
  }

  static bool Accepted(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
  }

  Status Late() const {
    if (const int behind = group_->Behind(rank_); behind >= 0) return LateRank(behind, last_op_);
    return Status(Reason::kRankFailed, "rank " + std::to_string(rank_) + ": " +
                                           std::string(OpName(last_op_)) +
                                           " was begun by all ranks and did not end in time");
  }

  Status GiveUp(Status why) {
    group_->Poison(why);
    Handle::Abort(handle_);
    return group_->Error();
  }

  const NcclApi& nccl_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Handle> handle_;
  const int rank_;
  cuda::DeviceBuffer token_;
  CommOp last_op_ = CommOp::kBarrier;
};

Result<std::vector<std::unique_ptr<Communicator>>> MakeGroup(const std::vector<int>& devices,
                                                             Nanos timeout, const GroupSpec& spec) {
  if (spec.size != static_cast<int>(devices.size())) {
    return Status(Reason::kConfig, "group of " + std::to_string(spec.size) + " ranks on " +
                                       std::to_string(devices.size()) + " devices");
  }
  DCP_ASSIGN_OR_RETURN(const NcclApi* const nccl, NcclApi::Load());
  int before = 0;
  cudaGetDevice(&before);
  ncclUniqueId id;
  if (const ncclResult_t r = nccl->get_unique_id(&id); r != ncclSuccess) {
    return Failed(*nccl, 0, "ncclGetUniqueId", r);
  }
  std::vector<ncclComm_t> comms(devices.size());
  ncclResult_t result = nccl->group_start();
  for (std::size_t r = 0; r < devices.size() && result == ncclSuccess; ++r) {
    DCP_RETURN_IF_ERROR(cuda::UseDevice(devices[r]));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    result = nccl->comm_init_rank_config(&comms[r], spec.size, id, static_cast<int>(r), &config);
    if (result == ncclInProgress) result = ncclSuccess;
  }
  const ncclResult_t end = nccl->group_end();
  if (result == ncclSuccess && end != ncclInProgress) result = end;
  if (result != ncclSuccess) return Failed(*nccl, 0, "ncclCommInitRankConfig", result);

  auto group = std::make_shared<Group>(spec.size);
  const TimePoint deadline = Clock::now() + timeout;
  std::vector<std::shared_ptr<Handle>> handles;
  for (std::size_t r = 0; r < devices.size(); ++r) {
    handles.push_back(std::make_shared<Handle>(*nccl, comms[r], devices[r]));
  }
  for (std::size_t r = 0; r < devices.size(); ++r) {
    const ncclResult_t state = handles[r]->PollUntil(deadline, [] { return false; });
    if (state == ncclSuccess) continue;
    for (const auto& handle : handles) Handle::Abort(handle);
    if (state != ncclInProgress) return Failed(*nccl, static_cast<int>(r), "init", state);
    return Status(Reason::kRankFailed,
                  "NCCL did not connect " + std::to_string(spec.size) + " ranks in time");
  }
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (std::size_t r = 0; r < devices.size(); ++r) {
    DCP_RETURN_IF_ERROR(cuda::UseDevice(devices[r]));
    DCP_ASSIGN_OR_RETURN(cuda::DeviceBuffer token,
                         cuda::DeviceBuffer::Create(devices[r], sizeof(std::int32_t), "a barrier"));
    DCP_RETURN_IF_ERROR(cuda::Check(cudaMemset(token.data(), 0, token.size()), "cudaMemset"));
    ranks.push_back(std::make_unique<NcclRank>(*nccl, group, handles[r], static_cast<int>(r),
                                               std::move(token)));
  }
  cudaSetDevice(before);
  return ranks;
}

}  // namespace

Result<NcclVersion> LoadedNccl() {
  DCP_ASSIGN_OR_RETURN(const NcclApi* const nccl, NcclApi::Load());
  return NcclVersion{.code = nccl->version, .path = nccl->path};
}

MakeGroupFn NcclGroups(std::vector<int> devices, Nanos timeout) {
  return [devices = std::move(devices), timeout](const GroupSpec& spec) {
    return MakeGroup(devices, timeout, spec);
  };
}

}  // namespace dcp
