#include "client/workload/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "base/check.h"

namespace dcp {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
// Keep the uses of the hash apart.
constexpr std::uint64_t kLatentDomain = 1;
constexpr std::uint64_t kRowDomain = 2;

// The finalizer of splitmix64.
constexpr std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Uniform in +-sqrt(3), variance 1; one mix gives four values.
void FillUniform(std::uint64_t key, std::span<float> out) {
  constexpr float kStep = 1.7320508f / 32768.0f;
  std::size_t i = 0;
  for (; i + 4 <= out.size(); i += 4) {
    const std::uint64_t bits = Mix(key += kGolden);
    for (std::size_t j = 0; j < 4; ++j) {
      const auto v = static_cast<std::int16_t>(bits >> (16 * j));
      out[i + j] = (static_cast<float>(v) + 0.5f) * kStep;
    }
  }
  const std::uint64_t bits = Mix(key + kGolden);
  for (std::size_t j = 0; i < out.size(); ++i, ++j) {
    out[i] = (static_cast<float>(static_cast<std::int16_t>(bits >> (16 * j))) + 0.5f) * kStep;
  }
}

// All values are finite, so that ToBf16's NaN branch can go and the loop becomes vector code.
void RoundToBf16(std::span<const float> in, std::span<Bf16> out) {
  for (std::size_t i = 0; i < in.size(); ++i) {
    const auto u = std::bit_cast<std::uint32_t>(in[i]);
    out[i].bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
}

double Dot(std::span<const float> a, std::span<const float> b) {
  std::array<float, 8> acc{};
  std::size_t i = 0;
  for (; i + 8 <= a.size(); i += 8) {
    for (std::size_t j = 0; j < 8; ++j) acc[j] += a[i + j] * b[i + j];
  }
  double sum = 0;
  for (const float v : acc) sum += static_cast<double>(v);
  for (; i < a.size(); ++i) sum += static_cast<double>(a[i] * b[i]);
  return sum;
}

// Logits of the chosen tokens, in nats above an average token: p gets log(visible) + margin +-
// jitter + lift, p + 1 and e get so much less.
struct Profile {
  double margin;
  double jitter;
  double next_below;
  double earlier_below;
};
// Few dims hold no three strong logits beside thousands of quiet ones; there the weights are
// smaller and more alike.
constexpr Profile kManyDims = {1.0, 0.3, 0.0, 1.6};
constexpr Profile kFewDims = {-0.4, 0.1, 0.8, 0.8};
constexpr int kManyDimsFrom = 128;
constexpr double kNoise = 0.1;
// Beyond this the dims are too few for the length, and a fixed point may not exist.
constexpr double kMaxLift = 12.0;

// Solves the symmetric positive definite 3 x 3 system g x = y by Cholesky.
std::array<double, 3> Solve(const std::array<std::array<double, 3>, 3>& g,
                            std::array<double, 3> x) {
  std::array<std::array<double, 3>, 3> l{};
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = g[i][j];
      for (std::size_t k = 0; k < j; ++k) sum -= l[i][k] * l[j][k];
      l[i][j] = i == j ? std::sqrt(sum) : sum / l[j][j];
    }
  }
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t k = 0; k < i; ++k) x[i] -= l[i][k] * x[k];
    x[i] /= l[i][i];
  }
  for (std::size_t i = 3; i-- > 0;) {
    for (std::size_t k = i + 1; k < 3; ++k) x[i] -= l[k][i] * x[k];
    x[i] /= l[i][i];
  }
  return x;
}

// The weights of (last, next, earlier) in the query, times softmax_scale, by their Gram matrix;
// `base` is the logit of last without lift.
//
// Any other latent meets the query with an about normal logit of variance |query|^2, which lifts
// the mean weight of the others to e^(variance / 2). In few dims that is much, above all where the
// three latents point apart, and the logits have to grow by it: a fixed point, reached from below.
std::array<double, 3> ChooseWeights(const std::array<std::array<double, 3>, 3>& gram,
                                    bool has_earlier, double base, const Profile& profile) {
  const double present = has_earlier ? 1.0 : 0.0;
  const std::array<double, 3> below = {0, profile.next_below, profile.earlier_below * present};
  const std::array<double, 3> up = Solve(gram, {1, 1, present});
  const std::array<double, 3> down = Solve(gram, below);
  // |query|^2 for the logits x - below is u x^2 - 2 v x + w.
  const double u = up[0] + up[1] + up[2] * present;
  const double v = down[0] + down[1] + down[2] * present;
  const double w = down[1] * below[1] + down[2] * below[2];
  double x = base;
  for (int i = 0; i < 16; ++i) {
    const double variance = u * x * x - 2 * v * x + w + kNoise * kNoise;
    x = base + std::min(kMaxLift, variance / 2);
  }
  return {x * up[0] - down[0], x * up[1] - down[1], x * up[2] - down[2]};
}

}  // namespace

Content::Content(std::uint64_t tail, const std::vector<Segment>& segments) : tail_(tail) {
  std::int64_t end = 0;
  for (const Segment& s : segments) {
    DCP_CHECK(s.tokens >= 0);
    if (s.tokens == 0) continue;
    contents_.push_back(s.content);
    ends_.push_back(end += s.tokens);
  }
}

TokenKey Content::At(std::int64_t position) const {
  DCP_CHECK(position >= 0);
  const auto it = std::upper_bound(ends_.begin(), ends_.end(), position);
  const std::int64_t begin = it == ends_.begin() ? 0 : *(it - 1);
  if (it == ends_.end()) return {tail_, position - begin};
  return {contents_[static_cast<std::size_t>(it - ends_.begin())], position - begin};
}

std::uint64_t HashWords(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t h = Mix(a + kGolden);
  h = Mix((h ^ b) + kGolden);
  h = Mix((h ^ c) + kGolden);
  return Mix((h ^ d) + kGolden);
}

double UnitInterval(std::uint64_t hash) { return static_cast<double>(hash >> 11) * 0x1p-53; }

void Synthetic::Latent(TokenKey token, int layer, std::span<Bf16> out) const {
  const auto d = static_cast<std::size_t>(geometry_.d_qk);
  DCP_CHECK(out.size() == d);
  const std::uint64_t key =
      HashWords(seed_, token.content, static_cast<std::uint64_t>(token.offset),
                kLatentDomain << 32 | static_cast<std::uint64_t>(layer));
  constexpr std::size_t kTile = 64;  // a multiple of 4, so that tiles cut no mix in two
  std::array<float, kTile> tile;
  for (std::size_t i = 0; i < d; i += kTile) {
    const std::span<float> values(tile.data(), std::min(kTile, d - i));
    FillUniform(key + i / 4 * kGolden, values);
    RoundToBf16(values, out.subspan(i, values.size()));
  }
}

void Synthetic::Latents(const Content& content, int layer, std::int64_t begin,
                        std::span<Bf16> out) const {
  const auto d = static_cast<std::size_t>(geometry_.d_qk);
  DCP_CHECK(out.size() % d == 0);
  for (std::size_t i = 0; i < out.size() / d; ++i) {
    Latent(content.At(begin + static_cast<std::int64_t>(i)), layer, out.subspan(i * d, d));
  }
}

std::uint64_t Synthetic::RowKey(const Content& content, int layer, std::int64_t position,
                                int head) const {
  const TokenKey token = content.At(position);
  return HashWords(HashWords(seed_, token.content, static_cast<std::uint64_t>(token.offset),
                             kRowDomain << 32 | static_cast<std::uint64_t>(layer)),
                   static_cast<std::uint64_t>(position), static_cast<std::uint64_t>(head));
}

std::int64_t Synthetic::EarlierToken(const Content& content, int layer, std::int64_t position,
                                     int head) const {
  if (position == 0) return -1;
  const std::uint64_t hash = HashWords(RowKey(content, layer, position, head), 1);
  return std::min(static_cast<std::int64_t>(UnitInterval(hash) * static_cast<double>(position)),
                  position - 1);
}

void Synthetic::Queries(const Content& content, int layer, std::int64_t position,
                        std::span<Bf16> out) const {
  Heads(content, layer, position, 0, geometry_.heads, out);
}

void Synthetic::Query(const Content& content, int layer, std::int64_t position, int head,
                      std::span<Bf16> out) const {
  Heads(content, layer, position, head, 1, out);
}

void Synthetic::Heads(const Content& content, int layer, std::int64_t position, int head_begin,
                      int head_count, std::span<Bf16> out) const {
  const auto d = static_cast<std::size_t>(geometry_.d_qk);
  DCP_CHECK(out.size() == d * static_cast<std::size_t>(head_count));
  std::vector<Bf16> raw(d);
  std::vector<float> last(d), next(d), earlier(d), query(d);
  const auto load = [&](std::int64_t p, std::vector<float>& to) {
    Latent(content.At(p), layer, raw);
    for (std::size_t i = 0; i < d; ++i) to[i] = ToFloat(raw[i]);
  };
  load(position, last);
  load(position + 1, next);
  // A small ridge keeps the system solvable where a sequence repeats one content.
  const double ridge = 1e-6 * static_cast<double>(d);
  std::array<std::array<double, 3>, 3> gram{};  // last, next, earlier
  gram[0][0] = Dot(last, last) + ridge;
  gram[1][1] = Dot(next, next) + ridge;
  gram[1][0] = gram[0][1] = Dot(last, next);

  const Profile& profile = geometry_.d_qk >= kManyDimsFrom ? kManyDims : kFewDims;
  const double scale = geometry_.softmax_scale;
  const double noise = kNoise / (scale * std::sqrt(static_cast<double>(d)));
  for (int h = 0; h < head_count; ++h) {
    const int head = head_begin + h;
    const std::uint64_t key = RowKey(content, layer, position, head);
    const double jitter = profile.jitter * (2 * UnitInterval(HashWords(key, 2)) - 1);
    const std::int64_t e = EarlierToken(content, layer, position, head);
    if (e >= 0) {
      load(e, earlier);
      gram[2][2] = Dot(earlier, earlier) + ridge;
      gram[2][0] = gram[0][2] = Dot(earlier, last);
      gram[2][1] = gram[1][2] = Dot(earlier, next);
    } else {
      std::fill(earlier.begin(), earlier.end(), 0.0f);
      gram[2] = {0, 0, 1};
      gram[0][2] = gram[1][2] = 0;
    }
    const double base = std::log(static_cast<double>(position + 1)) + profile.margin + jitter;
    const std::array<double, 3> weight = ChooseWeights(gram, e >= 0, base, profile);
    const auto a = static_cast<float>(weight[0] / scale);
    const auto b = static_cast<float>(weight[1] / scale);
    const auto c = static_cast<float>(weight[2] / scale);
    const auto n = static_cast<float>(noise);
    FillUniform(HashWords(key, 3), query);
    for (std::size_t i = 0; i < d; ++i) {
      query[i] = n * query[i] + a * last[i] + b * next[i] + c * earlier[i];
    }
    RoundToBf16(query, out.subspan(static_cast<std::size_t>(h) * d, d));
  }
}

}  // namespace dcp
