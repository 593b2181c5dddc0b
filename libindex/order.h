// Slot order: the order in which the keys of one KV head are stored.
//
// Clusters are numbered depth-first along the tree, so that every cluster of every level is one run
// of slots. Among siblings, the next cluster is the one most similar to the last (a greedy chain by
// cosine of the centroids; it starts at k-means' number 0): clusters that a query
// selects together then tend to be neighbours, and their runs merge. Keys of one finest cluster are
// by position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libindex/tree.h"

namespace sqz {

// Cluster numbers here are those of the file, not those of HeadTree.
struct SlotOrder {
  // offsets[k]: [n_k + 1], first child of each cluster at the level below, or its first slot at the
  // finest level. The children of cluster i are offsets[k][i] .. offsets[k][i + 1] - 1, never none.
  std::vector<std::vector<uint32_t>> offsets;
  std::vector<std::vector<float>> means;  // those of HeadTree
  std::vector<uint32_t> keys;  // [M] the key (0 .. M-1) that each slot holds: a permutation
};

SlotOrder depth_first_order(const HeadTree& tree, int64_t dim);

// first_slots[k]: [n_k + 1], the first slot below each cluster of level k + 1. From the offsets of
// one head, coarse to fine.
std::vector<std::vector<uint32_t>> first_slots(std::span<const std::vector<uint32_t>> offsets);

}  // namespace sqz
