#include <catch2/catch.hpp>
#include <thread>

#include "comm/in_process.h"
#include "tests/runtime/exchange_problem.h"

namespace dcp::testing {

Answer RunExchangeProblem(ExchangeKind kind, const Problem& p) {
  const auto ranks = static_cast<std::size_t>(p.shape.ranks);
  auto group = MakeInProcessGroup({.epoch = 1, .size = p.shape.ranks});
  REQUIRE(group.ok());
  Answer answer;
  answer.out.assign(p.out[0].size(), 12345.0f);
  answer.lse.assign(p.lse[0].size(), 12345.0f);
  std::vector<Status> statuses(ranks);
  std::vector<std::int64_t> faulty(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      ExchangeBuffers buffers(kind, p.shape, p.tokens + 3);
      const PartialLayout layout = buffers.Layout(p.tokens);
      const int group_heads = layout.heads_per_group;
      FillPartials(p, r, layout);
      const std::int64_t slice = static_cast<std::int64_t>(group_heads) * p.shape.d_v * 4;
      const ExchangeArgs args{.tokens = p.tokens,
                              .bounds = p.bounds,
                              .partial_base = p.base,
                              .output_dtype = DType::kF32,
                              .output = {.data = reinterpret_cast<std::byte*>(answer.out.data()) +
                                                 static_cast<std::int64_t>(r) * slice,
                                         .rows = p.tokens,
                                         .row_bytes = slice,
                                         .stride = slice * p.shape.ranks},
                              .lse = {.data = reinterpret_cast<std::byte*>(answer.lse.data()) +
                                              static_cast<std::int64_t>(r) * group_heads * 4,
                                      .rows = p.tokens,
                                      .row_bytes = group_heads * 4,
                                      .stride = p.shape.heads * 4},
                              .lse_base = LogBase::kE,
                              .deadline = Clock::now() + Millis(20000)};
      const auto result =
          RunExchange(buffers, *(*group)[r], args, [](RankPhase) { return Status::Ok(); });
      statuses[r] = result.status();
      if (result.ok()) faulty[r] = result->faulty_rows;
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& s : statuses) REQUIRE(s.ok());
  for (const std::int64_t f : faulty) answer.faulty_rows += f;
  return answer;
}

}  // namespace dcp::testing
