#include "training/qmodel_recall.h"

#include <algorithm>
#include <cmath>

namespace sqz::training {
namespace {

WindowPass pass_of(const RecallPlan& plan, const TokenText& window) {
  WindowPass pass;
  pass.layers = plan.layers;
  pass.device = plan.device;
  pass.progress = plan.progress;
  // So that there are some far keys to tell apart.
  const int64_t first = plan.far.sink + plan.far.recent + plan.far.recent / 2 + 1;
  pass.positions =
      draw_positions(first, static_cast<int64_t>(window.tokens.size()), plan.positions, plan.seed);
  return pass;
}

}  // namespace

at::Tensor classifier_scores(const FoldedNetwork& network, const RecallSamples& samples) {
  const at::Tensor logits = bucket_logits(network, samples.queries).view(samples.masses.sizes());
  const at::Tensor shares = (logits + log_sizes(samples.far_sizes).unsqueeze(2)).softmax(3).sum(2);
  return shares / samples.far_sizes.clamp_min(1);
}

at::Tensor centroid_scores(const at::Tensor& centroids, const RecallSamples& samples) {
  const at::Tensor products = head_products(samples.queries, centroids.transpose(1, 2));
  return products.view(samples.masses.sizes()).sum(2);
}

void RecallSum::add_window(const at::Tensor& scores, const RecallSamples& samples) {
  const at::Tensor far = samples.far.to(at::kDouble);
  Window& window = windows_.emplace_back();
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    const at::Tensor recall =
        recall_at(kSelectivities[i], scores, samples.window_sizes, samples.masses).to(at::kDouble);
    window.found[0][i] = recall.sum().item<double>();
    window.found[1][i] = (recall * far).sum().item<double>();
  }
  window.queries[0] = static_cast<double>(far.numel());
  window.queries[1] = far.sum().item<double>();
}

std::vector<QmodelRecall> RecallSum::mean(bool far_queries) const {
  std::vector<QmodelRecall> out;
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    double found = 0, queries = 0;
    for (const Window& window : windows_) {
      found += window.found[far_queries][i];
      queries += window.queries[far_queries];
    }
    // Masses are float32 and sum to 1 but for rounding.
    out.push_back({kSelectivities[i], queries > 0 ? std::min(found / queries, 1.0) : 0});
  }
  return out;
}

std::vector<double> RecallSum::standard_errors(bool far_queries) const {
  const std::vector<QmodelRecall> means = mean(far_queries);
  const auto count = static_cast<double>(windows_.size());
  std::vector<double> out(means.size());
  for (size_t i = 0; i < means.size() && count > 1; ++i) {
    double squares = 0, queries = 0;
    for (const Window& window : windows_) {
      const double own = window.queries[far_queries];
      const double off = window.found[far_queries][i] - own * means[i].recall;
      squares += off * off;
      queries += own;
    }
    if (queries > 0) out[i] = std::sqrt(squares * count / (count - 1)) / queries;
  }
  return out;
}

Result<RecallSamples> window_recall_samples(Runner& runner, const TokenText& window,
                                            const at::Tensor& centroids, const RecallPlan& plan) {
  const ModelDescription& model = runner.config().description;
  const int64_t heads = model.kv_heads;
  std::vector<at::Tensor> queries, masses, far, window_sizes, far_sizes;
  SQZ_RETURN_IF_ERROR(
      run_window(runner, window, pass_of(plan, window), [&](int64_t i, const WindowLayer& layer) {
        RecallSamples own = recall_samples(layer, centroids.narrow(0, i * heads, heads),
                                           model.attention_scale, plan.far);
        queries.push_back(own.queries);
        masses.push_back(own.masses);
        far.push_back(own.far);
        window_sizes.push_back(own.window_sizes);
        far_sizes.push_back(own.far_sizes);
        return Status();
      }));
  return RecallSamples{at::cat(queries), at::cat(masses), at::cat(far), at::cat(window_sizes),
                       at::cat(far_sizes)};
}

}  // namespace sqz::training
