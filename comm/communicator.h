// How ranks exchange bytes. A communicator is one rank's end of a fixed group of ranks.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/stream.h"
#include "base/strong.h"
#include "base/tensor.h"
#include "base/time.h"

namespace dcp {

using ConstBytes = std::span<const std::byte>;
using MutBytes = std::span<std::byte>;

// One thread per rank; calls match up across ranks in program order. Operations are ordered on
// `stream` and have completed on return when it is the host's. Buffers stay valid until then.
//
// On a CUDA stream an operation returns when it is enqueued, and Wait, which the rank calls before
// it uses results on the host, says whether it was carried out.
//
// Every operation takes a deadline. If it passes, if a peer fails, or if Abort is called, the
// operation returns RANK_FAILED with a message that names the rank and the operation (a late rank
// also in the metadata as "rank"), and the whole group is poisoned: every present and later call of
// every rank answers that first error at once. A poisoned group is never used again; a new one is
// made under a new epoch. After a failed operation the contents of output buffers are unspecified,
// and no peer still reads this rank's input.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Rank rank() const = 0;
  virtual int size() const = 0;

  // out = [size][in.size()], rank-major.
  Status AllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream);
  // in = [size][chunk], out = [size][chunk]: chunk r of `in` goes to rank r, chunk r of `out` comes
  // from rank r.
  Status AllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream);
  // in = [size][chunk], out = [chunk]: the sum over ranks of their chunk number rank(), accumulated
  // in f32 in rank order and rounded once to `dtype`.
  Status ReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                       StreamRef stream);
  Status Barrier(TimePoint deadline, StreamRef stream);
  // Waits on the host until everything enqueued on `stream` has run. Returns at once on the host's.
  Status Wait(TimePoint deadline, StreamRef stream);

  // OK if operations may be captured in a CUDA graph and replayed, by all ranks in the same order;
  // else UNSUPPORTED saying why not.
  virtual Status CanCapture() const = 0;

  // Poisons the group with `why`; callable from any thread, returns at once. The first error stays.
  virtual void Abort(Status why) = 0;

 private:
  virtual Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) = 0;
  virtual Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) = 0;
  virtual Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                                 StreamRef stream) = 0;
  virtual Status DoBarrier(TimePoint deadline, StreamRef stream) = 0;
  virtual Status DoWait(TimePoint deadline, StreamRef stream) = 0;
};

// What a group is made from. Members of one group agree on epoch, size and rendezvous.
struct GroupSpec {
  std::uint64_t epoch = 0;
  int size = 0;
  std::string_view rendezvous;  // where members meet: "" in one process, "host:port" between them
};

// The communicators of all ranks of one process, in rank order; hand one to each rank's thread.
using MakeGroupFn =
    std::function<Result<std::vector<std::unique_ptr<Communicator>>>(const GroupSpec& spec)>;

}  // namespace dcp
