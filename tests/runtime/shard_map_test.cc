// The shard map against brute force: deal tokens one by one and count.
#include "runtime/shard_map.h"

#include <catch2/catch.hpp>
#include <vector>

namespace dcp {
namespace {

constexpr int kInterleaves[] = {1, 2, 3, 4, 16, 64};
constexpr int kMaxLength = 300;

// owners[p] and locals[p] by dealing runs of `interleave` tokens to ranks in turn.
struct Dealt {
  std::vector<int> owners;
  std::vector<std::int64_t> locals;
};
Dealt Deal(int ranks, int interleave, int length) {
  Dealt dealt;
  std::vector<std::int64_t> held(static_cast<std::size_t>(ranks), 0);
  int rank = 0;
  int run = 0;
  for (int p = 0; p < length; ++p) {
    if (run == interleave) {
      rank = (rank + 1) % ranks;
      run = 0;
    }
    ++run;
    dealt.owners.push_back(rank);
    dealt.locals.push_back(held[static_cast<std::size_t>(rank)]++);
  }
  return dealt;
}

}  // namespace

TEST_CASE("owner, local position and the inverse equal dealing one by one") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int interleave : kInterleaves) {
      const ShardMap map(ranks, interleave, interleave * 2);
      const Dealt dealt = Deal(ranks, interleave, 2000);
      for (int p = 0; p < 2000; ++p) {
        const GlobalPos pos(p);
        const auto at = static_cast<std::size_t>(p);
        REQUIRE(map.Owner(pos).value() == dealt.owners[at]);
        REQUIRE(map.Local(pos).value() == dealt.locals[at]);
        REQUIRE(map.Global(map.Owner(pos), map.Local(pos)) == pos);
      }
    }
  }
}

TEST_CASE("local lengths and causal bounds equal counting") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int interleave : kInterleaves) {
      const ShardMap map(ranks, interleave, interleave);
      const Dealt dealt = Deal(ranks, interleave, kMaxLength + 8);
      std::vector<std::int64_t> count(static_cast<std::size_t>(ranks), 0);  // of tokens [0, length)
      for (int length = 0; length <= kMaxLength + 8; ++length) {
        for (int r = 0; r < ranks; ++r) {
          const std::int64_t want = count[static_cast<std::size_t>(r)];
          REQUIRE(map.LocalLength(Tokens(length), Rank(r)).value() == want);
          // Query j of an entry of `n` tokens that ends at `length` and starts at length - n.
          for (int n = 1; n <= 8 && n <= length; ++n) {
            REQUIRE(map.CausalBound(GlobalPos(length - n), n - 1, Rank(r)).value() == want);
          }
          for (int j = 0; j < 8 && j < length; ++j) {
            REQUIRE(map.CausalBound(GlobalPos(length - 1 - j), j, Rank(r)).value() == want);
          }
        }
        if (length < kMaxLength + 8) {
          ++count[static_cast<std::size_t>(dealt.owners[static_cast<std::size_t>(length)])];
        }
      }
    }
  }
}

TEST_CASE("a block is one page on every rank") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int interleave : kInterleaves) {
      for (const int pages : {1, 2, 5}) {
        const ShardMap map(ranks, interleave, interleave * pages);
        const Dealt dealt = Deal(ranks, interleave, 2000);
        for (int p = 0; p < 2000; ++p) {
          const GlobalPos pos(p);
          const std::int64_t local = dealt.locals[static_cast<std::size_t>(p)];
          REQUIRE(map.Block(pos) == p / (interleave * pages * ranks));
          REQUIRE(map.Block(pos) == local / (interleave * pages));
          REQUIRE(map.SlotInPage(pos) == local % (interleave * pages));
          REQUIRE(map.Blocks(Tokens(p + 1)) == map.Block(pos) + 1);
        }
        REQUIRE(map.Blocks(Tokens(0)) == 0);
      }
    }
  }
}

TEST_CASE("the map is constexpr and checks its rules") {
  constexpr ShardMap kMap(3, 2, 4);
  STATIC_REQUIRE(kMap.Owner(GlobalPos(7)).value() == 0);
  STATIC_REQUIRE(kMap.Local(GlobalPos(7)).value() == 3);
  CHECK(ShardMap::Check(6, 3, 48).ok());
  CHECK(ShardMap::Check(0, 1, 1).reason() == Reason::kConfig);
  CHECK(ShardMap::Check(2, 0, 16).reason() == Reason::kConfig);
  CHECK(ShardMap::Check(2, 3, 16).reason() == Reason::kConfig);  // a run would cross pages
  CHECK(ShardMap::Check(2, 32, 16).reason() == Reason::kConfig);
}

}  // namespace dcp
