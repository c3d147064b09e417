#include "comm/communicator.h"

#include <string>

namespace dcp {
namespace {

Status SizeError(std::string_view op, std::size_t in, std::size_t out, std::string_view rule) {
  return Status(Reason::kInternal, std::string(op) + ": in has " + std::to_string(in) +
                                       " bytes and out " + std::to_string(out) + ", expected " +
                                       std::string(rule));
}

}  // namespace

Status Communicator::AllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) {
  if (out.size() != in.size() * static_cast<std::size_t>(size())) {
    return SizeError("AllGather", in.size(), out.size(), "out = size() * in");
  }
  return DoAllGather(in, out, deadline, stream);
}

Status Communicator::AllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef stream) {
  if (in.size() != out.size() || in.size() % static_cast<std::size_t>(size()) != 0) {
    return SizeError("AllToAll", in.size(), out.size(), "equal multiples of size()");
  }
  return DoAllToAll(in, out, deadline, stream);
}

Status Communicator::ReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                                   StreamRef stream) {
  if (in.size() != out.size() * static_cast<std::size_t>(size()) ||
      out.size() % SizeOf(dtype) != 0) {
    return SizeError("ReduceScatter", in.size(), out.size(), "in = size() * out, whole elements");
  }
  return DoReduceScatter(in, out, dtype, deadline, stream);
}

Status Communicator::Barrier(TimePoint deadline, StreamRef stream) {
  return DoBarrier(deadline, stream);
}

Status Communicator::Wait(TimePoint deadline, StreamRef stream) { return DoWait(deadline, stream); }

}  // namespace dcp
