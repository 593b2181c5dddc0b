// Recall of attention mass against selectivity, of a classifier and of k-means.
#pragma once

#include <iterator>
#include <span>
#include <vector>

#include "training/qmodel_network.h"
#include "training/qmodel_samples.h"

namespace sqz::training {

inline constexpr double kSelectivities[] = {0.05, 0.1, 0.2};

// A score orders the buckets: [n, T, C], for the T tokens of a window and the group of each head.
// The classifier's is the share of the attention in a bucket by its far keys, in the order of the
// selector `saap` (libruntime/select/scorers.cc).
at::Tensor classifier_scores(const FoldedNetwork& network, const RecallSamples& samples);
// The product of query and centroid [n, C, d], summed over the group.
at::Tensor centroid_scores(const at::Tensor& centroids, const RecallSamples& samples);

// Adds up the recalls of one method, window by window.
class RecallSum {
 public:
  void add_window(const at::Tensor& scores, const RecallSamples& samples);

  std::vector<QmodelRecall> mean(bool far_queries) const;
  // Windows are the independent samples; each counts by its queries.
  std::vector<double> standard_errors(bool far_queries) const;

 private:
  struct Window {
    double found[2][std::size(kSelectivities)] = {};  // [far queries]: recalls
    double queries[2] = {};                           // [far queries]
  };
  std::vector<Window> windows_;
};

// The heads of all layers of a window, one after the other, for the queries of `pass`.
Result<RecallSamples> window_recall_samples(Runner& runner, const TokenText& window,
                                            const at::Tensor& centroids, const FarKeys& far,
                                            const WindowPass& pass);

}  // namespace sqz::training
