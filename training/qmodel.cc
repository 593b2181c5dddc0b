#include "training/qmodel.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "formats/base/hash.h"
#include "formats/sqz_container.h"
#include "libindex/kmeans.h"
#include "training/model_runner.h"
#include "training/qmodel_centroids.h"
#include "training/qmodel_network.h"
#include "training/qmodel_pool.h"
#include "training/qmodel_recall.h"

namespace sqz {
namespace training {
namespace {

constexpr int64_t kClusterWindows = 16;  // windows that keys for the clustering come from, at most
constexpr int64_t kHeldOutShare = 10;    // one window in so many is held out,
constexpr int64_t kMostHeldOut = 4;      // but no more than these
constexpr int64_t kHeldOutPositions = 256;
constexpr int64_t kLossSync = 64;  // steps between looks at the loss
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

struct TrainingState {
  at::Tensor centroids;  // [n, C, d], before RoPE
  Network network;
  FoldedNetwork best;       // of the best check so far
  double best_recall = -1;  // mean over the selectivities; -1: no check yet
  int64_t best_step = 0;
  int64_t last_better = 0;  // checks since
  double loss_sum = 0;      // over the steps since the last check
  int64_t loss_steps = 0;
  double loss = 0;  // of the last check
};

class Training {
 public:
  Training(Runner& runner, const QmodelOptions& options)
      : runner_(runner),
        o_(options),
        model_(runner.config().description),
        device_(options.device) {}

  Result<QmodelTrained> run(std::span<const QmodelText> texts, std::span<const QmodelText> test);

 private:
  Status prepare(std::span<const QmodelText> texts, std::span<const QmodelText> test);
  Status start();
  Status train();
  Status check();
  Status capture(int64_t window);
  Result<at::Tensor> cluster(bool roped, double from, double to, const char* phase);
  Result<QmodelTrained> finish();

  Status report(const char* phase, double done);
  Status fetch_loss();
  JsonMembers settings() const;
  bool stopped_early() const { return state_.last_better >= o_.patience; }
  uint64_t seed(Stream stream, int64_t number) const {
    return kmeans_seed(o_.seed, stream, number, 0);
  }
  RecallPlan recall_plan() const {
    RecallPlan plan;
    plan.far = far_;
    plan.positions = kHeldOutPositions;
    plan.layers = layers_;
    plan.device = device_;
    return plan;
  }

  Runner& runner_;
  const QmodelOptions& o_;
  const ModelDescription& model_;
  at::Device device_;

  FarKeys far_;
  std::vector<int64_t> layers_, dense_;
  NetworkShape shape_;
  std::vector<QmodelWindow> windows_, held_out_, test_;
  int64_t tokens_ = 0;
  std::string texts_hash_;
  std::unique_ptr<SamplePool> pool_;
  std::vector<RecallSamples> held_out_samples_;
  TrainingState state_;
  at::Tensor loss_;  // on the device: sum since the last look at it
};

Status Training::report(const char* phase, double done) {
  if (!o_.progress) return {};
  QmodelProgress progress;
  progress.phase = phase;
  progress.done = done;
  progress.step = state_.network.step;
  return o_.progress(progress);
}

// Everything that can be refused before the model runs is.
Status Training::prepare(std::span<const QmodelText> texts, std::span<const QmodelText> test) {
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

  std::vector<QmodelWindow> all = cut_windows(texts, o_);
  test_ = cut_windows(test, o_);
  const auto count = std::ssize(all);
  const int64_t needed = std::max(kLeastBucketKeys * o_.buckets, o_.window);
  for (const QmodelWindow& window : all) tokens_ += std::ssize(window.tokens);
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
  for (const QmodelWindow& window : all) hash.update(std::as_bytes(std::span(window.tokens)));
  texts_hash_ = hex(hash.digest());
  for (const int64_t i : shuffled(count, seed(kOrder, 0))) {
    auto& to = std::ssize(held_out_) < held_out ? held_out_ : windows_;
    to.push_back(std::move(all[static_cast<size_t>(i)]));
  }
  return {};
}

JsonMembers Training::settings() const {
  return {{"model", fingerprint(model_)},
          {"texts", texts_hash_},
          {"buckets", o_.buckets},
          {"hidden", o_.hidden},
          {"window", o_.window},
          {"recent", o_.recent},
          {"sink", o_.sink},
          {"first_token", o_.first_token},
          {"dense", JsonText(dense_).str()},
          {"steps", o_.steps},
          {"batch", o_.batch},
          {"lr", o_.learning_rate},
          {"decay", o_.decay},
          {"positions", o_.positions},
          {"queries", o_.queries},
          {"near_queries", o_.near_queries},
          {"keys_per_bucket", o_.keys_per_bucket},
          {"checks", o_.checks},
          {"patience", o_.patience},
          {"seed", o_.seed},
          {"memory", o_.memory},
          {"device", o_.device},
          {"run_dtype", o_.run_dtype}};
}

Result<at::Tensor> Training::cluster(bool roped, double from, double to, const char* phase) {
  CentroidOptions options;
  options.buckets = o_.buckets;
  options.roped = roped;
  options.sink = o_.sink;
  options.seed = seed(kClusterKeys, 0);
  options.threads = o_.threads;
  options.layers = layers_;
  options.device = device_;
  options.progress = [&](double done) { return report(phase, from + (to - from) * done); };
  // As few windows as have enough keys, as long as there are several.
  int64_t windows = 0, keys = 0;
  const int64_t wanted = o_.keys_per_bucket * o_.buckets;
  for (const QmodelWindow& window : windows_) {
    if (windows >= kClusterWindows && keys >= wanted) break;
    keys += std::ssize(window.tokens) - o_.sink;
    ++windows;
  }
  options.keys = std::min(wanted, keys);
  SQZ_ASSIGN_OR_RETURN(const at::Tensor centroids,
                       find_centroids(runner_, std::span(windows_).first(windows), options));
  return centroids.view({shape_.heads, shape_.buckets, shape_.dim}).to(device_);
}

Status Training::start() {
  SQZ_ASSIGN_OR_RETURN(state_.centroids, cluster(false, 0, kClusterDone, "cluster"));
  state_.network = make_network(shape_, seed(kWeights, 0), device_);
  state_.best = fold(state_.network);
  loss_ = at::zeros({}, at::TensorOptions(at::kDouble).device(device_));
  const uint64_t bytes = SamplePool::window_bytes(shape_, o_.queries);
  const auto fit = static_cast<int64_t>(std::max<uint64_t>(o_.memory / bytes, 1));
  pool_ = std::make_unique<SamplePool>(shape_, std::min(fit, std::ssize(windows_)), o_.queries,
                                       device_);
  for (size_t i = 0; i < held_out_.size(); ++i) {
    RecallPlan plan = recall_plan();
    plan.seed = seed(kMeasure, static_cast<int64_t>(i));
    plan.progress = [&](double) { return report("capture", kClusterDone); };
    SQZ_ASSIGN_OR_RETURN(RecallSamples samples,
                         window_recall_samples(runner_, held_out_[i], state_.centroids, plan));
    held_out_samples_.push_back(std::move(samples));
  }
  return {};
}

Status Training::capture(int64_t number) {
  const QmodelWindow& window = windows_[static_cast<size_t>(number)];
  const bool training = state_.network.step > 0 || number >= pool_->windows();
  const double trained = static_cast<double>(state_.network.step) / static_cast<double>(o_.steps);
  WindowPass pass;
  pass.layers = layers_;
  pass.device = device_;
  pass.positions = draw_positions(o_.sink + o_.recent + 1, std::ssize(window.tokens), o_.positions,
                                  seed(kPositions, number));
  pass.progress = [&](double done) {
    if (training) return report("train", kCaptureDone + (kTrainDone - kCaptureDone) * trained);
    const double part =
        (static_cast<double>(number) + done) / static_cast<double>(pool_->windows());
    return report("capture", kClusterDone + (kCaptureDone - kClusterDone) * part);
  };
  const int64_t heads = model_.kv_heads;
  return run_window(runner_, window, pass, [&](int64_t i, const WindowLayer& layer) {
    const at::Tensor centroids = state_.centroids.narrow(0, i * heads, heads);
    pool_->put(
        number, i * heads,
        train_samples(layer, centroids, model_.attention_scale, far_,
                      {o_.queries, o_.near_queries, kmeans_seed(o_.seed, kSamples, number, i)}));
    return Status();
  });
}

// Moves the loss to the host, and stops where it is no number.
Status Training::fetch_loss() {
  const double sum = loss_.item<double>();
  if (!std::isfinite(sum)) {
    return {Code::kNumeric, concat("the loss is not a number at step ", state_.network.step,
                                   "; use a smaller learning rate")};
  }
  state_.loss_sum += sum;
  loss_.zero_();
  return {};
}

Status Training::check() {
  SQZ_RETURN_IF_ERROR(fetch_loss());
  QmodelProgress progress;
  const RecallSum held_out = held_out_recall(fold(state_.network), held_out_samples_);
  progress.recall = held_out.mean(false, QmodelKeys::kWindow);
  progress.far_recall = held_out.mean(true, QmodelKeys::kWindow);
  // Of queries as they are learned from.
  const double mean = (1 - o_.near_queries) * mean_recall(progress.far_recall) +
                      o_.near_queries * mean_recall(progress.recall);
  state_.loss = state_.loss_sum / static_cast<double>(std::max<int64_t>(state_.loss_steps, 1));
  state_.loss_sum = 0;
  state_.loss_steps = 0;
  ++state_.last_better;
  if (mean > state_.best_recall) {
    state_.best_recall = mean;
    state_.best_step = state_.network.step;
    state_.last_better = 0;
    state_.best = fold(state_.network);
  }
  if (!o_.progress) return {};
  progress.phase = "train";
  progress.checked = true;
  progress.step = state_.network.step;
  progress.loss = state_.loss;
  progress.done = kCaptureDone + (kTrainDone - kCaptureDone) * static_cast<double>(progress.step) /
                                     static_cast<double>(o_.steps);
  return o_.progress(progress);
}

Status Training::train() {
  const auto windows = std::ssize(windows_);
  const int64_t pool = pool_->windows();
  // Each window beyond the pool's comes once, evenly over the steps.
  const int64_t pace = std::max<int64_t>(1, o_.steps / std::max<int64_t>(windows - pool, 1));
  const int64_t between_checks = (o_.steps + o_.checks - 1) / o_.checks;
  const auto wanted = [&] { return std::min<int64_t>(windows, pool + state_.network.step / pace); };
  int64_t captured = std::max<int64_t>(0, wanted() - pool);
  while (state_.network.step < o_.steps && !stopped_early()) {
    for (; captured < wanted(); ++captured) SQZ_RETURN_IF_ERROR(capture(captured));
    const int64_t step = state_.network.step;
    const double done = static_cast<double>(step) / static_cast<double>(o_.steps);
    const double rate =
        o_.learning_rate * (o_.decay ? (1 + std::cos(std::numbers::pi * done)) / 2 : 1);
    const NetworkBatch batch = pool_->draw(captured, o_.batch, seed(kBatch, step));
    const NetworkGradient slope = gradient(state_.network.parameters, batch);
    update(state_.network, slope, rate);
    loss_ += slope.loss.mean(at::kDouble);
    ++state_.loss_steps;
    if (state_.network.step % between_checks == 0 || state_.network.step == o_.steps) {
      SQZ_RETURN_IF_ERROR(check());
    } else if (state_.network.step % kLossSync == 0) {
      SQZ_RETURN_IF_ERROR(fetch_loss());
    }
    SQZ_RETURN_IF_ERROR(report("train", kCaptureDone + (kTrainDone - kCaptureDone) * done));
  }
  return {};
}

Result<QmodelTrained> Training::finish() {
  const std::span<const QmodelWindow> measured = test_.empty() ? held_out_ : test_;
  constexpr double kClusteredAgain = (kTrainDone + 1) / 2;
  MethodTensors methods;
  methods.centroids = state_.centroids;
  methods.network = state_.best;
  SQZ_ASSIGN_OR_RETURN(methods.roped_centroids, cluster(true, kTrainDone, kClusteredAgain, "test"));
  RecallPlan plan = recall_plan();
  plan.seed = seed(kMeasure, -1);
  plan.progress = [&](double done) {
    return report("test", kClusteredAgain + (1 - kClusteredAgain) * done);
  };
  QmodelTrained out;
  SQZ_ASSIGN_OR_RETURN(out.scores, compare_methods(runner_, measured, methods, plan));
  out.windows = std::ssize(windows_);
  for (const QmodelWindow& window : windows_) out.tokens += std::ssize(window.tokens);
  out.held_out = std::ssize(measured);
  out.steps = state_.network.step;
  out.loss = state_.loss;

  QmodelFile& f = out.file;
  f.model = model_;
  f.buckets = o_.buckets;
  f.hidden = o_.hidden;
  f.recent = o_.recent;
  f.dense = dense_;
  f.recall = out.scores.front().recall;
  f.training = settings();
  for (const char* elsewhere : {"model", "buckets", "hidden", "recent", "dense"}) {
    f.training.erase(elsewhere);
  }
  f.has_roped_centroids = o_.roped_centroids;
  f.training["best_step"] = state_.best_step;
  f.training["windows"] = out.windows;
  f.training["tokens"] = out.tokens;
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
    copy(state_.centroids, layer.centroids);
    if (f.has_roped_centroids) copy(methods.roped_centroids, layer.roped_centroids);
    copy(state_.best.hidden_weight, layer.hidden_weight);
    copy(state_.best.hidden_bias, layer.hidden_bias);
    copy(state_.best.output_weight, layer.output_weight);
    copy(state_.best.output_bias, layer.output_bias);
  }
  return out;
}

Result<QmodelTrained> Training::run(std::span<const QmodelText> texts,
                                    std::span<const QmodelText> test) {
  SQZ_RETURN_IF_ERROR(prepare(texts, test));
  SQZ_RETURN_IF_ERROR(start());
  SQZ_RETURN_IF_ERROR(train());
  return finish();
}

Status check_options(const QmodelOptions& o, const ModelDescription& model) {
  const auto at_least = [](const char* name, int64_t found, int64_t least) {
    return found >= least ? Status()
                          : Status(Code::kInvalidArgument,
                                   concat(name, ": found ", found, ", expected at least ", least));
  };
  for (const auto& [name, found, least] : {std::tuple("buckets", o.buckets, int64_t{2}),
                                           {"hidden", o.hidden, 1},
                                           {"recent", o.recent, 0},
                                           {"sink", o.sink, 0},
                                           {"steps", o.steps, 1},
                                           {"batch", o.batch, 2},
                                           {"positions", o.positions, 1},
                                           {"queries", o.queries, 1},
                                           {"keys_per_bucket", o.keys_per_bucket, kLeastBucketKeys},
                                           {"checks", o.checks, 1},
                                           {"patience", o.patience, 1},
                                           {"window", o.window, 4 * (o.recent + o.sink) + 4}}) {
    SQZ_RETURN_IF_ERROR(at_least(name, found, least));
  }
  if (o.window > model.max_positions) {
    return {Code::kInvalidArgument, concat("window: found ", o.window, ", expected at most ",
                                           model.max_positions, ", the positions of the model")};
  }
  if (!(o.learning_rate > 0 && o.learning_rate <= 1)) {
    return {Code::kInvalidArgument,
            concat("learning rate: found ", o.learning_rate, ", expected a number in (0, 1]")};
  }
  for (const int64_t layer : o.dense) {
    if (layer >= 0 && layer < model.layers) continue;
    return {Code::kInvalidArgument,
            concat("dense: found ", layer, ", expected a layer below ", model.layers)};
  }
  if (!(o.near_queries >= 0 && o.near_queries <= 1)) {
    return {Code::kInvalidArgument,
            concat("near queries: found ", o.near_queries, ", expected a share, 0 to 1")};
  }
  return {};
}

}  // namespace
}  // namespace training

const char* qmodel_keys_name(QmodelKeys keys) {
  constexpr const char* kNames[] = {"window", "seen", "far"};
  return kNames[static_cast<size_t>(keys)];
}

Result<QmodelTrained> train_qmodel(Runner& runner, std::span<const QmodelText> texts,
                                   std::span<const QmodelText> test, const QmodelOptions& options) {
  SQZ_RETURN_IF_ERROR(training::check_options(options, runner.config().description));
  return training::guarded([&] { return training::Training(runner, options).run(texts, test); });
}

}  // namespace sqz
