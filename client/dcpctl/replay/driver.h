// The decode loop: all live requests share one step, every layer of a step is in flight on one
// DecodeStream at once. One thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/decode_stream.h"
#include "client/dcpctl/replay/admission.h"
#include "client/dcpctl/replay/server_calls.h"
#include "client/dcpctl/replay/stats.h"
#include "client/dcpctl/replay/verifier.h"

namespace dcp {

struct DriverResult {
  std::int64_t tokens = 0;                   // decoded
  std::vector<std::int64_t> step_us;         // whole steps, all layers
  std::vector<std::int64_t> first_token_us;  // from the scheduled start
  std::vector<std::int64_t> request_us;      // from the scheduled start
};

class Driver {
 public:
  // `progress` is called after every step and while waiting.
  Driver(Client& client, const Synthetic& synthetic, v1::DataType output_dtype,
         Admission& admission, ServerCalls& calls, Verifier& verifier, ReplayStats& stats,
         const std::atomic<bool>& stop, std::function<void(const DriverResult&)> progress);
  DriverResult Run();

 private:
  // One layer of one chunk of the batch.
  struct Item {
    v1::DecodeStepRequest request;
    std::vector<Session*> sessions;
    TimePoint due;  // of a retry
    TimePoint give_up;
  };

  void Step();
  std::vector<Item> BuildItems(std::uint64_t step_id);
  Item BuildItem(std::uint64_t step_id, int layer, std::size_t begin, std::size_t end);
  std::size_t ChunkTokens() const;
  RpcError Exchange(std::vector<Item>& items);
  // True when the item has to be sent again.
  bool Take(Item& item, v1::DecodeStepResponse answer);
  void EndFinished();

  Client& client_;
  const Synthetic synthetic_;
  const v1::DataType output_dtype_;
  Admission& admission_;
  ServerCalls& calls_;
  Verifier& verifier_;
  ReplayStats& stats_;
  const std::atomic<bool>& stop_;
  const std::function<void(const DriverResult&)> progress_;
  const Millis item_timeout_;

  std::vector<std::unique_ptr<Session>> live_;
  std::unique_ptr<DecodeStream> stream_;
  std::vector<AnsweredItem> answered_;  // of the present step
  std::uint64_t next_tag_ = 1;
  DriverResult result_;
};

}  // namespace dcp
