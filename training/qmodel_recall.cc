#include "training/qmodel_recall.h"

#include <algorithm>
#include <cmath>

namespace sqz::training {
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
                                            const at::Tensor& centroids, const FarKeys& far,
                                            const WindowPass& pass) {
  const ModelDescription& model = runner.config().description;
  const int64_t heads = model.kv_heads;
  std::vector<RecallSamples> layers;
  SQZ_RETURN_IF_ERROR(run_window(runner, window, pass, [&](int64_t i, const WindowLayer& layer) {
    layers.push_back(
        recall_samples(layer, centroids.narrow(0, i * heads, heads), model.attention_scale, far));
    return Status();
  }));
  RecallSamples out;
  for (const auto field : {&RecallSamples::queries, &RecallSamples::masses, &RecallSamples::far,
                           &RecallSamples::window_sizes, &RecallSamples::far_sizes}) {
    std::vector<at::Tensor> parts;
    for (const RecallSamples& layer : layers) parts.push_back(layer.*field);
    out.*field = at::cat(parts);
  }
  return out;
}

}  // namespace sqz::training
