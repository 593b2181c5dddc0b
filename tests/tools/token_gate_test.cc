// How many documents a TokenGate lets through at a time.
#include "tools/sqz_index/token_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace sqz {
namespace {

// The most tokens, and documents, that were inside at a time.
std::pair<int64_t, int64_t> most_inside(int64_t limit, const std::vector<int64_t>& tokens) {
  TokenGate gate(limit);
  std::atomic<int64_t> inside{0}, documents{0}, most{0}, most_documents{0};
  const auto raise = [](std::atomic<int64_t>& to, int64_t value) {
    for (int64_t seen = to; seen < value && !to.compare_exchange_weak(seen, value);) {
    }
  };
  {
    std::vector<std::jthread> threads;
    for (const int64_t count : tokens) {
      threads.emplace_back([&, count] {
        for (int i = 0; i < 200; ++i) {
          const TokenGate::Turn turn(gate, count);
          raise(most, inside += count);
          raise(most_documents, ++documents);
          std::this_thread::yield();
          --documents;
          inside -= count;
        }
      });
    }
  }
  return {most, most_documents};
}

TEST(TokenGate, TokensTogetherStayBelowTheLimit) {
  const auto [tokens, documents] = most_inside(10, {6, 4, 5, 3, 10, 1});
  EXPECT_LE(tokens, 10);
  EXPECT_LE(documents, 5);
  // A document above the limit passes alone; without a limit every document does.
  EXPECT_EQ(most_inside(10, {30, 20, 25}).second, 1);
  EXPECT_EQ(most_inside(0, {1, 0, 7, 2}).second, 1);
}

}  // namespace
}  // namespace sqz
