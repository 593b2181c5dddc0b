// `kmeans`: the clustering of one layer's keys, as an index build does it.
#include <algorithm>
#include <memory>

#include "formats/sqz_file.h"
#include "libindex/kmeans.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/kmeans_device.h"
#include "tools/sqz_bench/kmeans_points.h"
#include "tools/sqz_bench/synthetic_index.h"

namespace sqz::bench {
namespace {

struct Work {
  std::vector<std::vector<float>> points;         // [heads][M, d]
  std::vector<std::vector<int32_t>> assignments;  // [heads][M]
  std::vector<KmeansProblem> problems;
};

constexpr int kIterations = 10;

// Keys that cluster as a model's do: those of a made-up index.
Result<KmeansPoints> synthetic_points(const Options& options) {
  Options shape = options;
  shape.kv_heads = options.kmeans_heads > 0 ? options.kmeans_heads : 2;
  shape.query_heads = shape.kv_heads;
  SQZ_ASSIGN_OR_RETURN(const auto index, make_synthetic_index(shape, options.tokens_or(16384)));
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(index->path()));
  const LayerView view = file->layer(0);
  KmeansPoints out;
  out.heads = view.kv_heads;
  out.points = view.slots;
  out.dim = view.head_dim;
  out.clusters = cluster_count(options, view.slots);
  out.origin = "made up";
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const auto* keys = static_cast<const BFloat16*>(view.keys) + head * view.slots * view.head_dim;
    out.rows.emplace_back(keys, keys + view.slots * view.head_dim);
  }
  return out;
}

Result<CaseSetup> engine_case(const Options& options, const KmeansPoints& points) {
  const auto work = std::make_shared<Work>();
  const auto heads = static_cast<size_t>(points.heads);
  for (size_t head = 0; head < heads; ++head) {
    const std::vector<BFloat16>& row = points.rows[head % points.rows.size()];
    std::vector<float>& wide = work->points.emplace_back(row.size());
    std::transform(row.begin(), row.end(), wide.begin(), [](BFloat16 x) { return to_float(x); });
    work->assignments.emplace_back(static_cast<size_t>(points.points));
  }
  for (size_t head = 0; head < heads; ++head) {
    work->problems.push_back({.points = work->points[head].data(),
                              .count = points.points,
                              .dim = points.dim,
                              .clusters = points.clusters,
                              .iterations = kIterations,
                              .seed = options.seed + head,
                              .assignment = work->assignments[head].data()});
  }
  SQZ_ASSIGN_OR_RETURN(std::shared_ptr<KmeansEngine> engine,
                       make_kmeans_engine({options.kmeans_engine, points.dim, 0}));
  CaseSetup setup;
  setup.shape = {{"heads", points.heads},     {"points", points.points},
                 {"head_dim", points.dim},    {"clusters", points.clusters},
                 {"iterations", kIterations}, {"keys", points.origin}};
  setup.rounds = options.repeat_or(3);
  const double pairs = static_cast<double>(points.points) * static_cast<double>(points.clusters);
  setup.contenders.push_back(
      {.name = engine->name(),
       .run = [engine, work, threads = options.threads](
                  int64_t) { return engine->run(work->problems, threads, {}); },
       .flop = 2.0 * pairs * static_cast<double>(points.dim * points.heads) * (kIterations + 1)});
  setup.baselines = {engine->name()};
  return setup;
}

}  // namespace

Result<CaseSetup> kmeans_case(const Options& options) {
  const bool on_device = options.gpu >= 0;
  if (!options.capture.empty()) {
    SQZ_ASSIGN_OR_RETURN(KmeansPoints points, captured_points(options));
    return on_device ? kmeans_device_case(options, std::move(points))
                     : engine_case(options, points);
  }
  if (on_device) {
    return kmeans_device_case(options, random_points(options));
  }
  SQZ_ASSIGN_OR_RETURN(const KmeansPoints points, synthetic_points(options));
  return engine_case(options, points);
}

}  // namespace sqz::bench
