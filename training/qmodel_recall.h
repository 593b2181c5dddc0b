// Recall of attention mass against selectivity: of a classifier, and of the partitions that SAAP
// compares it with.
#pragma once

#include <iterator>
#include <span>
#include <vector>

#include "training/qmodel_network.h"
#include "training/qmodel_windows.h"

namespace sqz::training {

inline constexpr double kSelectivities[] = {0.05, 0.1, 0.2};

// The network's shares of the attention in each bucket, summed over the group: queries [n, T G, d],
// far keys in each bucket [n, T, C] -> [n, T, C].
at::Tensor classifier_shares(const FoldedNetwork& network, const at::Tensor& queries,
                             const at::Tensor& far_sizes, int64_t group);
// The order in which the selector `saap` reads buckets (libruntime/select/saap.cc).
at::Tensor shares_of_a_key(const at::Tensor& shares, const at::Tensor& far_sizes);

// Adds up recalls of one method, in the six ways of QmodelScores, window by window.
class RecallSum {
 public:
  // Of heads of the window that is being measured.
  void add(const at::Tensor& scores, const RecallSamples& samples);
  void end_window();

  std::vector<QmodelRecall> mean(bool far_queries, QmodelKeys keys) const;
  // Windows are the independent samples; each counts by its queries.
  std::vector<double> standard_errors(bool far_queries, QmodelKeys keys) const;

 private:
  struct Window {
    double found[3][2][std::size(kSelectivities)] = {};  // [QmodelKeys][far queries]: recalls
    double queries[2] = {};                              // [far queries]
  };
  std::vector<Window> windows_;
  Window open_;
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
// and the paper's baselines "kmeans" and "kmeans-rope": keys before or after RoPE go to the nearest
// of centroids that other texts' keys, before or after RoPE, gave; buckets are read by the product
// of query and centroid, summed over the group, whatever their sizes. Each in the six ways of
// QmodelScores; the first is file.recall.
Result<std::vector<QmodelScores>> compare_methods(Runner& runner,
                                                  std::span<const QmodelWindow> windows,
                                                  const MethodTensors& methods,
                                                  const RecallPlan& plan);

}  // namespace sqz::training
