// How a step's small data reach a device: laid out one after the other in page-locked memory and
// sent in one copy to a fixed device address, where a DeviceStep comes first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/cuda.h"
#include "base/status.h"
#include "kernels/device_step.h"

namespace dcp {

class StepUpload {
 public:
  static Result<StepUpload> Create(int device, std::size_t max_bytes);

  const DeviceStep* device_step() const { return device_.as<DeviceStep>(); }
  // Device address; 0 in every new step.
  std::int64_t* faulty_rows() const { return &device_.as<DeviceStep>()->faulty_rows; }

  // Begins a new step. Precondition: the last Send has run.
  void Begin() { used_ = sizeof(DeviceStep); }
  DeviceStep& step() { return *host_.as<DeviceStep>(); }

  // Room for `bytes` more, aligned to 16. Errors: INTERNAL when the block is full.
  struct Room {
    std::span<std::byte> host;
    const std::byte* device;
  };
  Result<Room> Reserve(std::size_t bytes);

  // Copies `items` in; returns their device address.
  template <class T>
  Result<const T*> Add(std::span<const T> items) {
    DCP_ASSIGN_OR_RETURN(const Room room, Reserve(items.size_bytes()));
    const auto bytes = std::as_bytes(items);
    std::copy(bytes.begin(), bytes.end(), room.host.begin());
    return reinterpret_cast<const T*>(room.device);
  }

  // Gives back the end of the last Reserve.
  void Shrink(std::size_t unused) { used_ -= unused; }

  Status Send(StreamRef stream) const;

  // Bytes that Reserve(bytes) takes at most.
  static constexpr std::size_t Padded(std::size_t bytes) { return (bytes + 15) & ~std::size_t{15}; }

 private:
  cuda::PinnedBuffer host_;
  cuda::DeviceBuffer device_;
  std::size_t used_ = 0;
};

}  // namespace dcp
