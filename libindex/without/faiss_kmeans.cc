// In place of libindex/faiss_kmeans.cc where sqz is built without FAISS: the same arithmetic in the
// same order, so that an index has the same bytes. tests/libindex/kmeans_test.cc compares the two.
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "libindex/lloyd.h"

namespace sqz {
namespace {

// Uniform numbers as FAISS draws them.
class Draw {
 public:
  explicit Draw(uint32_t seed) : numbers_(seed) {}
  int64_t below(int64_t end) { return numbers_() % static_cast<uint32_t>(end); }
  float fraction() { return static_cast<float>(numbers_()) / static_cast<float>(numbers_.max()); }

 private:
  std::mt19937 numbers_;
};

// The first `wanted` of a random order of `count` points.
std::vector<int32_t> draw_points(int64_t count, int64_t wanted, uint32_t seed) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  Draw draw(seed);
  for (int64_t i = 0; i < wanted; ++i) std::swap(order[i], order[i + draw.below(count - i)]);
  return order;
}

// Centroids get length 1; zero vectors stay.
void normalise(std::vector<float>& centroids, int64_t dim) {
  for (auto row = centroids.begin(); row != centroids.end(); row += dim) {
    double square = 0;
    for (int64_t c = 0; c < dim; ++c) square += row[c] * row[c];  // a product is rounded to float
    const auto length = std::sqrt(static_cast<float>(square));
    const float inverse = 1.0f / length;
    for (int64_t c = 0; c < dim && length > 0; ++c) row[c] *= inverse;
  }
}

class Update {
 public:
  Update(const KmeansProblem& problem, const float* unit)
      : problem_(problem), unit_(unit), weights_(static_cast<size_t>(problem.clusters)) {}

  // Moves each centroid to the weighted mean of its points.
  void move_to_means(const std::vector<int64_t>& labels, std::vector<float>& centroids) {
    const int64_t dim = problem_.dim;
    std::fill(weights_.begin(), weights_.end(), 0.0f);
    std::fill(centroids.begin(), centroids.end(), 0.0f);
    for (int64_t i = 0; i < problem_.count; ++i) {
      const float weight = problem_.weights == nullptr ? 1.0f : problem_.weights[i];
      float* sum = centroids.data() + labels[i] * dim;
      weights_[labels[i]] += weight;
      for (int64_t c = 0; c < dim; ++c) sum[c] += unit_[i * dim + c] * weight;
    }
    for (int64_t k = 0; k < problem_.clusters; ++k) {
      if (weights_[k] == 0) continue;
      const float inverse = 1 / weights_[k];
      for (int64_t c = 0; c < dim; ++c) centroids[k * dim + c] *= inverse;
    }
  }

  // An empty cluster gets half of a cluster that is drawn in proportion to its size. Their two
  // centroids are moved apart a little.
  void split_into_empty(std::vector<float>& centroids) {
    constexpr float kApart = 1.0f / 1024;
    const int64_t dim = problem_.dim, clusters = problem_.clusters;
    Draw draw(1234);
    for (int64_t empty = 0; empty < clusters; ++empty) {
      if (weights_[empty] != 0) continue;
      int64_t donor = 0;
      while (!(draw.fraction() < share(donor))) donor = (donor + 1) % clusters;
      for (int64_t c = 0; c < dim; ++c) {
        const float sign = c % 2 == 0 ? kApart : -kApart;
        const float from = centroids[donor * dim + c];
        centroids[empty * dim + c] = from * (1 + sign);
        centroids[donor * dim + c] = from * (1 - sign);
      }
      weights_[empty] = weights_[donor] / 2;
      weights_[donor] -= weights_[empty];
    }
  }

 private:
  // The chance of a cluster to be split.
  float share(int64_t k) const {
    const auto others = static_cast<float>(problem_.count - problem_.clusters);
    return static_cast<float>((double{weights_[k]} - 1) / double{others});
  }

  const KmeansProblem& problem_;
  const float* unit_;
  std::vector<float> weights_;  // [clusters] of the points that each cluster got
};

Result<std::vector<float>> train(const KmeansProblem& problem, const float* unit, int threads) {
  const int64_t n = problem.count, dim = problem.dim, clusters = problem.clusters;
  const auto seed = static_cast<uint32_t>(problem.seed & 0x3fffffffu) + 1;
  std::vector<float> centroids;
  centroids.reserve(static_cast<size_t>(clusters * dim));
  const std::vector<int32_t> order = draw_points(n, clusters, seed);
  for (int64_t k = 0; k < clusters; ++k) {
    const float* point = unit + order[k] * dim;
    centroids.insert(centroids.end(), point, point + dim);
  }
  normalise(centroids, dim);
  std::vector<float> products(static_cast<size_t>(n));
  std::vector<int64_t> labels(static_cast<size_t>(n));
  Update update(problem, unit);
  for (int iteration = 0; iteration < problem.iterations; ++iteration) {
    SQZ_RETURN_IF_ERROR(find_nearest(NearestCentroids(centroids.data(), clusters, dim), unit, n,
                                     dim, threads, products.data(), labels.data()));
    update.move_to_means(labels, centroids);
    update.split_into_empty(centroids);
    normalise(centroids, dim);
  }
  return centroids;
}

}  // namespace

std::unique_ptr<KmeansEngine> make_faiss_kmeans() {
  return make_lloyd_kmeans(train);
}

}  // namespace sqz
