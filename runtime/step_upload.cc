#include "runtime/step_upload.h"

#include <new>
#include <string>
#include <utility>

namespace dcp {

Result<StepUpload> StepUpload::Create(int device, std::size_t max_bytes) {
  const std::size_t bytes = Padded(sizeof(DeviceStep)) + Padded(max_bytes);
  StepUpload upload;
  DCP_ASSIGN_OR_RETURN(upload.host_, cuda::PinnedBuffer::Create(bytes, "the step data"));
  DCP_ASSIGN_OR_RETURN(upload.device_, cuda::DeviceBuffer::Create(device, bytes, "the step data"));
  new (upload.host_.data()) DeviceStep;
  return upload;
}

Result<StepUpload::Room> StepUpload::Reserve(std::size_t bytes) {
  const std::size_t at = Padded(used_);
  if (bytes > host_.size() - at) {
    return Status(Reason::kInternal, "the step data need " + std::to_string(at + bytes) +
                                         " bytes, reserved are " + std::to_string(host_.size()));
  }
  used_ = at + bytes;
  return Room{.host = {host_.data() + at, bytes}, .device = device_.data() + at};
}

Status StepUpload::Send(StreamRef stream) const {
  return cuda::CopyAsync(device_.data(), host_.data(), used_, stream);
}

}  // namespace dcp
