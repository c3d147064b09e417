// A group of GPU ranks, a thread each, for benchmarks of what ranks do together.
#pragma once

#include <algorithm>
#include <barrier>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/cuda.h"
#include "comm/communicator.h"
#include "comm/nccl.h"

namespace dcp::bench {

struct RankContext {
  int rank;
  int device;
  cuda::Stream& stream;
  Communicator& comm;
  std::barrier<>& together;  // of all ranks' threads
};

// Runs f on a thread per rank, rank r on device r, connected through NCCL. Returns the first error;
// a rank that fails aborts the group, so that the others end too.
inline Status RunRanks(int ranks, const std::function<Status(RankContext&)>& f) {
  std::vector<int> devices(static_cast<std::size_t>(ranks));
  std::iota(devices.begin(), devices.end(), 0);
  DCP_ASSIGN_OR_RETURN(auto group,
                       NcclGroups(devices, std::chrono::seconds(60))({.epoch = 1, .size = ranks}));
  std::barrier<> together(ranks);
  std::vector<Status> statuses(devices.size());
  std::vector<std::thread> threads;
  threads.reserve(devices.size());
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      statuses[i] = [&]() -> Status {
        DCP_RETURN_IF_ERROR(cuda::UseDevice(r));
        DCP_ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create(r));
        RankContext context{
            .rank = r, .device = r, .stream = stream, .comm = *group[i], .together = together};
        return f(context);
      }();
      if (!statuses[i].ok()) {
        group[i]->Abort(statuses[i]);
        together.arrive_and_drop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto failed = std::ranges::find_if(statuses, [](const Status& s) { return !s.ok(); });
  return failed == statuses.end() ? Status::Ok() : *failed;
}

// Median microseconds of one of the `inside` repetitions that `graph` holds, over `runs` launches
// that all ranks begin together.
inline Result<double> MedianMicroseconds(RankContext& context, const cuda::Graph& graph, int inside,
                                         int runs) {
  const TimePoint deadline = Clock::now() + std::chrono::seconds(60);
  DCP_ASSIGN_OR_RETURN(cuda::Event begin,
                       cuda::Event::Create(context.device, cuda::Event::Timing::kOn));
  DCP_ASSIGN_OR_RETURN(cuda::Event end,
                       cuda::Event::Create(context.device, cuda::Event::Timing::kOn));
  std::vector<double> us;
  for (int i = -3; i < runs; ++i) {  // the first three warm up
    context.together.arrive_and_wait();
    DCP_RETURN_IF_ERROR(begin.Record(context.stream.ref()));
    DCP_RETURN_IF_ERROR(graph.Launch(context.stream.ref()));
    DCP_RETURN_IF_ERROR(end.Record(context.stream.ref()));
    DCP_RETURN_IF_ERROR(context.comm.Wait(deadline, context.stream.ref()));
    DCP_ASSIGN_OR_RETURN(const float ms, cuda::Event::Milliseconds(begin, end));
    if (i >= 0) us.push_back(1000.0 * ms / inside);
  }
  std::ranges::nth_element(us, us.begin() + runs / 2);
  return us[static_cast<std::size_t>(runs / 2)];
}

}  // namespace dcp::bench
