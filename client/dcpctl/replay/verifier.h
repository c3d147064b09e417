// Checks answers beside the stream, on worker threads. The queue is bounded by bytes: a driver that
// outruns the checks waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "client/workload/replay_plan.h"
#include "client/workload/row_check.h"
#include "dcp/v1/decode.pb.h"

namespace dcp {

struct VerifierOptions {
  Synthetic synthetic{{}, 0};
  int d_v = 0;
  v1::DataType output_dtype = v1::DATA_TYPE_BF16;
  RowLimits limits;
  double rate = 0.2;  // share of rows
  std::uint64_t seed = 1;
  std::uint64_t epoch = 0;
};

// One answered item: its request's essentials and the answer.
struct AnsweredItem {
  struct Token {
    const RequestPlan* request;
    std::int64_t position;
  };
  std::vector<Token> tokens;
  int layer = 0;
  std::uint64_t tag = 0;
  v1::LseBase lse_base = v1::LSE_BASE_E;
  v1::DecodeStepResponse answer;
};

class Verifier {
 public:
  Verifier(const VerifierOptions& options, int threads);
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;

  void Push(AnsweredItem item);
  // Waits for everything pushed. Rows of an answer with a wrong form, tag or epoch count as wrong.
  RowCheckResult Finish();

 private:
  void Work();
  RowCheckResult Check(const AnsweredItem& item);
  std::vector<int> ChooseHeads(const AnsweredItem::Token& token, int layer, bool all) const;

  const VerifierOptions options_;
  RowChecker checker_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AnsweredItem> queue_;
  std::size_t queued_bytes_ = 0;
  bool closed_ = false;
  RowCheckResult result_;
  std::vector<std::thread> threads_;
};

}  // namespace dcp
