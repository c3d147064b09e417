#include "client/dcpctl/replay/verifier.h"

#include <algorithm>
#include <limits>

#include "client/cpp/tensor.h"

namespace dcp {
namespace {

constexpr std::size_t kMaxQueuedBytes = std::size_t{256} << 20;

std::size_t BytesOf(const AnsweredItem& item) {
  return item.answer.output().data().size() + item.answer.lse().values().data().size();
}

}  // namespace

Verifier::Verifier(const VerifierOptions& options, int threads)
    : options_(options), checker_(options.synthetic, options.d_v, options.limits) {
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Work(); });
}

Verifier::~Verifier() { Finish(); }

void Verifier::Push(AnsweredItem item) {
  const std::size_t bytes = BytesOf(item);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() || queued_bytes_ + bytes <= kMaxQueuedBytes; });
  queued_bytes_ += bytes;
  queue_.push_back(std::move(item));
  changed_.notify_all();
}

RowCheckResult Verifier::Finish() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  for (std::thread& t : threads_) t.join();
  threads_.clear();
  return result_;
}

void Verifier::Work() {
  RowCheckResult mine;
  for (;;) {
    AnsweredItem item;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) break;
      item = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= BytesOf(item);
    }
    changed_.notify_all();
    mine.Add(Check(item));
  }
  const std::lock_guard lock(mutex_);
  result_.Add(mine);
}

std::vector<int> Verifier::ChooseHeads(const AnsweredItem::Token& token, int layer,
                                       bool all) const {
  const int heads = options_.synthetic.geometry().heads;
  const auto position = static_cast<std::uint64_t>(token.position);
  const std::uint64_t key =
      HashWords(options_.seed, static_cast<std::uint64_t>(token.request->index), position,
                static_cast<std::uint64_t>(layer));
  // One row of every request at least: of its first step, in layer 0.
  const bool forced = layer == 0 && token.position == token.request->input - 1;
  const int forced_head = static_cast<int>(HashWords(key, 1) % static_cast<std::uint64_t>(heads));
  std::vector<int> chosen;
  for (int h = 0; h < heads; ++h) {
    if (all || (forced && h == forced_head) ||
        UnitInterval(HashWords(key, 2, static_cast<std::uint64_t>(h))) < options_.rate) {
      chosen.push_back(h);
    }
  }
  return chosen;
}

RowCheckResult Verifier::Check(const AnsweredItem& item) {
  const int heads = options_.synthetic.geometry().heads;
  const auto d_v = static_cast<std::size_t>(options_.d_v);
  const v1::DecodeStepResponse& answer = item.answer;
  const auto tokens = static_cast<std::int64_t>(item.tokens.size());
  RowCheckResult result;

  const bool formed =
      HasForm(answer.output(), options_.output_dtype, {tokens, heads, options_.d_v}) &&
      HasForm(answer.lse().values(), v1::DATA_TYPE_FP32, {tokens, heads}) &&
      answer.lse().base() == item.lse_base && answer.tag() == item.tag &&
      answer.epoch() == options_.epoch;
  if (!formed) {
    result.rows = result.wrong = tokens * heads;
    result.max_output_error = result.max_lse_error = std::numeric_limits<double>::infinity();
    return result;
  }
  // Inputs are finite, so a row that is not is wrong: find it.
  const bool all = answer.faulty_rows() > 0;
  std::vector<float> output;
  std::vector<float> lse;
  for (std::size_t t = 0; t < item.tokens.size(); ++t) {
    AnsweredToken token;
    token.heads = ChooseHeads(item.tokens[t], item.layer, all);
    if (token.heads.empty()) continue;
    output.resize(token.heads.size() * d_v);
    lse.resize(token.heads.size());
    for (std::size_t i = 0; i < token.heads.size(); ++i) {
      const std::size_t row =
          t * static_cast<std::size_t>(heads) + static_cast<std::size_t>(token.heads[i]);
      ReadFloats(answer.output(), row * d_v, std::span(output).subspan(i * d_v, d_v));
      ReadFloats(answer.lse().values(), row, std::span(lse).subspan(i, 1));
    }
    token.content = &item.tokens[t].request->content;
    token.layer = item.layer;
    token.position = item.tokens[t].position;
    token.output = output;
    token.lse = lse;
    token.lse_base_two = item.lse_base == v1::LSE_BASE_TWO;
    result.Add(checker_.Check(token));
  }
  return result;
}

}  // namespace dcp
