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

void RecallSum::add(const at::Tensor& scores, const RecallSamples& samples, bool shares) {
  const at::Tensor far = samples.far.to(at::kDouble);
  const auto add_to = [&](Sums& sums, double selectivity, const at::Tensor& sizes) {
    const at::Tensor order = shares ? scores / sizes.clamp_min(1).sqrt() : scores;
    const at::Tensor recall = recall_at(selectivity, order, sizes, samples.masses).to(at::kDouble);
    sums.all += recall.sum().item<double>();
    sums.far += (recall * far).sum().item<double>();
  };
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    add_to(of_all_keys_[i], kSelectivities[i], samples.sizes);
    add_to(of_far_keys_[i], kSelectivities[i], samples.far_sizes);
  }
  rows_.all += static_cast<double>(far.numel());
  rows_.far += far.sum().item<double>();
}

void RecallSum::add(const at::Tensor& scores, const RecallSamples& samples) {
  add(scores, samples, false);
}

void RecallSum::add_shares(const at::Tensor& shares, const RecallSamples& samples) {
  add(shares, samples, true);
}

std::vector<QmodelRecall> RecallSum::mean(bool far_queries, bool far_keys) const {
  std::vector<QmodelRecall> out;
  const double rows = far_queries ? rows_.far : rows_.all;
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    const Sums& sums = far_keys ? of_far_keys_[i] : of_all_keys_[i];
    const double sum = far_queries ? sums.far : sums.all;
    // Masses are float32 and sum to 1 but for rounding.
    out.push_back({kSelectivities[i], rows > 0 ? std::min(sum / rows, 1.0) : 0});
  }
  return out;
}

RecallSamples concatenated(std::span<const RecallSamples> layers) {
  std::vector<at::Tensor> queries, masses, far_sizes, sizes, far;
  for (const RecallSamples& layer : layers) {
    queries.push_back(layer.queries);
    masses.push_back(layer.masses);
    far_sizes.push_back(layer.far_sizes);
    sizes.push_back(layer.sizes);
    far.push_back(layer.far);
  }
  return {at::cat(queries), at::cat(masses), at::cat(far_sizes), at::cat(sizes), at::cat(far)};
}

RecallSum held_out_recall(const FoldedNetwork& network, std::span<const RecallSamples> windows) {
  RecallSum sum;
  for (const RecallSamples& window : windows) {
    sum.add_shares(classifier_scores(network, window.queries, window.masses.size(2)), window);
  }
  return sum;
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
  RecallSum classifier, by_share, kmeans, roped;
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
      const FoldedNetwork networks = heads_of(methods.network, i * heads, heads);
      const at::Tensor shares = classifier_scores(networks, plain.queries, group);
      classifier.add_shares(shares, plain);
      by_share.add(shares, plain);
      kmeans.add(centroid_scores(plain.queries, mine(methods.centroids), group), plain);
      const RecallSamples after = recall_samples(layer, mine(methods.roped_centroids),
                                                 model.attention_scale, plan.far, true);
      roped.add(centroid_scores(after.queries, mine(methods.roped_centroids), group), after);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(run_window(runner, windows[w], pass_of(of_window, windows[w]), measure));
  }
  std::vector<QmodelScores> out;
  for (const bool far_keys : {true, false}) {
    for (const bool far_queries : {false, true}) {
      const auto add = [&](const char* method, const RecallSum& sum) {
        out.push_back({method, far_queries, far_keys, sum.mean(far_queries, far_keys)});
      };
      add("classifier", classifier);
      add("classifier-share", by_share);
      add("kmeans", kmeans);
      add("kmeans-rope", roped);
    }
  }
  return out;
}

}  // namespace sqz::training
