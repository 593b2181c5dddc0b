// Lookup for decoding among the buckets of a query classifier: one query token a request through
// the network of each KV head, the shares of the group's heads added up, and the runs of the best
// buckets. Scores and rule are those of libruntime/select/scorers.cc; weights are float16
// (weights.h), products those of 22-bit queries and hidden units, sums float32.
#pragma once

#include "libruntime/kernels/cuda/decode/classify/weights.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"

namespace sqz::cuda {

inline constexpr int kClassifyRequests = 128;  // of one launch

struct ClassifyParams {
  // q: the queries; level[0]: clusters = C, offsets; wanted, lists, counters.
  LookupParams lookup;
  ClassifierNetwork network;
  const float* frequencies = nullptr;    // [d / 2] radians a token; null: q is before RoPE
  float shrink = 1;                      // of a query after RoPE: as in RopeUndo
  float positions[kClassifyRequests]{};  // of the requests, if there are frequencies
  // Of the pairs that several clusters of blocks can serve: plan.scratch bytes, zero before the
  // first launch. Launches that share it follow one another.
  void* scratch = nullptr;
};

// Steps of weights that a warp has under way: as many as there is shared memory for.
inline constexpr int kLongRing = 4, kShortRing = 2;

// Blocks that serve a pair: clusters of `cluster` blocks each. Blocks of a cluster share the hidden
// units between them, and all blocks of a pair the buckets.
struct ClassifyTeam {
  int cluster = 1, clusters = 1;

  int blocks() const { return cluster * clusters; }
};

inline constexpr int kTeamPairs = 64;  // that teams of several blocks serve, at most

struct ClassifyPlan {
  int64_t room = 0;                    // bytes of shared memory that a block can have
  bool fits = false;                   // otherwise only block_classify can serve
  int64_t scratch = 0;                 // bytes
  ClassifyTeam teams[kTeamPairs + 1];  // [pairs of a launch] of each pair

  ClassifyTeam team_of(int pairs) const { return pairs <= kTeamPairs ? teams[pairs] : teams[0]; }
};

// Teams are those whose blocks read the fewest weights, if the GPU easily holds all of a launch.
// Nothing fits where there are no clusters, or a block has too little shared memory for C and H: it
// alone serves a pair of calls of many requests. kUnsupported if there is no kernel for the head
// dimension or the group. Of params only the shape counts, without requests.
Result<ClassifyPlan> plan_classify(const ClassifyParams& params);

// At most kClassifyRequests requests.
Status decode_classify(const ClassifyParams& params, const ClassifyPlan& plan, cudaStream_t stream);

}  // namespace sqz::cuda
