#include "libindex/tree.h"

#include <algorithm>
#include <cmath>

#include "formats/base/parallel.h"

namespace sqz {
namespace {

// One level hands its sums to the level above, so exact that a mean is rounded once.
struct Sums {
  std::vector<double> total;   // [n, d]
  std::vector<int64_t> count;  // [n] keys
};

// children: [parents.size(), d], keys or the sums of clusters of `counts` keys each.
template <class T>
Sums sum_children(const T* children, const int64_t* counts, const std::vector<int32_t>& parents,
                  int64_t dim, int64_t n) {
  Sums sums{std::vector<double>(static_cast<size_t>(n * dim), 0.0),
            std::vector<int64_t>(static_cast<size_t>(n), 0)};
  for (size_t i = 0; i < parents.size(); ++i, children += dim) {
    double* total = sums.total.data() + parents[i] * dim;
    for (int64_t c = 0; c < dim; ++c) total[c] += children[c];
    sums.count[parents[i]] += counts == nullptr ? 1 : counts[i];
  }
  return sums;
}

std::vector<float> means_of(const Sums& sums, int64_t dim) {
  std::vector<float> means(sums.total.size());
  for (size_t i = 0; i < means.size(); ++i) {
    const int64_t count = sums.count[i / static_cast<size_t>(dim)];
    means[i] = static_cast<float>(sums.total[i] / static_cast<double>(count));
  }
  return means;
}

}  // namespace

std::vector<int64_t> cluster_counts(std::span<const double> fractions, int64_t tokens,
                                    int64_t keys) {
  std::vector<int64_t> counts(fractions.size());
  int64_t below = keys;
  for (size_t k = fractions.size(); k-- > 0;) {
    const int64_t wanted = std::llround(fractions[k] * static_cast<double>(tokens));
    below = std::max<int64_t>(1, std::min(wanted, below));
    counts[k] = below;
  }
  return counts;
}

Result<std::vector<HeadTree>> build_trees(KmeansEngine& engine, std::span<const float* const> heads,
                                          int64_t keys, int64_t dim, const TreeOptions& options,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  const int64_t head_count = static_cast<int64_t>(heads.size());
  const size_t levels = options.clusters.size();
  std::vector<HeadTree> trees(heads.size());
  std::vector<Sums> sums(heads.size());
  std::vector<std::vector<float>> weights(heads.size());
  for (HeadTree& tree : trees) {
    tree.parents.resize(levels);
    tree.means.resize(levels);
  }

  for (size_t k = levels; k-- > 0;) {
    const bool finest = k + 1 == levels;
    const int64_t n = options.clusters[k];
    std::vector<KmeansProblem> problems(heads.size());
    for (int64_t h = 0; h < head_count; ++h) {
      KmeansProblem& problem = problems[h];
      problem.points = finest ? heads[h] : trees[h].means[k + 1].data();
      problem.weights = finest ? nullptr : weights[h].data();
      problem.count = finest ? keys : options.clusters[k + 1];
      problem.dim = dim;
      problem.clusters = n;
      problem.iterations = options.iterations;
      problem.seed = kmeans_seed(options.seed, options.layer, h, static_cast<int64_t>(levels - k));
      trees[h].parents[k].resize(static_cast<size_t>(problem.count));
      problem.assignment = trees[h].parents[k].data();
    }
    int64_t done = 0;
    SQZ_RETURN_IF_ERROR(engine.run(problems, options.threads, [&] {
      if (finest && progress) progress(++done, head_count);
    }));
    const auto summarise = [&](int64_t h) {
      const std::vector<int32_t>& parents = trees[h].parents[k];
      sums[h] = finest ? sum_children(heads[h], nullptr, parents, dim, n)
                       : sum_children(sums[h].total.data(), sums[h].count.data(), parents, dim, n);
      trees[h].means[k] = means_of(sums[h], dim);
      weights[h].assign(sums[h].count.begin(), sums[h].count.end());
      return Status();
    };
    SQZ_RETURN_IF_ERROR(parallel_for(head_count, options.threads, summarise));
  }
  return trees;
}

}  // namespace sqz
