// Recall of attention mass against selectivity: of a classifier, and of the partitions that SAAP
// compares it with.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "training/qmodel_network.h"
#include "training/qmodel_windows.h"

namespace sqz::training {

inline constexpr double kSelectivities[] = {0.05, 0.1, 0.2};

// Scores of the buckets for every token, the network's shares summed over the group: queries
// [n, T G, d] -> [n, T, C].
at::Tensor classifier_scores(const FoldedNetwork& network, const at::Tensor& queries,
                             int64_t group);

// Adds up recalls of one method, in the four ways of QmodelScores.
class RecallSum {
 public:
  void add(const at::Tensor& scores, const RecallSamples& samples);
  // Of shares of the attention: buckets by share over the square root of their size, as the
  // selector `saap` reads them (libruntime/select/saap.cc).
  void add_shares(const at::Tensor& shares, const RecallSamples& samples);
  std::vector<QmodelRecall> mean(bool far_queries, bool far_keys) const;

 private:
  struct Sums {
    double all = 0, far = 0;  // over queries
  };
  void add(const at::Tensor& scores, const RecallSamples& samples, bool shares);

  std::array<Sums, std::size(kSelectivities)> of_all_keys_, of_far_keys_;
  Sums rows_;
};

// The heads of all layers of a window, one after the other.
RecallSamples concatenated(std::span<const RecallSamples> layers);

// The classifier's recall on windows whose samples are kept.
RecallSum held_out_recall(const FoldedNetwork& network, std::span<const RecallSamples> windows);

struct MethodTensors {
  at::Tensor centroids;        // [n, C, d], before RoPE
  at::Tensor roped_centroids;  // [n, C, d], after it
  FoldedNetwork network;
};
struct RecallPlan {
  FarKeys far;
  int64_t positions = 256;  // tokens of a window whose queries are measured
  uint64_t seed = 0;
  std::vector<int64_t> layers;
  at::Device device = at::kCPU;
  std::function<Status(double done)> progress;
};
// Samples of one window for held_out_recall().
Result<RecallSamples> window_recall_samples(Runner& runner, const QmodelWindow& window,
                                            const at::Tensor& centroids, const RecallPlan& plan);

// "classifier", "classifier-share" (by share alone, whatever the buckets' sizes, as in the paper),
// "kmeans" and "kmeans-rope" (product of query and centroid, before and after RoPE), each in the
// four ways of QmodelScores; the first is file.recall.
Result<std::vector<QmodelScores>> compare_methods(Runner& runner,
                                                  std::span<const QmodelWindow> windows,
                                                  const MethodTensors& methods,
                                                  const RecallPlan& plan);

}  // namespace sqz::training
