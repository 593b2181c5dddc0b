// `kmeans`: the clustering of one layer's keys, as an index build does it.
#include <algorithm>
#include <cmath>
#include <memory>

#include "libindex/kmeans.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/synthetic_index.h"

namespace sqz::bench {
namespace {

struct Work {
  SyntheticIndex index;
  std::vector<std::vector<float>> points;         // [heads][M, d]
  std::vector<std::vector<int32_t>> assignments;  // [heads][M]
  std::vector<KmeansProblem> problems;
};

constexpr int kIterations = 10;

}  // namespace

Result<CaseSetup> kmeans_case(const Options& options) {
  Options shape = options;
  shape.kv_heads = options.kmeans_heads;
  shape.query_heads = options.kmeans_heads;
  const auto work = std::make_shared<Work>();
  SQZ_ASSIGN_OR_RETURN(work->index, make_synthetic_index(shape, options.tokens_or(16384), 0, 1));
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(work->index.file->path()));
  const LayerView view = file->layer(0);
  const auto clusters =
      std::max<int64_t>(1, std::llround(options.kmeans_fraction * static_cast<double>(view.slots)));
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const auto* keys = static_cast<const BFloat16*>(view.keys) + head * view.slots * view.head_dim;
    std::vector<float>& points = work->points.emplace_back();
    for (int64_t i = 0; i < view.slots * view.head_dim; ++i) points.push_back(to_float(keys[i]));
    work->assignments.emplace_back(static_cast<size_t>(view.slots));
  }
  for (size_t head = 0; head < work->points.size(); ++head) {
    work->problems.push_back({.points = work->points[head].data(),
                              .count = view.slots,
                              .dim = view.head_dim,
                              .clusters = clusters,
                              .iterations = kIterations,
                              .seed = options.seed + head,
                              .assignment = work->assignments[head].data()});
  }
  SQZ_ASSIGN_OR_RETURN(std::shared_ptr<KmeansEngine> engine,
                       make_kmeans_engine({options.kmeans_engine, view.head_dim, 0}));
  CaseSetup setup;
  setup.shape = {{"heads", view.kv_heads},
                 {"points", view.slots},
                 {"head_dim", view.head_dim},
                 {"clusters", clusters},
                 {"iterations", kIterations}};
  setup.rounds = options.repeat_or(3);
  const double pairs = static_cast<double>(view.slots) * static_cast<double>(clusters);
  setup.contenders.push_back(
      {.name = engine->name(),
       .run = [engine, work, threads = options.threads](
                  int64_t) { return engine->run(work->problems, threads, {}); },
       .flop =
           2.0 * pairs * static_cast<double>(view.head_dim * view.kv_heads) * (kIterations + 1)});
  setup.baselines = {engine->name()};
  return setup;
}

}  // namespace sqz::bench
