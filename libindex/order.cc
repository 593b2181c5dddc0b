#include "libindex/order.h"

#include <span>

namespace sqz {
namespace {

using Children = std::vector<std::vector<int32_t>>;

Children children_of(const std::vector<int32_t>& parents, size_t clusters) {
  Children children(clusters);
  for (size_t i = 0; i < parents.size(); ++i) {
    children[parents[i]].push_back(static_cast<int32_t>(i));
  }
  return children;
}

// Appends `siblings` to `order` as a chain of nearest neighbours that continues from order.back().
void append_chain(const float* unit, int64_t dim, std::vector<int32_t> siblings,
                  std::vector<int32_t>& order) {
  while (!siblings.empty()) {
    size_t next = 0;
    if (!order.empty()) {
      const float* last = unit + order.back() * dim;
      float best = -2;
      for (size_t s = 0; s < siblings.size(); ++s) {
        const float* candidate = unit + siblings[s] * dim;
        float cosine = 0;
        for (int64_t c = 0; c < dim; ++c) cosine += last[c] * candidate[c];
        if (cosine > best) {
          best = cosine;
          next = s;
        }
      }
    }
    order.push_back(siblings[next]);
    siblings.erase(siblings.begin() + static_cast<int64_t>(next));
  }
}

}  // namespace

SlotOrder depth_first_order(const HeadTree& tree, int64_t dim) {
  const size_t levels = tree.means.size();
  SlotOrder result;
  result.offsets.resize(levels);
  result.means.resize(levels);

  Children groups;  // of the level at hand: siblings, by parent in file order
  for (size_t k = 0; k < levels; ++k) {
    const size_t n = tree.means[k].size() / static_cast<size_t>(dim);
    if (k == 0) {
      groups.resize(1);
      for (size_t i = 0; i < n; ++i) groups[0].push_back(static_cast<int32_t>(i));
    }
    std::vector<float> unit(tree.means[k].size());
    normalise_rows(tree.means[k].data(), static_cast<int64_t>(n), dim, unit.data());
    std::vector<int32_t> order;
    for (std::vector<int32_t>& siblings : groups) {
      append_chain(unit.data(), dim, std::move(siblings), order);
    }
    const Children children = children_of(tree.parents[k], n);
    groups.clear();
    uint32_t first = 0;
    for (int32_t cluster : order) {
      result.offsets[k].push_back(first);
      first += static_cast<uint32_t>(children[cluster].size());
      groups.push_back(children[cluster]);
      const float* mean = tree.means[k].data() + cluster * dim;
      result.means[k].insert(result.means[k].end(), mean, mean + dim);
    }
    result.offsets[k].push_back(first);
  }
  for (const std::vector<int32_t>& members : groups) {
    result.keys.insert(result.keys.end(), members.begin(), members.end());
  }
  return result;
}

std::vector<std::vector<uint32_t>> first_slots(std::span<const std::vector<uint32_t>> offsets) {
  std::vector<std::vector<uint32_t>> slots(offsets.begin(), offsets.end());
  for (size_t k = slots.size(); k-- > 1;) {
    for (uint32_t& first : slots[k - 1]) first = slots[k][first];
  }
  return slots;
}

}  // namespace sqz
