// The builder's k-means against calling faiss::Clustering head after head with FAISS's own threads.
// Prints times and objectives (mean cosine of a key to its unit centroid) of both.
//
//   bench_kmeans [keys 31616] [dim 64] [clusters 1585] [heads 4] [threads 2]
#include <faiss/Clustering.h>
#include <faiss/IndexFlat.h>
#include <omp.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "libindex/kmeans.h"
#include "tests/libindex/clustered_data.h"

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double objective(const float* unit, const int32_t* assignment, int64_t n, int64_t d, int64_t k) {
  std::vector<double> sum(static_cast<size_t>(k * d), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < d; ++c) sum[assignment[i] * d + c] += unit[i * d + c];
  }
  double total = 0;  // the cosines of a cluster to its unit mean add up to the length of its sum
  for (int64_t j = 0; j < k; ++j) {
    double square = 0;
    for (int64_t c = 0; c < d; ++c) square += sum[j * d + c] * sum[j * d + c];
    total += std::sqrt(square);
  }
  return total / static_cast<double>(n);
}

}  // namespace

int main(int argc, char** argv) {
  const auto arg = [&](int i, int64_t value) { return argc > i ? std::atoll(argv[i]) : value; };
  const int64_t n = arg(1, 31616), d = arg(2, 64), k = arg(3, 1585), heads = arg(4, 4);
  const int threads = static_cast<int>(arg(5, 2));
  std::vector<std::vector<float>> keys, unit;
  for (int64_t h = 0; h < heads; ++h) {
    keys.push_back(sqz::test::clustered_points(n, d, k / 2, 0.7f, 10 + static_cast<uint64_t>(h)));
    unit.emplace_back(keys.back().size());
    sqz::normalise_rows(keys.back().data(), n, d, unit.back().data());
  }
  std::vector<std::vector<int32_t>> ours(heads, std::vector<int32_t>(n)), theirs = ours;

  double start = seconds();
  std::vector<sqz::KmeansProblem> problems(heads);
  for (int64_t h = 0; h < heads; ++h) {
    problems[h] = {keys[h].data(), nullptr, n, d, k, 10, 1, ours[h].data()};
  }
  if (!sqz::make_faiss_kmeans()->run(problems, threads, {}).ok()) return 1;
  const double our_time = seconds() - start;

  omp_set_num_threads(threads);
  start = seconds();
  for (int64_t h = 0; h < heads; ++h) {
    faiss::ClusteringParameters parameters;
    parameters.niter = 10;
    parameters.spherical = true;
    parameters.min_points_per_centroid = 1;
    parameters.max_points_per_centroid = std::numeric_limits<int>::max();
    faiss::Clustering clustering(static_cast<int>(d), static_cast<int>(k), parameters);
    faiss::IndexFlatIP index(d);
    clustering.train(n, unit[h].data(), index);
    std::vector<float> distances(n);
    std::vector<int64_t> labels(n);
    index.search(n, unit[h].data(), 1, distances.data(), labels.data());
    theirs[h].assign(labels.begin(), labels.end());
  }
  const double their_time = seconds() - start;

  double our_objective = 0, their_objective = 0;
  for (int64_t h = 0; h < heads; ++h) {
    our_objective += objective(unit[h].data(), ours[h].data(), n, d, k);
    their_objective += objective(unit[h].data(), theirs[h].data(), n, d, k);
  }
  our_objective /= static_cast<double>(heads);
  their_objective /= static_cast<double>(heads);
  const double flop = 22.0 * static_cast<double>(n) * static_cast<double>(d) *
                      static_cast<double>(k) * static_cast<double>(heads);
  std::printf("keys %lld dim %lld clusters %lld heads %lld threads %d\n", (long long)n,
              (long long)d, (long long)k, (long long)heads, threads);
  std::printf("sqz    %.3f s  %.1f GFLOP/s  mean cosine %.5f\n", our_time, flop / our_time / 1e9,
              our_objective);
  std::printf("faiss  %.3f s  %.1f GFLOP/s  mean cosine %.5f\n", their_time,
              flop / their_time / 1e9, their_objective);
  return 0;
}
