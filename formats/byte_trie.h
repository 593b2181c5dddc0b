// A trie over bytes, with a number for each key.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace sqz {

class ByteTrie {
 public:
  static constexpr int32_t kNone = -1;

  ByteTrie() { first_.fill(kNone); }

  // `value` >= 0. A later value of the same key replaces it.
  void insert(std::string_view key, int32_t value);
  bool empty() const { return nodes_.size() == 1; }

  // The node behind `node` (0 is the root) by `byte`, or kNone.
  int32_t step(int32_t node, char byte) const;
  // The number of the key that ends at `node`, or kNone.
  int32_t value(int32_t node) const { return nodes_[static_cast<size_t>(node)].value; }

  struct Match {
    size_t length = 0;
    int32_t value = kNone;  // kNone: no key
  };
  // The longest key that `text` begins with.
  Match longest(std::string_view text) const;

 private:
  struct Node {
    std::vector<std::pair<char, int32_t>> children;  // sorted by byte
    int32_t value = kNone;
  };
  std::vector<Node> nodes_{Node{}};
  std::array<int32_t, 256> first_;  // the root's children
};

}  // namespace sqz
