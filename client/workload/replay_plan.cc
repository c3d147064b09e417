#include "client/workload/replay_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace dcp {
namespace {

// Content ids of blocks and of requests must not meet.
constexpr std::uint64_t kBlockContent = 0x626c6f636bu;
constexpr std::uint64_t kRequestContent = 0x72657175u;

struct Node {
  int parent = -1;
  std::uint64_t hash = 0;
  int depth = 0;  // blocks from the root
  int users = 0;
  int max_child_users = 0;
  std::int64_t length = 0;  // tokens of the longest user within these blocks
  int prefix = -1;          // its PrefixPlan
};

// The hash chains of all requests; node 0 is the empty chain, children follow their parents.
class Trie {
 public:
  Trie() : nodes_(1) {}

  // Returns the node of the whole chain.
  int Add(const std::vector<std::uint64_t>& chain, std::int64_t input, std::int64_t block_tokens) {
    int at = 0;
    ++nodes_[0].users;
    for (const std::uint64_t hash : chain) {
      const std::int64_t begin = nodes_[Index(at)].depth * block_tokens;
      if (begin >= input) break;  // scaling rounded the last block away
      auto [it, fresh] = children_.try_emplace({at, hash}, static_cast<int>(nodes_.size()));
      if (fresh)
        nodes_.push_back({.parent = at, .hash = hash, .depth = nodes_[Index(at)].depth + 1});
      at = it->second;
      Node& node = nodes_[Index(at)];
      ++node.users;
      node.length = std::max(node.length, std::min(begin + block_tokens, input));
      Node& parent = nodes_[Index(node.parent)];
      parent.max_child_users = std::max(parent.max_child_users, node.users);
    }
    return at;
  }

  Node& at(int index) { return nodes_[Index(index)]; }
  int size() const { return static_cast<int>(nodes_.size()); }

 private:
  static std::size_t Index(int i) { return static_cast<std::size_t>(i); }
  std::vector<Node> nodes_;
  std::map<std::pair<int, std::uint64_t>, int> children_;
};

std::vector<Segment> ChainSegments(Trie& trie, int node, std::int64_t block_tokens) {
  std::vector<Segment> segments;
  for (; node != 0; node = trie.at(node).parent) {
    segments.push_back({HashWords(kBlockContent, trie.at(node).hash), block_tokens});
  }
  std::reverse(segments.begin(), segments.end());
  return segments;
}

// The nearest node upwards, itself included, that has a prefix sequence; 0: none.
int NearestPrefix(Trie& trie, int node) {
  while (node != 0 && trie.at(node).prefix < 0) node = trie.at(node).parent;
  return node;
}

}  // namespace

double ReplayPlan::SharedShare() const {
  return input_tokens == 0
             ? 0
             : static_cast<double>(shared_input_tokens) / static_cast<double>(input_tokens);
}

ReplayPlan PlanReplay(const std::vector<TraceRow>& rows, const LengthScale& scale) {
  const std::int64_t block_tokens = scale.block_tokens();
  ReplayPlan plan;
  Trie trie;
  std::vector<int> ends;
  ends.reserve(rows.size());
  for (const TraceRow& row : rows) {
    ends.push_back(trie.Add(row.hash_ids, scale.Apply(row.input_length), block_tokens));
  }

  // A shared node is a prefix unless one child has all its users: then that child says it better.
  for (int i = 1; i < trie.size(); ++i) {
    Node& node = trie.at(i);
    if (node.users < 2 || node.max_child_users == node.users) continue;
    PrefixPlan prefix;
    prefix.length = node.length;
    prefix.users = node.users;
    prefix.content = Content(0, ChainSegments(trie, i, block_tokens));
    const int above = NearestPrefix(trie, node.parent);
    if (above != 0) {
      prefix.parent = trie.at(above).prefix;
      const PrefixPlan& parent = plan.prefixes[static_cast<std::size_t>(prefix.parent)];
      prefix.fork_length = parent.length;
      prefix.depth = parent.depth + 1;
    }
    node.prefix = static_cast<int>(plan.prefixes.size());
    plan.shared_input_tokens -= prefix.length - prefix.fork_length;
    plan.prefixes.push_back(std::move(prefix));
  }

  for (std::size_t i = 0; i < rows.size(); ++i) {
    RequestPlan request;
    request.index = static_cast<int>(i);
    request.start_ms = rows[i].timestamp_ms;
    request.input = scale.Apply(rows[i].input_length);
    request.output = scale.Apply(rows[i].output_length);
    std::vector<Segment> segments = ChainSegments(trie, ends[i], block_tokens);
    if (!segments.empty()) {
      const std::int64_t before = static_cast<std::int64_t>(segments.size() - 1) * block_tokens;
      segments.back().tokens = std::min(block_tokens, request.input - before);
    }
    request.content = Content(HashWords(kRequestContent, i), segments);
    const int node = NearestPrefix(trie, ends[i]);
    if (node != 0) {
      request.prefix = trie.at(node).prefix;
      const PrefixPlan& prefix = plan.prefixes[static_cast<std::size_t>(request.prefix)];
      request.fork_length = std::min(prefix.length, request.input - 1);
      if (request.fork_length > 0) plan.fork_depth = std::max(plan.fork_depth, prefix.depth + 1);
    }
    plan.input_tokens += request.input;
    plan.output_tokens += request.output;
    plan.shared_input_tokens += request.fork_length;
    plan.requests.push_back(std::move(request));
  }
  std::stable_sort(
      plan.requests.begin(), plan.requests.end(),
      [](const RequestPlan& a, const RequestPlan& b) { return a.start_ms < b.start_ms; });
  return plan;
}

}  // namespace dcp
