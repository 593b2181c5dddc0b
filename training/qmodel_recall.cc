#include "training/qmodel_recall.h"

#include "libindex/kmeans.h"

namespace sqz::training {
namespace {

// Products with the centroids, summed over the group.
at::Tensor centroid_scores(const at::Tensor& queries, const at::Tensor& centroids, int64_t group) {
  const at::Tensor products = head_products(queries, centroids.transpose(1, 2));
  return products.view({queries.size(0), -1, group, centroids.size(1)}).sum(2);
}

FoldedNetwork heads_of(const FoldedNetwork& n, int64_t first, int64_t count) {
  return {n.hidden_weight.narrow(0, first, count), n.hidden_bias.narrow(0, first, count),
          n.output_weight.narrow(0, first, count), n.output_bias.narrow(0, first, count)};
}

WindowPass pass_of(const RecallPlan& plan, const QmodelWindow& window) {
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

at::Tensor classifier_scores(const FoldedNetwork& network, const at::Tensor& queries,
                             int64_t group) {
  const at::Tensor shares = bucket_logits(network, queries).softmax(2);
  return shares.view({queries.size(0), -1, group, shares.size(2)}).sum(2);
}

void RecallSum::add(const at::Tensor& scores, const RecallSamples& samples) {
  const at::Tensor far = samples.far.to(at::kDouble);
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    const at::Tensor recall = recall_at(kSelectivities[i], scores, samples).to(at::kDouble);
    all_[i] += recall.sum().item<double>();
    far_[i] += (recall * far).sum().item<double>();
  }
  all_rows_ += static_cast<double>(far.numel());
  far_rows_ += far.sum().item<double>();
}

std::vector<QmodelRecall> RecallSum::mean(bool far_only) const {
  std::vector<QmodelRecall> out;
  const double rows = far_only ? far_rows_ : all_rows_;
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    const double sum = far_only ? far_[i] : all_[i];
    // Masses are float32 and sum to 1 but for rounding.
    out.push_back({kSelectivities[i], rows > 0 ? std::min(sum / rows, 1.0) : 0});
  }
  return out;
}

RecallSamples concatenated(std::span<const RecallSamples> layers) {
  std::vector<at::Tensor> queries, masses, sizes, far;
  for (const RecallSamples& layer : layers) {
    queries.push_back(layer.queries);
    masses.push_back(layer.masses);
    sizes.push_back(layer.sizes);
    far.push_back(layer.far);
  }
  return {at::cat(queries), at::cat(masses), at::cat(sizes), at::cat(far)};
}

std::vector<QmodelRecall> held_out_recall(const FoldedNetwork& network,
                                          std::span<const RecallSamples> windows) {
  RecallSum sum;
  for (const RecallSamples& window : windows) {
    sum.add(classifier_scores(network, window.queries, window.masses.size(2)), window);
  }
  return sum.mean(false);
}

Result<RecallSamples> window_recall_samples(Runner& runner, const QmodelWindow& window,
                                            const at::Tensor& centroids, const RecallPlan& plan) {
  const ModelDescription& model = runner.config().description;
  const int64_t heads = model.kv_heads;
  std::vector<RecallSamples> layers;
  SQZ_RETURN_IF_ERROR(
      run_window(runner, window, pass_of(plan, window), [&](int64_t i, const WindowLayer& layer) {
        layers.push_back(recall_samples(layer, centroids.narrow(0, i * heads, heads),
                                        model.attention_scale, plan.far, false));
        return Status();
      }));
  return concatenated(layers);
}

Result<std::vector<QmodelScores>> compare_methods(Runner& runner,
                                                  std::span<const QmodelWindow> windows,
                                                  const MethodTensors& methods,
                                                  const RecallPlan& plan) {
  const ModelDescription& model = runner.config().description;
  const int64_t heads = model.kv_heads, group = model.group_size();
  RecallSum classifier, by_size, kmeans, roped;
  for (size_t w = 0; w < windows.size(); ++w) {
    RecallPlan of_window = plan;
    of_window.seed = kmeans_seed(plan.seed, static_cast<int64_t>(w), 0, 0);
    if (plan.progress) {
      of_window.progress = [&](double done) {
        return plan.progress((static_cast<double>(w) + done) / static_cast<double>(windows.size()));
      };
    }
    const auto measure = [&](int64_t i, const WindowLayer& layer) {
      const auto mine = [&](const at::Tensor& t) { return t.narrow(0, i * heads, heads); };
      const RecallSamples plain =
          recall_samples(layer, mine(methods.centroids), model.attention_scale, plan.far, false);
      const at::Tensor scores =
          classifier_scores(heads_of(methods.network, i * heads, heads), plain.queries, group);
      classifier.add(scores, plain);
      by_size.add(scores / plain.sizes.clamp_min(1), plain);
      kmeans.add(centroid_scores(plain.queries, mine(methods.centroids), group), plain);
      const RecallSamples after = recall_samples(layer, mine(methods.roped_centroids),
                                                 model.attention_scale, plan.far, true);
      roped.add(centroid_scores(after.queries, mine(methods.roped_centroids), group), after);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(run_window(runner, windows[w], pass_of(of_window, windows[w]), measure));
  }
  std::vector<QmodelScores> out;
  for (const bool far_only : {false, true}) {
    out.push_back({"classifier", far_only, classifier.mean(far_only)});
    out.push_back({"classifier-by-size", far_only, by_size.mean(far_only)});
    out.push_back({"kmeans", far_only, kmeans.mean(far_only)});
    out.push_back({"kmeans-rope", far_only, roped.mean(far_only)});
  }
  return out;
}

}  // namespace sqz::training
