#include "training/qmodel_centroids.h"

#include "formats/base/parallel.h"
#include "libindex/kmeans.h"

namespace sqz::training {
namespace {

constexpr double kCaptureShare = 0.5;  // of the work; the rest is clustering

// [layers, Hkv, keys, d] on the CPU.
Result<at::Tensor> draw_keys(Runner& runner, std::span<const TokenText> windows,
                             const CentroidOptions& o) {
  const ModelDescription& model = runner.config().description;
  const auto count = static_cast<int64_t>(windows.size());
  at::Tensor out = at::empty(
      {static_cast<int64_t>(o.layers.size()), model.kv_heads, o.keys, model.head_dim}, at::kFloat);
  int64_t filled = 0;
  for (int64_t w = 0; w < count; ++w) {
    const TokenText& window = windows[static_cast<size_t>(w)];
    const std::vector<int64_t> tokens =
        draw_positions(o.sink, static_cast<int64_t>(window.tokens.size()),
                       (o.keys * (w + 1)) / count - filled, kmeans_seed(o.seed, w, 0, 0));
    const at::Tensor rows = at::tensor(tokens, at::kLong).to(o.device);
    WindowPass pass;
    pass.layers = o.layers;
    pass.device = o.device;
    pass.progress = [&](double done) {
      o.progress(kCaptureShare * (static_cast<double>(w) + done) / static_cast<double>(count));
    };
    SQZ_RETURN_IF_ERROR(run_window(runner, window, pass, [&](int64_t i, const WindowLayer& layer) {
      out.select(0, i).narrow(1, filled, rows.size(0)).copy_(layer.keys.index_select(1, rows));
      return Status();
    }));
    filled += rows.size(0);
  }
  // A short window may have had fewer keys than its share.
  return out.narrow(2, 0, filled).contiguous();
}

// Mean direction of each cluster's keys: [C, d].
Result<at::Tensor> mean_directions(const KmeansProblem& problem, int64_t layer) {
  const at::Tensor unit = at::empty({problem.count, problem.dim});
  normalise_rows(problem.points, problem.count, problem.dim, unit.data_ptr<float>());
  const at::Tensor cluster =
      at::from_blob(problem.assignment, {problem.count}, at::kInt).to(at::kLong);
  const at::Tensor sums = at::zeros({problem.clusters, problem.dim}, at::kDouble)
                              .index_add_(0, cluster, unit.to(at::kDouble));
  const at::Tensor lengths = sums.norm(2, 1, true), none = (lengths == 0).nonzero();
  if (none.size(0) == 0) return (sums / lengths).to(at::kFloat);
  return Status(Code::kNumeric, concat("layer ", layer, ": bucket ", none[0][0].item<int64_t>(),
                                       " has no direction: its keys are zero or cancel out; use "
                                       "fewer buckets"));
}

}  // namespace

Result<at::Tensor> find_centroids(Runner& runner, std::span<const TokenText> windows,
                                  const CentroidOptions& o) {
  SQZ_ASSIGN_OR_RETURN(const at::Tensor keys, draw_keys(runner, windows, o));
  const int64_t layers = keys.size(0), heads = keys.size(1), count = keys.size(2),
                dim = keys.size(3);
  SQZ_ASSIGN_OR_RETURN(const auto engine,
                       make_kmeans_engine({.name = "auto", .dim = dim, .gpu = 0}));
  at::Tensor out = at::empty({layers, heads, o.buckets, dim}, at::kFloat);
  std::vector<int32_t> assignment(static_cast<size_t>(heads * count));
  for (int64_t i = 0; i < layers; ++i) {
    std::vector<KmeansProblem> problems(static_cast<size_t>(heads));
    for (int64_t head = 0; head < heads; ++head) {
      KmeansProblem& problem = problems[static_cast<size_t>(head)];
      problem.points = keys.data_ptr<float>() + (i * heads + head) * count * dim;
      problem.count = count;
      problem.dim = dim;
      problem.clusters = o.buckets;
      problem.seed = kmeans_seed(o.seed, o.layers[static_cast<size_t>(i)], head, 1);
      problem.assignment = assignment.data() + head * count;
    }
    SQZ_RETURN_IF_ERROR(engine->run(problems, resolve_threads(o.threads), {}));
    for (int64_t head = 0; head < heads; ++head) {
      SQZ_ASSIGN_OR_RETURN(
          const at::Tensor directions,
          mean_directions(problems[static_cast<size_t>(head)], o.layers[static_cast<size_t>(i)]));
      out.select(0, i).select(0, head).copy_(directions);
    }
    o.progress(kCaptureShare +
               (1 - kCaptureShare) * static_cast<double>(i + 1) / static_cast<double>(layers));
  }
  return out;
}

}  // namespace sqz::training
