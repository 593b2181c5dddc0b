#include "training/qmodel.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "formats/base/hash.h"
#include "formats/base/parallel.h"
#include "libindex/kmeans.h"
#include "training/model_runner.h"
#include "training/qmodel_recall.h"

namespace sqz {
namespace training {
namespace {

constexpr int64_t kClusterWindows = 16;  // windows that keys for the clustering come from, at most
constexpr int64_t kHeldOutShare = 10;    // one window in so many is held out,
constexpr int64_t kMostHeldOut = 4;      // but no more than these
constexpr int64_t kHeldOutPositions = 256;
// Where each phase ends, of the whole.
constexpr double kClusterDone = 0.1, kCaptureDone = 0.25, kTrainDone = 0.9;

// Streams of random numbers that must not meet.
enum Stream : int64_t {
  kOrder = 1,
  kClusterKeys,
  kPositions,
  kSamples,
  kBatch,
  kMeasure,
  kWeights
};

double mean_recall(const std::vector<QmodelRecall>& rows) {
  double sum = 0;
  for (const QmodelRecall& row : rows) sum += row.recall;
  return sum / static_cast<double>(rows.size());
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

class Training {
 public:
  Training(Runner& runner, const QmodelOptions& options)
      : runner_(runner),
        o_(options),
        model_(runner.config().description),
        device_(options.device) {}

  Result<QmodelTrained> run(std::span<const TokenText> texts, std::span<const TokenText> test);

 private:
  Status prepare(std::span<const TokenText> texts, std::span<const TokenText> test);
  Status start();
  Status train();
  Status check();
  Status capture(int64_t window);
  Result<at::Tensor> draw_keys(std::span<const TokenText> windows, int64_t keys) const;
  Result<at::Tensor> cluster() const;
  Status compare(QmodelTrained& out);
  Result<QmodelTrained> finish();

  // A share of the training, as a share of everything.
  double trained(int64_t step) const {
    return kCaptureDone +
           (kTrainDone - kCaptureDone) * static_cast<double>(step) / static_cast<double>(o_.steps);
  }
  uint64_t seed(Stream stream, int64_t number) const {
    return kmeans_seed(o_.seed, stream, number, 0);
  }
  // A pass over a window for the queries from token `first` on.
  WindowPass window_pass(const TokenText& window, int64_t first, int64_t positions,
                         uint64_t seed) const {
    return {
        draw_positions(first, std::ssize(window.tokens), positions, seed), layers_, device_, {}};
  }
  Result<RecallSamples> recall_samples_of(const TokenText& window, uint64_t seed,
                                          std::function<void(double)> progress) const {
    // So that there are some far keys to tell apart.
    const int64_t first = o_.sink + o_.recent + o_.recent / 2 + 1;
    WindowPass pass = window_pass(window, first, kHeldOutPositions, seed);
    pass.progress = std::move(progress);
    return window_recall_samples(runner_, window, centroids_, far_, pass);
  }

  Runner& runner_;
  const QmodelOptions& o_;
  const ModelDescription& model_;
  at::Device device_;

  FarKeys far_;
  std::vector<int64_t> layers_, dense_;
  NetworkShape shape_;
  std::vector<TokenText> windows_, held_out_, test_;
  int64_t tokens_ = 0;
  std::string texts_hash_;
  std::unique_ptr<SamplePool> pool_;
  std::vector<RecallSamples> held_out_samples_;

  at::Tensor centroids_;  // [n, C, d], before RoPE
  std::unique_ptr<Network> network_;
  FoldedNetwork best_;       // of the best check so far
  double best_recall_ = -1;  // mean over the selectivities; -1: no check yet
  int64_t best_step_ = 0;
  at::Tensor loss_sum_;  // on the device: over the steps since the last check
  int64_t loss_steps_ = 0;
  double loss_ = 0;  // of the last check
};

// Everything that can be refused before the model runs is.
Status Training::prepare(std::span<const TokenText> texts, std::span<const TokenText> test) {
  far_ = {o_.sink, o_.recent};
  for (int64_t l = 0; l < model_.layers; ++l) {
    const bool listed = std::find(o_.dense.begin(), o_.dense.end(), l) != o_.dense.end();
    const bool windowed = model_.sliding_window[static_cast<size_t>(l)] > 0;
    (listed || windowed ? dense_ : layers_).push_back(l);
  }
  if (layers_.empty()) {
    return {Code::kInvalidArgument, "no layer is left to train: all are dense or have a window"};
  }
  shape_ = {std::ssize(layers_) * model_.kv_heads, model_.head_dim, o_.hidden, o_.buckets};

  std::vector<TokenText> all = cut_windows(texts, o_);
  test_ = cut_windows(test, o_);
  const auto count = std::ssize(all);
  const int64_t needed = std::max(kLeastBucketKeys * o_.buckets, o_.window);
  for (const TokenText& window : all) tokens_ += std::ssize(window.tokens);
  const int64_t held_out = std::clamp<int64_t>(count / kHeldOutShare, 1, kMostHeldOut);
  if (count < 2 || tokens_ * (count - held_out) / count < needed) {
    return {Code::kCorrupt,
            bad_field(texts.empty() ? "texts" : texts.front().name, "tokens to train on",
                      concat(tokens_, " in ", count, " windows"),
                      concat("at least ", needed, " for ", o_.buckets, " buckets, in windows of ",
                             o_.window,
                             " tokens (half of it at least), and one window more to "
                             "measure with"))};
  }
  if (!test.empty() && test_.empty()) {
    return {Code::kCorrupt,
            bad_field(test.front().name, "tokens to measure with", "no window",
                      concat("one of ", o_.window, " tokens (half of it at least)"))};
  }
  Xxh3Stream hash;
  for (const TokenText& window : all) hash.update(std::as_bytes(std::span(window.tokens)));
  texts_hash_ = hex(hash.digest());
  for (const int64_t i : shuffled(count, seed(kOrder, 0))) {
    auto& to = std::ssize(held_out_) < held_out ? held_out_ : windows_;
    to.push_back(std::move(all[static_cast<size_t>(i)]));
  }
  return {};
}

// `keys` of each KV head, drawn evenly from the windows: [layers, Hkv, keys, d] on the CPU.
Result<at::Tensor> Training::draw_keys(std::span<const TokenText> windows, int64_t keys) const {
  const int64_t count = std::ssize(windows);
  at::Tensor out =
      at::empty({std::ssize(layers_), model_.kv_heads, keys, model_.head_dim}, at::kFloat);
  int64_t filled = 0;
  for (int64_t w = 0; w < count; ++w) {
    const TokenText& window = windows[static_cast<size_t>(w)];
    const std::vector<int64_t> tokens =
        draw_positions(o_.sink, std::ssize(window.tokens), keys * (w + 1) / count - filled,
                       kmeans_seed(seed(kClusterKeys, 0), w, 0, 0));
    const at::Tensor rows = at::tensor(tokens, at::kLong).to(device_);
    const WindowPass pass = {{}, layers_, device_, [&](double done) {
                               o_.progress(kClusterDone / 2 * (static_cast<double>(w) + done) /
                                           static_cast<double>(count));
                             }};
    SQZ_RETURN_IF_ERROR(run_window(runner_, window, pass, [&](int64_t i, const WindowLayer& layer) {
      out.select(0, i).narrow(1, filled, rows.size(0)).copy_(layer.keys.index_select(1, rows));
      return Status();
    }));
    filled += rows.size(0);
  }
  // A short window may have had fewer keys than its share.
  return out.narrow(2, 0, filled).contiguous();
}

// Spherical k-means, by libindex, of keys from as few windows as have enough, as long as there are
// several: unit vectors [n, C, d].
Result<at::Tensor> Training::cluster() const {
  int64_t windows = 0, found = 0;
  const int64_t wanted = o_.keys_per_bucket * o_.buckets;
  for (const TokenText& window : windows_) {
    if (windows >= kClusterWindows && found >= wanted) break;
    found += std::ssize(window.tokens) - o_.sink;
    ++windows;
  }
  SQZ_ASSIGN_OR_RETURN(
      const at::Tensor keys,
      draw_keys(std::span(windows_).first(static_cast<size_t>(windows)), std::min(wanted, found)));
  const int64_t heads = keys.size(1), count = keys.size(2), dim = keys.size(3);
  SQZ_ASSIGN_OR_RETURN(const auto engine,
                       make_kmeans_engine({.name = "auto", .dim = dim, .gpu = 0}));
  std::vector<at::Tensor> out;
  std::vector<int32_t> assignment(static_cast<size_t>(heads * count));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const at::Tensor layer = keys.select(0, static_cast<int64_t>(i));
    std::vector<KmeansProblem> problems(static_cast<size_t>(heads));
    for (int64_t head = 0; head < heads; ++head) {
      KmeansProblem& problem = problems[static_cast<size_t>(head)];
      problem.points = layer.data_ptr<float>() + head * count * dim;
      problem.count = count;
      problem.dim = dim;
      problem.clusters = o_.buckets;
      problem.seed = kmeans_seed(seed(kClusterKeys, 0), layers_[i], head, 1);
      problem.assignment = assignment.data() + head * count;
    }
    SQZ_RETURN_IF_ERROR(engine->run(problems, resolve_threads(o_.threads), {}));
    for (const KmeansProblem& problem : problems) {
      SQZ_ASSIGN_OR_RETURN(at::Tensor directions, mean_directions(problem, layers_[i]));
      out.push_back(std::move(directions));
    }
    o_.progress(kClusterDone / 2 *
                (1 + static_cast<double>(i + 1) / static_cast<double>(layers_.size())));
  }
  return at::stack(out).to(device_);
}

Status Training::start() {
  network_ = std::make_unique<Network>(shape_, seed(kWeights, 0), device_);
  best_ = network_->fold();
  SQZ_ASSIGN_OR_RETURN(centroids_, cluster());
  loss_sum_ = at::zeros({}, at::TensorOptions(at::kDouble).device(device_));
  const uint64_t bytes = SamplePool::window_bytes(shape_, o_.queries);
  const auto fit = static_cast<int64_t>(std::max<uint64_t>(o_.memory / bytes, 1));
  pool_ = std::make_unique<SamplePool>(shape_, std::min(fit, std::ssize(windows_)), o_.queries,
                                       device_);
  for (size_t i = 0; i < held_out_.size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(
        RecallSamples samples,
        recall_samples_of(held_out_[i], seed(kMeasure, static_cast<int64_t>(i)), {}));
    held_out_samples_.push_back(std::move(samples));
  }
  return {};
}

Status Training::capture(int64_t number) {
  const TokenText& window = windows_[static_cast<size_t>(number)];
  WindowPass pass =
      window_pass(window, o_.sink + o_.recent + 1, o_.positions, seed(kPositions, number));
  pass.progress = [&](double done) {  // windows beyond the pool's come during the training
    const double part =
        std::min(1.0, (static_cast<double>(number) + done) / static_cast<double>(pool_->windows()));
    o_.progress(kClusterDone + (kCaptureDone - kClusterDone) * part);
  };
  const int64_t heads = model_.kv_heads;
  return run_window(runner_, window, pass, [&](int64_t i, const WindowLayer& layer) {
    const at::Tensor centroids = centroids_.narrow(0, i * heads, heads);
    pool_->put(
        number, i * heads,
        train_samples(layer, centroids, model_.attention_scale, far_,
                      {o_.queries, o_.near_queries, kmeans_seed(o_.seed, kSamples, number, i)}));
    return Status();
  });
}

Status Training::check() {
  loss_ = loss_sum_.item<double>() / static_cast<double>(loss_steps_);
  if (!std::isfinite(loss_)) {
    return {Code::kNumeric, concat("the loss is not a number at step ", network_->steps(),
                                   "; use a smaller learning rate")};
  }
  loss_sum_.zero_();
  loss_steps_ = 0;
  QmodelCheck found;
  const FoldedNetwork folded = network_->fold();
  RecallSum held_out;
  for (const RecallSamples& samples : held_out_samples_) {
    held_out.add_window(classifier_scores(folded, samples), samples);
  }
  found.recall = held_out.mean(false);
  found.far_recall = held_out.mean(true);
  // The recall of queries in the mixture that the network learns from.
  const double mean = (1 - o_.near_queries) * mean_recall(found.far_recall) +
                      o_.near_queries * mean_recall(found.recall);
  if (mean > best_recall_) {
    best_recall_ = mean;
    best_step_ = network_->steps();
    best_ = folded;
  }
  found.step = network_->steps();
  found.loss = loss_;
  o_.check(found);
  return {};
}

Status Training::train() {
  const auto windows = std::ssize(windows_);
  const int64_t pool = pool_->windows();
  // Each window beyond the pool's comes once, evenly over the steps.
  const int64_t pace = std::max<int64_t>(1, o_.steps / std::max<int64_t>(windows - pool, 1));
  const int64_t between_checks = (o_.steps + o_.checks - 1) / o_.checks;
  const auto wanted = [&] { return std::min<int64_t>(windows, pool + network_->steps() / pace); };
  int64_t captured = std::max<int64_t>(0, wanted() - pool);
  while (network_->steps() < o_.steps) {
    for (; captured < wanted(); ++captured) SQZ_RETURN_IF_ERROR(capture(captured));
    const int64_t step = network_->steps();
    const double done = static_cast<double>(step) / static_cast<double>(o_.steps);
    const double rate =
        o_.learning_rate * (o_.decay ? (1 + std::cos(std::numbers::pi * done)) / 2 : 1);
    const NetworkBatch batch = pool_->draw(captured, o_.batch, seed(kBatch, step));
    loss_sum_ += network_->train(batch, rate).mean(at::kDouble);
    ++loss_steps_;
    if (network_->steps() % between_checks == 0 || network_->steps() == o_.steps) {
      SQZ_RETURN_IF_ERROR(check());
    }
    o_.progress(trained(step));
  }
  return {};
}

// Measures the classifier and k-means on windows that were not trained on.
Status Training::compare(QmodelTrained& out) {
  const std::span<const TokenText> measured = test_.empty() ? held_out_ : test_;
  const auto count = std::ssize(measured);
  RecallSum classifier, kmeans;
  for (int64_t w = 0; w < count; ++w) {
    SQZ_ASSIGN_OR_RETURN(
        const RecallSamples samples,
        recall_samples_of(measured[static_cast<size_t>(w)],
                          kmeans_seed(seed(kMeasure, -1), w, 0, 0), [&](double done) {
                            o_.progress(kTrainDone + (1 - kTrainDone) *
                                                         (static_cast<double>(w) + done) /
                                                         static_cast<double>(count));
                          }));
    classifier.add_window(classifier_scores(best_, samples), samples);
    kmeans.add_window(centroid_scores(centroids_, samples), samples);
  }
  for (const bool far : {false, true}) {
    out.scores.push_back(
        {"classifier", far, classifier.mean(far), classifier.standard_errors(far)});
    out.scores.push_back({"kmeans", far, kmeans.mean(far), kmeans.standard_errors(far)});
  }
  out.held_out = count;
  return {};
}

Result<QmodelTrained> Training::finish() {
  QmodelTrained out;
  SQZ_RETURN_IF_ERROR(compare(out));
  out.windows = std::ssize(windows_);
  for (const TokenText& window : windows_) out.tokens += std::ssize(window.tokens);
  out.steps = network_->steps();
  out.loss = loss_;

  QmodelFile& f = out.file;
  f.model = model_;
  f.buckets = o_.buckets;
  f.hidden = o_.hidden;
  f.recent = o_.recent;
  f.dense = dense_;
  f.recall = out.scores.front().recall;
  f.training = {{"texts", texts_hash_},
                {"window", o_.window},
                {"sink", o_.sink},
                {"first_token", o_.first_token},
                {"steps", o_.steps},
                {"batch", o_.batch},
                {"lr", o_.learning_rate},
                {"decay", o_.decay},
                {"positions", o_.positions},
                {"queries", o_.queries},
                {"near_queries", o_.near_queries},
                {"keys_per_bucket", o_.keys_per_bucket},
                {"checks", o_.checks},
                {"seed", o_.seed},
                {"memory", o_.memory},
                {"device", o_.device},
                {"best_step", best_step_},
                {"windows", out.windows},
                {"tokens", out.tokens}};
  f.layers.resize(static_cast<size_t>(model_.layers));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto copy = [&](const at::Tensor& heads, std::vector<float>& to) {
      const at::Tensor mine =
          heads.narrow(0, static_cast<int64_t>(i) * model_.kv_heads, model_.kv_heads)
              .cpu()
              .contiguous();
      to.assign(mine.data_ptr<float>(), mine.data_ptr<float>() + mine.numel());
    };
    QmodelLayer& layer = f.layers[static_cast<size_t>(layers_[i])];
    copy(centroids_, layer.centroids);
    copy(best_.hidden_weight, layer.hidden_weight);
    copy(best_.hidden_bias, layer.hidden_bias);
    copy(best_.output_weight, layer.output_weight);
    copy(best_.output_bias, layer.output_bias);
  }
  return out;
}

Result<QmodelTrained> Training::run(std::span<const TokenText> texts,
                                    std::span<const TokenText> test) {
  SQZ_RETURN_IF_ERROR(prepare(texts, test));
  SQZ_RETURN_IF_ERROR(start());
  SQZ_RETURN_IF_ERROR(train());
  return finish();
}

Status check_options(const QmodelOptions& o, const ModelDescription& model) {
  const int64_t least = 4 * (o.recent + o.sink) + 4;
  if (o.window < least || o.window > model.max_positions) {
    return {Code::kInvalidArgument,
            concat("window: found ", o.window, ", expected at least ", least, " and at most ",
                   model.max_positions, ", the positions of the model")};
  }
  for (const int64_t layer : o.dense) {
    if (layer >= 0 && layer < model.layers) continue;
    return {Code::kInvalidArgument,
            concat("dense: found ", layer, ", expected a layer below ", model.layers)};
  }
  return {};
}

}  // namespace
}  // namespace training

Result<QmodelTrained> train_qmodel(Runner& runner, std::span<const TokenText> texts,
                                   std::span<const TokenText> test, const QmodelOptions& options) {
  SQZ_RETURN_IF_ERROR(training::check_options(options, runner.config().description));
  return training::guarded([&] { return training::Training(runner, options).run(texts, test); });
}

}  // namespace sqz
