// Rules: which of the scored groups of one KV head are read, by the numbers of the plan.
#pragma once

#include <cstdint>
#include <span>

#include "libruntime/select/plan.h"

namespace sqz {

// One level of one KV head, scored. Groups with score -infinity (dead or empty) are never kept.
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

// Sets chosen[i] to 1 if group i is kept, else to 0. `order` is workspace, [n]. Allocation-free,
// and deterministic: equal scores are ranked by index. The plan has one of
//   log_thresholds alone: score >= T, one T for all layers and heads (the paper's rule).
//   head_keep: the finest level is filled best first up to the fraction of its keys that the head
//     keeps. Coarser levels filter by threshold, but always let through at least that fraction.
//   layer_pages: the best pages, as many as the layer reads.
void choose(const SelectionPlan& plan, const Choice& choice, std::span<uint32_t> order,
            std::span<uint8_t> chosen);

}  // namespace sqz
