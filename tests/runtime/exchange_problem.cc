#include "tests/runtime/exchange_problem.h"

#include <cstring>

#include "base/bf16.h"

namespace dcp::testing {
namespace {

void Store(std::byte* to, float x, DType dtype) {
  const Bf16 half = ToBf16(x);
  std::memcpy(to, dtype == DType::kBf16 ? static_cast<const void*>(&half) : &x, SizeOf(dtype));
}

}  // namespace

void FillPartials(const Problem& p, std::size_t r, const PartialLayout& layout) {
  const auto d_v = static_cast<std::size_t>(p.shape.d_v);
  const int group_heads = layout.heads_per_group;
  for (int t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < p.shape.heads; ++h) {
      const std::int64_t in_group = t * group_heads + h % group_heads;
      std::byte* out =
          layout.out + (h / group_heads) * layout.out_group_stride +
          in_group * p.shape.d_v * static_cast<std::int64_t>(SizeOf(p.shape.partial_dtype));
      for (std::size_t i = 0; i < d_v; ++i) {
        Store(out + i * SizeOf(p.shape.partial_dtype), p.out[r][p.Row(t, h) * d_v + i],
              p.shape.partial_dtype);
      }
      std::memcpy(layout.lse + (h / group_heads) * layout.lse_group_stride + in_group * 4,
                  &p.lse[r][p.Row(t, h)], 4);
    }
  }
}

}  // namespace dcp::testing
