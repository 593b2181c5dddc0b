// Squeezed Attention's cluster score (paper equations 1 to 3), in the log domain:
//
//   S_i = exp(s q.C_i) / sum_j N_j exp(s q.C_j)      s = attention scale, j over the alive clusters
//
// for every query of a block and every query head of one GQA group. A cluster's score is the mean
// over these queries and heads (section 4.1). libindex calibrates with this very function. Clusters
// that are not alive (equation 3) are no part of a problem: neither read nor counted, and nothing
// has a place for them.
#pragma once

#include <cstdint>
#include <span>

#include "formats/base/dtype.h"
#include "formats/base/status.h"

namespace sqz {

struct CpuKernels;
struct ClassifierView;

// Clusters [first, first + count) of one level of one KV head.
struct ClusterRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

// The alive clusters of one level of one KV head: what a ScoreProblem scores. The i-th of them is
// meant by `chosen[i]` of a rule.
struct Candidates {
  std::span<const ClusterRange> ranges;  // ascending, disjoint
  std::span<const uint32_t> sizes;       // [n] keys of each
};

// f(i, cluster) for every i with chosen[i] != 0, ascending; cluster: its index in the level.
template <class Function>
void for_each_chosen(std::span<const ClusterRange> ranges, std::span<const uint8_t> chosen,
                     const Function& f) {
  size_t i = 0;
  for (const ClusterRange& range : ranges) {
    for (uint32_t cluster = range.first; cluster < range.first + range.count; ++cluster, ++i) {
      if (chosen[i] != 0) f(i, cluster);
    }
  }
}

// The children of the chosen clusters, neighbours in one range. offsets: of the parents' level,
// [all + 1], the first child of each; child_sizes: keys of every child of the level. The answer
// lies in `ranges` and `sizes`, which have room for all children.
Candidates children_of_chosen(std::span<const ClusterRange> parents,
                              std::span<const uint8_t> chosen, const uint32_t* offsets,
                              const uint32_t* child_sizes, std::span<ClusterRange> ranges,
                              std::span<uint32_t> sizes);

struct ScoreProblem {
  DType dtype = DType::kBF16;            // of the centroids: BF16, F16 or F32
  int64_t dim = 0;                       // d
  int64_t clusters = 0;                  // n, the alive ones
  std::span<const ClusterRange> ranges;  // where they are among the centroids: n in all, ascending,
                                         // disjoint
  const void* centroids = nullptr;       // [all, d]
  const uint32_t* sizes = nullptr;       // [n]: N_j, keys below each; 0 = empty, scores -inf
  const float* queries = nullptr;        // [tokens, group, d], after RoPE
  int64_t tokens = 0;
  int64_t group = 0;                    // query heads per KV head
  float scale = 0;                      // usually 1/sqrt(d)
  int64_t token_stride = 0;             // floats between tokens of `queries`; 0 = group * d
  const CpuKernels* kernels = nullptr;  // instruction set; null = the machine's best
  // If there is one, the logits are this network's in the place of products with centroids (SAAP,
  // section 4), `clusters` are buckets, all of them, and queries are those from before RoPE. Of one
  // KV head: hidden_weight [H, d], output_weight [n, H].
  const ClassifierView* network = nullptr;
};

// Floats of workspace that score_clusters() needs for a problem of this shape. Grows with n and d,
// not with the tokens beyond a few.
int64_t score_workspace(const ScoreProblem& problem);
// The same for any number of tokens.
int64_t most_score_workspace(ScoreProblem problem);

// scores[i] = log of the combined S of the i-th alive cluster, [n]; -infinity if it is empty.
// kNumeric if any logit is NaN or +infinity (never a silent "select nothing"). Single-threaded,
// allocation-free; the result does not depend on the instruction set beyond float rounding.
Status score_clusters(const ScoreProblem& problem, std::span<float> scores,
                      std::span<float> workspace);

}  // namespace sqz
