#include "comm/in_process.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/bf16.h"
#include "comm/meeting.h"

namespace dcp {
namespace {

template <class T>
float Load(const std::byte* p, std::size_t i) {
  T x;
  std::memcpy(&x, p + i * sizeof(T), sizeof(T));
  if constexpr (std::is_same_v<T, Bf16>) {
    return ToFloat(x);
  } else {
    return x;
  }
}

template <class T>
void Store(std::byte* p, std::size_t i, float v) {
  T x;
  if constexpr (std::is_same_v<T, Bf16>) {
    x = ToBf16(v);
  } else {
    x = v;
  }
  std::memcpy(p + i * sizeof(T), &x, sizeof(T));
}

class InProcess final : public Communicator {
 public:
  InProcess(std::shared_ptr<Meeting> group, int rank) : group_(std::move(group)), rank_(rank) {}
  Rank rank() const override { return Rank(rank_); }
  int size() const override { return group_->size(); }
  Status CanCapture() const override {
    return Status(Reason::kUnsupported, "ranks that exchange through host memory have no graphs");
  }
  void Abort(Status why) override { group_->Poison(std::move(why)); }

 private:
  Status DoAllGather(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    return Exchange(CommOp::kAllGather, in, deadline, [&] {
      for (int r = 0; r < size(); ++r) {
        std::ranges::copy(group_->seat(r).in, out.begin() + Offset(r, in.size()));
      }
    });
  }

  Status DoAllToAll(ConstBytes in, MutBytes out, TimePoint deadline, StreamRef) override {
    const std::size_t chunk = in.size() / static_cast<std::size_t>(size());
    return Exchange(CommOp::kAllToAll, in, deadline, [&] {
      for (int r = 0; r < size(); ++r) {
        const ConstBytes from =
            group_->seat(r).in.subspan(chunk * static_cast<std::size_t>(rank_), chunk);
        std::ranges::copy(from, out.begin() + Offset(r, chunk));
      }
    });
  }

  Status DoReduceScatter(ConstBytes in, MutBytes out, DType dtype, TimePoint deadline,
                         StreamRef) override {
    return Exchange(CommOp::kReduceScatter, in, deadline,
                    [&] { dtype == DType::kBf16 ? Reduce<Bf16>(out) : Reduce<float>(out); });
  }

  Status DoBarrier(TimePoint deadline, StreamRef) override {
    return Exchange(CommOp::kBarrier, {}, deadline, [] {});
  }

  Status DoWait(TimePoint, StreamRef) override {
    return group_->poisoned() ? group_->Error() : Status::Ok();
  }

  template <class T>
  void Reduce(MutBytes out) {
    for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
      float sum = 0;
      for (int r = 0; r < size(); ++r) {
        const std::byte* chunk =
            group_->seat(r).in.data() + out.size() * static_cast<std::size_t>(rank_);
        sum += Load<T>(chunk, i);
      }
      Store<T>(out.data(), i, sum);
    }
  }

  template <class Copy>
  Status Exchange(CommOp op, ConstBytes in, TimePoint deadline, Copy copy) {
    DCP_RETURN_IF_ERROR(group_->Publish(rank_, op, in, deadline));
    DCP_RETURN_IF_ERROR(group_->Read(copy));
    return group_->Meet(rank_, op, deadline);  // every input has been read
  }

  static std::ptrdiff_t Offset(int r, std::size_t chunk) {
    return static_cast<std::ptrdiff_t>(chunk * static_cast<std::size_t>(r));
  }

  std::shared_ptr<Meeting> group_;
  int rank_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> MakeInProcessGroup(const GroupSpec& spec) {
  if (spec.size < 1) {
    return Status(Reason::kConfig,
                  "group size is " + std::to_string(spec.size) + ", expected at least 1");
  }
  auto group = std::make_shared<Meeting>(spec.size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(static_cast<std::size_t>(spec.size));
  for (int r = 0; r < spec.size; ++r) ranks.push_back(std::make_unique<InProcess>(group, r));
  return ranks;
}

}  // namespace dcp
