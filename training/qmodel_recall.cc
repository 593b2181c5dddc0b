#include "training/qmodel_recall.h"

#include <algorithm>
#include <cmath>

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

at::Tensor classifier_shares(const FoldedNetwork& network, const at::Tensor& queries,
                             const at::Tensor& far_sizes, int64_t group) {
  const int64_t heads = queries.size(0), buckets = far_sizes.size(2);
  const at::Tensor logits = bucket_logits(network, queries).view({heads, -1, group, buckets});
  return (logits + log_sizes(far_sizes).unsqueeze(2)).softmax(3).sum(2);
}

at::Tensor shares_of_a_key(const at::Tensor& shares, const at::Tensor& far_sizes) {
  return shares / far_sizes.clamp_min(1);
}

void RecallSum::add(const at::Tensor& scores, const RecallSamples& samples) {
  const at::Tensor far = samples.far.to(at::kDouble);
  for (size_t keys = 0; keys < samples.sizes.size(); ++keys) {
    for (size_t i = 0; i < std::size(kSelectivities); ++i) {
      const at::Tensor recall =
          recall_at(kSelectivities[i], scores, samples.sizes[keys], samples.masses).to(at::kDouble);
      open_.found[keys][0][i] += recall.sum().item<double>();
      open_.found[keys][1][i] += (recall * far).sum().item<double>();
    }
  }
  open_.queries[0] += static_cast<double>(far.numel());
  open_.queries[1] += far.sum().item<double>();
}

void RecallSum::end_window() {
  windows_.push_back(open_);
  open_ = {};
}

std::vector<QmodelRecall> RecallSum::mean(bool far_queries, QmodelKeys keys) const {
  std::vector<QmodelRecall> out;
  for (size_t i = 0; i < std::size(kSelectivities); ++i) {
    double found = 0, queries = 0;
    for (const Window& window : windows_) {
      found += window.found[static_cast<size_t>(keys)][far_queries][i];
      queries += window.queries[far_queries];
    }
    // Masses are float32 and sum to 1 but for rounding.
    out.push_back({kSelectivities[i], queries > 0 ? std::min(found / queries, 1.0) : 0});
  }
  return out;
}

std::vector<double> RecallSum::standard_errors(bool far_queries, QmodelKeys keys) const {
  const std::vector<QmodelRecall> means = mean(far_queries, keys);
  const auto count = static_cast<double>(windows_.size());
  std::vector<double> out(means.size());
  for (size_t i = 0; i < means.size() && count > 1; ++i) {
    double squares = 0, queries = 0;
    for (const Window& window : windows_) {
      const double own = window.queries[far_queries];
      const double off =
          window.found[static_cast<size_t>(keys)][far_queries][i] - own * means[i].recall;
      squares += off * off;
      queries += own;
    }
    if (queries > 0) out[i] = std::sqrt(squares * count / (count - 1)) / queries;
  }
  return out;
}

RecallSamples concatenated(std::span<const RecallSamples> layers) {
  std::vector<at::Tensor> queries, masses, far;
  std::array<std::vector<at::Tensor>, 3> sizes;
  for (const RecallSamples& layer : layers) {
    queries.push_back(layer.queries);
    masses.push_back(layer.masses);
    far.push_back(layer.far);
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i].push_back(layer.sizes[i]);
  }
  return {at::cat(queries),
          at::cat(masses),
          at::cat(far),
          {at::cat(sizes[0]), at::cat(sizes[1]), at::cat(sizes[2])}};
}

RecallSum held_out_recall(const FoldedNetwork& network, std::span<const RecallSamples> windows) {
  RecallSum sum;
  for (const RecallSamples& window : windows) {
    const at::Tensor& sizes = window.sizes_of(QmodelKeys::kFar);
    const at::Tensor shares =
        classifier_shares(network, window.queries, sizes, window.masses.size(2));
    sum.add(shares_of_a_key(shares, sizes), window);
    sum.end_window();
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
      const at::Tensor& sizes = plain.sizes_of(QmodelKeys::kFar);
      const at::Tensor shares = classifier_shares(networks, plain.queries, sizes, group);
      classifier.add(shares_of_a_key(shares, sizes), plain);
      by_share.add(shares, plain);
      kmeans.add(centroid_scores(plain.queries, mine(methods.centroids), group), plain);
      const RecallSamples after = recall_samples(layer, mine(methods.roped_centroids),
                                                 model.attention_scale, plan.far, true);
      roped.add(centroid_scores(after.queries, mine(methods.roped_centroids), group), after);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(run_window(runner, windows[w], pass_of(of_window, windows[w]), measure));
    for (RecallSum* sum : {&classifier, &by_share, &kmeans, &roped}) sum->end_window();
  }
  std::vector<QmodelScores> out;
  for (const QmodelKeys keys : {QmodelKeys::kWindow, QmodelKeys::kSeen, QmodelKeys::kFar}) {
    for (const bool far_queries : {false, true}) {
      const auto add = [&](const char* method, const RecallSum& sum) {
        out.push_back({method, far_queries, keys, sum.mean(far_queries, keys),
                       sum.standard_errors(far_queries, keys)});
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
