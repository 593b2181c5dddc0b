#include "formats/byte_trie.h"

#include <algorithm>

namespace sqz {
namespace {

bool by_byte(const std::pair<char, int32_t>& child, char byte) {
  return child.first < byte;
}

}  // namespace

void ByteTrie::insert(std::string_view key, int32_t value) {
  int32_t node = 0;
  for (char byte : key) {
    int32_t next = step(node, byte);
    if (next == kNone) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      auto& children = nodes_[static_cast<size_t>(node)].children;
      children.emplace(std::lower_bound(children.begin(), children.end(), byte, by_byte), byte,
                       next);
      if (node == 0) first_[static_cast<unsigned char>(byte)] = next;
    }
    node = next;
  }
  nodes_[static_cast<size_t>(node)].value = value;
}

int32_t ByteTrie::step(int32_t node, char byte) const {
  if (node == 0) return first_[static_cast<unsigned char>(byte)];
  const auto& children = nodes_[static_cast<size_t>(node)].children;
  const auto it = std::lower_bound(children.begin(), children.end(), byte, by_byte);
  return it == children.end() || it->first != byte ? kNone : it->second;
}

ByteTrie::Match ByteTrie::longest(std::string_view text) const {
  Match best;
  int32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    node = step(node, text[i]);
    if (node == kNone) break;
    if (value(node) != kNone) best = {i + 1, value(node)};
  }
  return best;
}

}  // namespace sqz
