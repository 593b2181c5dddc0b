// Rules: which of the scored clusters of one KV head are kept. A new rule is one class in rule.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace sqz {

// One level of one KV head, scored. Clusters with score -infinity (dead or empty) are never kept.
struct Choice {
  int64_t layer = 0;
  int64_t kv_head = 0;
  int scope = 0;                    // 0: selection for one token, 1: for a block of several
  int level = 0;                    // among the levels in use, 0 = coarsest
  bool finest = true;               // a coarse level filters, the finest one selects
  int64_t keys = 0;                 // M, clustered keys of the head
  std::span<const float> scores;    // [n] log S
  std::span<const uint32_t> sizes;  // [n] N_i
};

class Rule {
 public:
  virtual ~Rule() = default;
  // chosen[i] = 1 if cluster i is kept, else 0. `order` is workspace, [n]. Allocation-free, and
  // deterministic: equal scores are ranked by index.
  virtual void choose(const Choice& choice, std::span<uint32_t> order,
                      std::span<uint8_t> chosen) const = 0;
};

// log T of each scope and level in use: log_thresholds[scope][level].
using LogThresholds = std::vector<std::vector<float>>;

// score >= T, one T for all layers and heads (the paper's rule).
std::unique_ptr<Rule> make_threshold_rule(LogThresholds log_thresholds);

// The finest level is filled best first up to the fraction of its keys that the head keeps: the
// prefix of the ranking whose number of keys is nearest to it. Coarser levels filter by threshold,
// but always let through at least that fraction. head_keep[scope][layer * kv_heads + kv_head].
std::unique_ptr<Rule> make_budget_rule(LogThresholds log_thresholds,
                                       std::vector<std::vector<float>> head_keep, int64_t kv_heads);

// Best first: the prefix of the ranking whose number of keys is nearest to `wanted`; of a level
// that is not the finest, the shortest one that holds as many. The rest as Rule::choose().
void choose_best(const Choice& choice, int64_t wanted, std::span<uint32_t> order,
                 std::span<uint8_t> chosen);

// Keys of the clusters that were chosen.
int64_t chosen_keys(const Choice& choice, std::span<const uint8_t> chosen);

// The best, as many as the layer's count, whatever their sizes. counts[layer].
std::unique_ptr<Rule> make_top_rule(std::vector<int64_t> counts);

}  // namespace sqz
