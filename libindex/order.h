// Slot order: the order in which the keys of one KV head are stored.
//
// Clusters are numbered depth-first along the tree, so every cluster of every level is one run of
// slots. Siblings form a greedy chain: the next cluster is the most similar one to the last, by the
// cosine of the centroids, and the first is number 0 of k-means. So clusters that a query selects
// together tend to be neighbours, and their runs merge. Keys of a finest cluster are in token
// order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libindex/tree.h"

namespace sqz {

// Cluster numbers here are those of the file, not those of HeadTree.
struct SlotOrder {
  // offsets[k]: [n_k + 1], the first child of each cluster: a cluster of the level below, or a slot
  // at the finest level. Cluster i has the children offsets[k][i] to offsets[k][i + 1] - 1, one or
  // more.
  std::vector<std::vector<uint32_t>> offsets;
  std::vector<std::vector<float>> means;  // of HeadTree, in the file's order
  std::vector<uint32_t> keys;  // [M] the key (0 .. M-1) that each slot holds: a permutation
};

SlotOrder depth_first_order(const HeadTree& tree, int64_t dim);

// From the offsets of one head, coarse to fine. first_slots[k]: [n_k + 1], the first slot below
// each cluster of level k + 1.
std::vector<std::vector<uint32_t>> first_slots(std::span<const std::vector<uint32_t>> offsets);

}  // namespace sqz
