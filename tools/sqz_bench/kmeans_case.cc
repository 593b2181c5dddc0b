// `kmeans`: the clustering of one layer's keys, as an index build does it.
#include <algorithm>
#include <cmath>
#include <random>

#include "formats/capture.h"
#include "formats/sqz_file.h"
#include "tools/sqz_bench/kmeans_points.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {
namespace {

// Keys that cluster as a model's do.
Status take_made_up(const Options& options, KmeansPoints& out) {
  Options shape = options;
  shape.kv_heads = shape.query_heads = out.heads = options.kmeans_heads_or(2);
  SQZ_ASSIGN_OR_RETURN(const auto index, make_index(shape, options.tokens_or(16384)));
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(index->path()));
  const LayerView view = file->layer(0);
  out.origin = "made up";
  out.points = view.slots;
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const auto* keys = static_cast<const BFloat16*>(view.keys) + head * view.slots * view.head_dim;
    out.rows.emplace_back(keys, keys + view.slots * view.head_dim);
  }
  return {};
}

void take_random(const Options& options, KmeansPoints& out) {
  out.origin = "random";
  out.heads = options.kmeans_heads_or(256);
  out.points = options.tokens_or(131072);
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  out.rows.emplace_back(static_cast<size_t>(out.points * out.dim));
  for (BFloat16& x : out.rows[0]) x = to_bfloat16(normal(random));
}

Status take_captured(const Options& options, KmeansPoints& out) {
  SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(options.capture));
  const CaptureInfo& info = capture->info();
  const auto tokens = static_cast<int64_t>(info.tokens.size());
  out.points = options.tokens_or(tokens);
  if (out.points > tokens) {
    return {Code::kInvalidArgument,
            bad_field("options", "--tokens", concat(out.points),
                      concat("at most ", tokens, ", which ", options.capture, " has"))};
  }
  out.origin = options.capture;
  out.dim = info.model.head_dim;
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    SQZ_ASSIGN_OR_RETURN(const CapturedLayer data, capture->read_layer(layer));
    for (int64_t head = 0; head < info.model.kv_heads; ++head) {
      const auto first = data.keys.begin() + head * tokens * out.dim;
      std::transform(first, first + out.points * out.dim,
                     std::back_inserter(out.rows.emplace_back()), to_bfloat16);
    }
  }
  out.heads = options.kmeans_heads_or(std::ssize(out.rows));
  return {};
}

struct Work {
  std::vector<std::vector<float>> points;         // [heads][M, d]
  std::vector<std::vector<int32_t>> assignments;  // [heads][M]
  std::vector<KmeansProblem> problems;
};

}  // namespace

JsonMembers KmeansPoints::shape() const {
  return {{"heads", heads},       {"points", points},          {"head_dim", dim},
          {"clusters", clusters}, {"iterations", kIterations}, {"keys", origin}};
}

double KmeansPoints::flop(int assignments) const {
  return 2.0 * assignments * static_cast<double>(points) * static_cast<double>(clusters * dim);
}

Result<KmeansPoints> kmeans_points(const Options& options) {
  KmeansPoints out;
  out.dim = options.head_dim;
  if (!options.capture.empty()) {
    SQZ_RETURN_IF_ERROR(take_captured(options, out));
  } else if (options.gpu >= 0) {
    take_random(options, out);
  } else {
    SQZ_RETURN_IF_ERROR(take_made_up(options, out));
  }
  const double clusters = options.kmeans_fraction * static_cast<double>(out.points);
  out.clusters = std::clamp<int64_t>(std::llround(clusters), 1, out.points);
  return out;
}

Contender engine_contender(std::shared_ptr<KmeansEngine> engine, const KmeansPoints& points,
                           int64_t heads, const Options& options) {
  const auto work = std::make_shared<Work>();
  for (int64_t head = 0; head < heads; ++head) {
    const std::vector<BFloat16>& row = points.row(head);
    std::vector<float>& wide = work->points.emplace_back();
    for (const BFloat16 x : row) wide.push_back(to_float(x));
    work->assignments.emplace_back(static_cast<size_t>(points.points));
    work->problems.push_back({.points = wide.data(),
                              .count = points.points,
                              .dim = points.dim,
                              .clusters = points.clusters,
                              .iterations = kIterations,
                              .seed = options.seed + static_cast<uint64_t>(head),
                              .assignment = work->assignments.back().data()});
  }
  const auto run = [engine, work, threads = options.threads](int64_t) {
    return engine->run(work->problems, threads, {});
  };
  return {.name = engine->name(),
          .run = run,
          .flop = static_cast<double>(heads) * points.flop(kIterations + 1)};
}

Result<CaseSetup> kmeans_case(const Options& options) {
  SQZ_ASSIGN_OR_RETURN(const KmeansPoints points, kmeans_points(options));
  SQZ_ASSIGN_OR_RETURN(std::shared_ptr<KmeansEngine> engine,
                       make_kmeans_engine({options.kmeans_engine, points.dim, 0}));
  CaseSetup setup;
  setup.shape = points.shape();
  setup.rounds = options.repeat_or(3);
  setup.contenders = {engine_contender(engine, points, points.heads, options)};
  setup.baselines = {engine->name()};
  return setup;
}

}  // namespace sqz::bench
