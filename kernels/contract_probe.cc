#include "kernels/contract_probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#if defined(DCP_WITH_CUDA)
#include "kernels/staged_attention.h"
#endif

namespace dcp {
namespace {

// What buffers hold before a run. As an LSE the value is believable, so a backend that leaves it
// there is caught by its bits and not by luck.
constexpr float kLseJunk = 7.40625f;
constexpr std::byte kOutJunk{0x4b};
constexpr std::int64_t kPadBytes = 64;  // between head groups; nobody may write there
constexpr double kLseTolerance = 1e-4;

enum class Keys { kIdentical, kDistinct };

// Entries of query tokens, each with the number of keys it sees.
using Bounds = std::vector<std::vector<int>>;

// Any fixed sequence will do; it only has to differ from dim to dim and key to key.
class Noise {
 public:
  float Next() {  // in [-1, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_ = 20260131;
};

// Inputs of one run and buffers for one result.
struct Problem {
  AttentionGeometry geometry;
  int tokens = 0;
  int heads_per_group = 0;
  int table_stride = 0;
  std::vector<std::int32_t> entry_begin;
  std::vector<std::int32_t> bound;
  std::vector<std::int32_t> table;
  std::vector<Bf16> query;
  std::vector<Bf16> kv;
};

struct Buffers {
  DType dtype;
  std::int64_t out_stride;
  std::int64_t lse_stride;
  std::vector<std::byte> out;
  std::vector<std::byte> lse;
};

// A dim of the one key of kIdentical; the queries share its sign in every dim, which puts their
// scores, and with them all LSEs, far from 0, where the bases differ most.
Bf16 CommonKeyDim(int i) { return ToBf16((i * 7 % 11 < 5 ? -0.5f : 0.5f) * (1 + i % 3)); }

Problem MakeProblem(const AttentionGeometry& geometry, const Bounds& bounds, Keys kind) {
  Problem p{.geometry = geometry};
  const int page_tokens = geometry.page_tokens;
  int most = 0;
  int pages = 1;  // page 0 is all NaN
  for (const std::vector<int>& entry : bounds) {
    p.entry_begin.push_back(p.tokens);
    for (const int b : entry) p.bound.push_back(b);
    p.tokens += static_cast<int>(entry.size());
    most = std::max(most, *std::max_element(entry.begin(), entry.end()));
  }
  p.entry_begin.push_back(p.tokens);
  p.table_stride = (most + page_tokens - 1) / page_tokens + 1;
  p.heads_per_group = geometry.heads % 2 == 0 ? geometry.heads / 2 : geometry.heads;

  for (const std::vector<int>& entry : bounds) {
    const int keys = *std::max_element(entry.begin(), entry.end());
    for (int i = 0; i < p.table_stride; ++i) {
      // Past the end of the entry the table names the NaN page: reading it shows and does not
      // crash.
      p.table.push_back(i * page_tokens < keys ? pages++ : 0);
    }
  }
  const auto d_qk = static_cast<std::size_t>(geometry.d_qk);
  p.kv.assign(pages * page_tokens * d_qk, kBf16NaN);
  Noise noise;
  for (std::size_t e = 0; e < bounds.size(); ++e) {
    const int keys = *std::max_element(bounds[e].begin(), bounds[e].end());
    for (int k = 0; k < keys; ++k) {
      const std::int32_t page = p.table[e * p.table_stride + k / page_tokens];
      Bf16* const key = p.kv.data() + (page * page_tokens + k % page_tokens) * d_qk;
      for (int i = 0; i < geometry.d_qk; ++i) {
        const float base = ToFloat(CommonKeyDim(i));
        key[i] = kind == Keys::kIdentical ? CommonKeyDim(i) : ToBf16(base + noise.Next());
      }
    }
  }
  double norm = 0;
  for (int i = 0; i < geometry.d_qk; ++i) norm += std::fabs(ToFloat(CommonKeyDim(i)));
  p.query.reserve(static_cast<std::size_t>(p.tokens) * geometry.heads * d_qk);
  for (int t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < geometry.heads; ++h) {
      const double score = 6 + (t + 3 * h) % 8;
      const auto size = static_cast<float>(score / (geometry.softmax_scale * norm));
      for (int i = 0; i < geometry.d_qk; ++i) {
        const float dim = std::copysign(size, ToFloat(CommonKeyDim(i)));
        p.query.push_back(ToBf16(kind == Keys::kIdentical ? dim : dim * (1 + noise.Next() / 4)));
      }
    }
  }
  return p;
}

Buffers MakeBuffers(const Problem& p, DType dtype) {
  const int groups = p.geometry.heads / p.heads_per_group;
  const std::int64_t rows = std::int64_t{p.tokens} * p.heads_per_group;
  Buffers b{.dtype = dtype};
  b.out_stride = rows * p.geometry.d_v * static_cast<std::int64_t>(SizeOf(dtype)) + kPadBytes;
  b.lse_stride = rows * 4 + kPadBytes;
  b.out.assign(static_cast<std::size_t>(groups * b.out_stride), kOutJunk);
  b.lse.resize(static_cast<std::size_t>(groups * b.lse_stride));
  for (std::size_t i = 0; i < b.lse.size(); i += 4) {
    std::memcpy(b.lse.data() + i, &kLseJunk, sizeof(kLseJunk));
  }
  return b;
}

Status RunOn(AttentionBackend& backend, const Problem& p, Buffers& b) {
  return backend.Run({.query = p.query.data(),
                      .kv = p.kv.data(),
                      .page_stride = std::int64_t{p.geometry.page_tokens} * p.geometry.d_qk,
                      .entry_begin = p.entry_begin.data(),
                      .block_table = p.table.data(),
                      .block_table_stride = p.table_stride,
                      .bound = p.bound.data(),
                      .entries = static_cast<int>(p.entry_begin.size()) - 1,
                      .tokens = p.tokens,
                      .partial = {.out = b.out.data(),
                                  .lse = b.lse.data(),
                                  .out_group_stride = b.out_stride,
                                  .lse_group_stride = b.lse_stride,
                                  .heads_per_group = p.heads_per_group}});
}

std::int64_t RowInGroup(const Problem& p, int t, int h) {
  return std::int64_t{t} * p.heads_per_group + h % p.heads_per_group;
}

float LseAt(const Problem& p, const Buffers& b, int t, int h) {
  float lse;
  std::memcpy(&lse, b.lse.data() + h / p.heads_per_group * b.lse_stride + RowInGroup(p, t, h) * 4,
              sizeof(lse));
  return lse;
}

const std::byte* OutAt(const Problem& p, const Buffers& b, int t, int h) {
  return b.out.data() + h / p.heads_per_group * b.out_stride +
         RowInGroup(p, t, h) * p.geometry.d_v * static_cast<std::int64_t>(SizeOf(b.dtype));
}

std::vector<float> OutRow(const Problem& p, const Buffers& b, int t, int h) {
  std::vector<float> row(static_cast<std::size_t>(p.geometry.d_v));
  const std::byte* const from = OutAt(p, b, t, h);
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (b.dtype == DType::kBf16) {
      Bf16 x;
      std::memcpy(&x, from + i * sizeof(x), sizeof(x));
      row[i] = ToFloat(x);
    } else {
      std::memcpy(&row[i], from + i * sizeof(float), sizeof(float));
    }
  }
  return row;
}

// Compares one backend with its declaration, problem by problem.
class Prober {
 public:
  Prober(const BackendEntry& entry, const BackendSetup& setup, AttentionBackend& backend)
      : entry_(entry), setup_(setup), backend_(backend) {}

  Status Probe() {
    const int page_tokens = setup_.geometry.page_tokens;
    const int two_pages = page_tokens + 1;
    DCP_RETURN_IF_ERROR(Check({{two_pages}}, Keys::kIdentical));
    DCP_RETURN_IF_ERROR(Check({{0}}, Keys::kIdentical));
    DCP_RETURN_IF_ERROR(Check({{1}}, Keys::kIdentical));
    DCP_RETURN_IF_ERROR(Check({{3}}, Keys::kDistinct));
    if (setup_.max_tokens >= 2 && entry_.caps.max_query_tokens >= 2) {
      DCP_RETURN_IF_ERROR(Check({{2, 3}}, Keys::kDistinct));
    }
    if (setup_.max_tokens >= 3) {
      DCP_RETURN_IF_ERROR(Check({{two_pages}, {0}, {3}}, Keys::kDistinct));
    }
    return Status::Ok();
  }

 private:
  Status Check(const Bounds& bounds, Keys kind) {
    const Problem p = MakeProblem(setup_.geometry, bounds, kind);
    Buffers got = MakeBuffers(p, setup_.geometry.partial_dtype);
    DCP_RETURN_IF_ERROR(RunOn(backend_, p, got));
    Buffers reference;
    if (kind == Keys::kDistinct) {
      DCP_RETURN_IF_ERROR(RunReference(p, reference));
      if (reference.out.empty()) return Status::Ok();
    }
    DCP_RETURN_IF_ERROR(CheckPadding(p, got));
    for (int t = 0; t < p.tokens; ++t) {
      for (int h = 0; h < p.geometry.heads; ++h) {
        if (p.bound[t] == 0) {
          DCP_RETURN_IF_ERROR(CheckEmpty(p, got, t, h));
          continue;
        }
        double lse = 0;  // base e
        std::vector<float> out;
        if (kind == Keys::kIdentical) {
          ClosedForm(p, t, h, lse, out);
        } else {
          lse = LseAt(p, reference, t, h);
          out = OutRow(p, reference, t, h);
        }
        DCP_RETURN_IF_ERROR(CheckLse(p, got, t, h, lse));
        DCP_RETURN_IF_ERROR(CheckOut(p, got, t, h, out));
      }
    }
    return Status::Ok();
  }

  // All keys are one key: its score plus log(count), and its value.
  static void ClosedForm(const Problem& p, int t, int h, double& lse, std::vector<float>& out) {
    const AttentionGeometry& g = p.geometry;
    const Bf16* const query = p.query.data() + (std::int64_t{t} * g.heads + h) * g.d_qk;
    double dot = 0;
    for (int i = 0; i < g.d_qk; ++i) dot += double{ToFloat(query[i])} * ToFloat(CommonKeyDim(i));
    lse = g.softmax_scale * dot + std::log(p.bound[t]);
    for (int i = 0; i < g.d_v; ++i) out.push_back(ToFloat(CommonKeyDim(i)));
  }

  // Leaves `b` empty where cpu_reference itself is probed or cannot serve: the closed form remains.
  Status RunReference(const Problem& p, Buffers& b) {
    constexpr std::string_view kName = "cpu_reference";
    BackendSetup setup = setup_;
    setup.geometry.partial_dtype = DType::kF32;
    const Result<const BackendEntry*> entry =
        SelectBackend(Backends(), kName, setup.geometry, Arch::kHost);
    if (!entry.ok() || entry_.name == kName) return Status::Ok();
    DCP_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionBackend> reference, (*entry)->make(setup));
    b = MakeBuffers(p, DType::kF32);
    return RunOn(*reference, p, b);
  }

  Status CheckPadding(const Problem& p, const Buffers& b) const {
    for (int g = 0; g < p.geometry.heads / p.heads_per_group; ++g) {
      const auto out_end = b.out.begin() + (g + 1) * b.out_stride;
      const bool out_clean =
          std::all_of(out_end - kPadBytes, out_end, [](std::byte x) { return x == kOutJunk; });
      bool lse_clean = true;
      for (std::int64_t i = (g + 1) * b.lse_stride - kPadBytes; i < (g + 1) * b.lse_stride;
           i += 4) {
        float lse;
        std::memcpy(&lse, b.lse.data() + i, sizeof(lse));
        lse_clean &= lse == kLseJunk;
      }
      if (!out_clean || !lse_clean) return Broken("writes outside its rows");
    }
    return Status::Ok();
  }

  Status CheckEmpty(const Problem& p, const Buffers& b, int t, int h) const {
    const float lse = LseAt(p, b, t, h);
    const float mark = EmptyMarkValue(entry_.caps.empty_mark);
    if (lse == mark) return Status::Ok();
    if (lse == kLseJunk) return Broken("does not write the LSE of a row with no keys");
    return Broken("writes LSE " + std::to_string(lse) + " for a row with no keys");
  }

  Status CheckLse(const Problem& p, const Buffers& b, int t, int h, double base_e) const {
    const float lse = LseAt(p, b, t, h);
    const double base_two = base_e * kLog2E;
    const bool declared_e = entry_.caps.lse_base == LogBase::kE;
    const double expected = declared_e ? base_e : base_two;
    const double other = declared_e ? base_two : base_e;
    if (Near(lse, expected)) return Status::Ok();
    const std::string where = " (row sees " + std::to_string(p.bound[t]) + " keys, head " +
                              std::to_string(h) + "), expected " + std::to_string(expected);
    if (lse == kLseJunk) return Broken("does not write the LSE");
    if (std::isnan(lse)) return Broken("writes LSE NaN: it reads keys beyond the bound" + where);
    const std::string value = "writes LSE " + std::to_string(lse);
    if (Near(lse, other)) {
      const LogBase wrote = declared_e ? LogBase::kTwo : LogBase::kE;
      return Broken(value + ", which is base " + std::string(LogBaseName(wrote)) + where);
    }
    return Broken(value + where);
  }

  Status CheckOut(const Problem& p, const Buffers& b, int t, int h,
                  const std::vector<float>& expected) const {
    const std::vector<float> out = OutRow(p, b, t, h);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double diff = double{out[i]} - expected[i];
      error += diff * diff;
      norm += double{expected[i]} * expected[i];
    }
    // Device backends round weights to bf16, whatever they write.
    const bool rounded = b.dtype == DType::kBf16 || entry_.caps.arch == Arch::kCuda;
    const double limit = rounded ? 8e-3 : 1e-4;
    if (std::sqrt(error) <= limit * std::sqrt(norm)) return Status::Ok();  // false for NaN
    const std::string where =
        " (row sees " + std::to_string(p.bound[t]) + " keys, head " + std::to_string(h) + ")";
    if (std::isnan(error)) return Broken("writes NaN: it reads values beyond the bound" + where);
    return Broken("writes a wrong output, relative error " +
                  std::to_string(std::sqrt(error / norm)) + where);
  }

  static bool Near(float lse, double expected) {
    return std::fabs(lse - expected) <= kLseTolerance * std::max(1.0, std::fabs(expected));
  }

  Status Broken(const std::string& did) const {
    return Status(Reason::kBackendContract,
                  "attention backend " + std::string(entry_.name) + " declares LSE base " +
                      std::string(LogBaseName(entry_.caps.lse_base)) + " and empty mark " +
                      std::string(EmptyMarkName(entry_.caps.empty_mark)) + ", but " + did);
  }

  const BackendEntry& entry_;
  const BackendSetup& setup_;
  AttentionBackend& backend_;
};

}  // namespace

Status ProbeContract(const BackendEntry& entry, const BackendSetup& setup,
                     AttentionBackend& backend) {
#if defined(DCP_WITH_CUDA)
  if (entry.caps.arch == Arch::kCuda) {
    StagedAttention staged(backend, setup);
    return Prober(entry, setup, staged).Probe();
  }
#endif
  return Prober(entry, setup, backend).Probe();
}

}  // namespace dcp
