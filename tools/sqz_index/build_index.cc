#include "tools/sqz_index/build_index.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "formats/base/stopwatch.h"
#include "tools/common/signals.h"

namespace sqz {
namespace {

constexpr double kBuildShare = 0.8;  // of a build's time before its prompts, roughly

// One bar over two kinds of work that take turns: the dense pass and the clustering of its layers.
// They are the first `part` of what the bar shows.
class BuildProgress {
 public:
  BuildProgress(Progress& progress, int64_t layers, double part)
      : progress_(progress), layers_(static_cast<double>(layers)), part_(part) {}

  void pass(double done) {
    pass_ = done;
    show();
  }
  void heads(int64_t layer, int64_t done, int64_t total) {
    clustered_ = (static_cast<double>(layer) +
                  static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1))) /
                 layers_;
    show();
  }

 private:
  void show() { progress_.update(part_ * (0.5 * pass_ + 0.5 * clustered_)); }

  Progress& progress_;
  double layers_, part_, pass_ = 0, clustered_ = 0;
};

// Queries of the last `count` positions of each head, out of [heads, positions, dim].
std::vector<float> last_queries(const CapturedLayer& layer, const CaptureInfo& info,
                                int64_t count) {
  const ModelDescription& model = info.model;
  const auto positions = static_cast<int64_t>(info.query_positions.size());
  if (positions == count) return layer.queries;
  std::vector<float> out;
  out.reserve(static_cast<size_t>(model.query_heads * count * model.head_dim));
  for (int64_t head = 0; head < model.query_heads; ++head) {
    const auto end = layer.queries.begin() + (head + 1) * positions * model.head_dim;
    out.insert(out.end(), end - count * model.head_dim, end);
  }
  return out;
}

// Removes a file at the end of a scope, if it is there.
class Scratch {
 public:
  explicit Scratch(std::string path) : path_(std::move(path)) {}
  ~Scratch() {
    const Status ignored = Env::posix().remove(path_);
    (void)ignored;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// After a stop, the same command goes on with what a builder has kept.
Result<std::unique_ptr<IndexBuilder>> begin(const ModelDescription& model,
                                            std::span<const int32_t> tokens,
                                            const std::string& tokenizer_hash,
                                            const IndexTarget& target) {
  SQZ_ASSIGN_OR_RETURN(auto builder,
                       IndexBuilder::create(Env::posix(), target.path, target.force, model, tokens,
                                            tokenizer_hash, target.options));
  return builder;
}

Result<BuildReport> finish(IndexBuilder& builder) {
  SQZ_RETURN_IF_ERROR(check_stop());
  SQZ_ASSIGN_OR_RETURN(BuildReport report, builder.finish());
  return report;
}

Result<BuiltIndex> build_pass(Runner& runner, const FixedTokens& tokens, const IndexTarget& target,
                              Progress& progress, double part, TokenGate* gate = nullptr) {
  const ModelDescription& model = runner.config().description;
  SQZ_ASSIGN_OR_RETURN(const auto builder, begin(model, tokens.ids, tokens.tokenizer_hash, target));
  BuildProgress shown(progress, model.layers, part);
  std::optional<TokenGate::Turn> turn;
  if (gate != nullptr) turn.emplace(*gate, std::ssize(tokens.ids));
  const Stopwatch watch;
  double adding = 0;
  PrefillOptions pass;
  pass.query_positions =
      last_positions(static_cast<int64_t>(tokens.ids.size()), target.options.tail);
  pass.attention = target.options.heavy_hitters;
  pass.on_device = builder->takes_device_rows();
  pass.own_stream = gate != nullptr;
  pass.progress = [&](double done) { shown.pass(done); };
  pass.consumer = [&](const LayerCapture& layer) -> Status {
    SQZ_RETURN_IF_ERROR(check_stop());
    const Stopwatch add;
    const Status status = builder->add_layer(
        layer.layer, {layer.keys, layer.values, layer.queries, layer.device, layer.attention},
        [&](int64_t done, int64_t total) { shown.heads(layer.layer, done, total); });
    adding += add.seconds();
    return status;
  };
  SQZ_RETURN_IF_ERROR(runner.prefill(tokens.ids, pass).status());
  turn.reset();
  BuiltIndex out;
  out.capture_seconds = watch.seconds() - adding;
  out.fingerprint = fingerprint(model);
  SQZ_ASSIGN_OR_RETURN(out.report, finish(*builder));
  return out;
}

}  // namespace

std::vector<int64_t> last_positions(int64_t tokens, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(std::min(tokens, count)));
  std::iota(out.begin(), out.end(), tokens - static_cast<int64_t>(out.size()));
  return out;
}

Result<BuiltIndex> find_built(const ModelDescription& model, const FixedTokens& tokens,
                              const IndexTarget& target) {
  BuiltIndex out;
  SQZ_ASSIGN_OR_RETURN(out.report, IndexBuilder::find(Env::posix(), target.path, model, tokens.ids,
                                                      tokens.tokenizer_hash, target.options));
  out.fingerprint = fingerprint(model);
  return out;
}

Result<BuiltIndex> build_from_model(Runner& runner, const FixedTokens& tokens,
                                    const IndexTarget& target, Progress& progress,
                                    TokenGate* gate) {
  SQZ_ASSIGN_OR_RETURN(BuiltIndex out, build_pass(runner, tokens, target, progress, 1, gate));
  progress.finish();
  return out;
}

Result<BuiltIndex> build_with_prompts(Runner& runner, const FixedTokens& tokens,
                                      const IndexTarget& target, const CalibrationPrompts& prompts,
                                      Progress& progress) {
  const Scratch scratch(concat(target.path, ".tmp.", ::getpid(), ".uncalibrated"));
  const IndexTarget uncalibrated{scratch.path(), true, target.options};
  SQZ_ASSIGN_OR_RETURN(BuiltIndex out,
                       build_pass(runner, tokens, uncalibrated, progress, kBuildShare));
  const Stopwatch watch;
  const RecalibrateOptions options{target.force, target.options.threads};
  SQZ_ASSIGN_OR_RETURN(out.report.bytes,
                       calibrate_with_prompts(
                           runner, scratch.path(), prompts, target.path, options, [&](double done) {
                             progress.update(kBuildShare + (1 - kBuildShare) * done);
                           }));
  out.report.seconds.calibrate += watch.seconds();
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(target.path));
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration, index->calibration());
  out.calibration = calibration.source;
  progress.finish();
  return out;
}

Status check_capture(const CaptureInfo& info, const std::string& path, int64_t tail) {
  if (!info.keys_post_rope) {
    return {Code::kUnsupported,
            concat(path,
                   ": keys are from before RoPE, but a k-means index needs keys after it; "
                   "capture again after RoPE (attribute rope = post)")};
  }
  const auto tokens = static_cast<int64_t>(info.tokens.size());
  const auto count = static_cast<int64_t>(info.query_positions.size());
  // Positions ascend and end below `tokens`: if this one is right, all after it are.
  if (count >= tail && info.query_positions[static_cast<size_t>(count - tail)] == tokens - tail) {
    return {};
  }
  return {Code::kMismatch,
          bad_field(path, "/query_positions",
                    concat(count, " positions that do not end with the last ", tail, " tokens"),
                    concat("the positions ", tokens - tail, " to ", tokens - 1,
                           "; capture again with --queries ", tail, " or pass a smaller --tail"))};
}

Result<BuiltIndex> build_from_capture(const CaptureReader& capture, const IndexTarget& target,
                                      Progress& progress) {
  const CaptureInfo& info = capture.info();
  const int64_t tail = target.options.tail;
  SQZ_ASSIGN_OR_RETURN(const auto builder,
                       begin(info.model, info.tokens, info.tokenizer_hash, target));
  BuildProgress shown(progress, info.model.layers, 1);
  BuiltIndex out;
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    SQZ_RETURN_IF_ERROR(check_stop());
    const Stopwatch watch;
    SQZ_ASSIGN_OR_RETURN(const CapturedLayer data, capture.read_layer(layer));
    const std::vector<float> queries = last_queries(data, info, tail);
    out.capture_seconds += watch.seconds();
    shown.pass(static_cast<double>(layer + 1) / static_cast<double>(info.model.layers));
    SQZ_RETURN_IF_ERROR(
        builder->add_layer(layer, {data.keys, data.values, queries, nullptr},
                           [&](int64_t done, int64_t total) { shown.heads(layer, done, total); }));
  }
  SQZ_ASSIGN_OR_RETURN(out.report, finish(*builder));
  out.fingerprint = fingerprint(info.model);
  progress.finish();
  return out;
}

JsonMembers index_json(const std::string& path, const BuiltIndex& index) {
  const BuildReport& report = index.report;
  return {{"path", path},
          {"tokens", report.tokens},
          {"clustered", report.clustered},
          {"clusters", report.clusters},
          {"pages", report.pages},
          {"bytes", report.bytes},
          {"build_id", report.build_id},
          {"resumed", report.resumed},
          {"seconds",
           {{"capture", index.capture_seconds},
            {"cluster", report.seconds.cluster},
            {"calibrate", report.seconds.calibrate},
            {"write", report.seconds.write}}},
          {"engine", report.engine},
          {"calibration", index.calibration},
          {"fingerprint", index.fingerprint}};
}

}  // namespace sqz
