#include "tools/sqz_index/build_index.h"

#include <algorithm>
#include <numeric>

#include "formats/base/stopwatch.h"

namespace sqz {
namespace {

// Adds a layer. The model or the capture is half of its work, clustering the other half.
Status add_layer(IndexBuilder& builder, int64_t layer, const LayerInput& input, int64_t layers,
                 Progress& progress, double& seconds) {
  const auto show = [&](double part) {
    progress.update((static_cast<double>(layer) + part) / static_cast<double>(layers));
  };
  show(0.5);
  const Stopwatch watch;
  const Status status = builder.add_layer(layer, input, [&](int64_t done, int64_t total) {
    show(0.5 + 0.5 * static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1)));
  });
  seconds += watch.seconds();
  return status;
}

// Queries of the last `count` positions of each head, out of [heads, positions, dim].
std::vector<float> last_queries(const CapturedLayer& layer, const CaptureInfo& info,
                                const LayerGeometry& model, int64_t count) {
  const auto positions = static_cast<int64_t>(info.query_positions.size());
  if (positions == count || layer.queries.empty()) return layer.queries;
  std::vector<float> out;
  out.reserve(static_cast<size_t>(model.query_heads * count * model.head_dim));
  for (int64_t head = 0; head < model.query_heads; ++head) {
    const auto end = layer.queries.begin() + (head + 1) * positions * model.head_dim;
    out.insert(out.end(), end - count * model.head_dim, end);
  }
  return out;
}

Status check_capture(const CaptureInfo& info, const std::string& path, int64_t tail) {
  const auto tokens = static_cast<int64_t>(info.tokens.size());
  tail = std::min(tail, tokens);
  const auto count = static_cast<int64_t>(info.query_positions.size());
  // Positions ascend and end below `tokens`: if this one is right, all after it are.
  if (count >= tail && info.query_positions[static_cast<size_t>(count - tail)] == tokens - tail) {
    return {};
  }
  return {Code::kMismatch,
          bad_field(path, "/query_positions",
                    concat(count, " positions that do not end with the last ", tail, " tokens"),
                    concat("the positions ", tokens - tail, " to ", tokens - 1,
                           "; capture the queries of so many tokens, or pass a smaller --tail"))};
}

Status run_model(Runner& runner, const BuildInput& input, IndexBuilder& builder, Progress& progress,
                 double& adding) {
  const std::span<const int32_t> tokens = input.tokens.ids;
  const int64_t layers = runner.config().description.layers;
  PrefillOptions pass;
  pass.query_positions.resize(
      static_cast<size_t>(std::min(std::ssize(tokens), builder.options().tail)));
  std::iota(pass.query_positions.begin(), pass.query_positions.end(),
            std::ssize(tokens) - std::ssize(pass.query_positions));
  pass.attention = builder.options().heavy_hitters;
  pass.context = input.front;
  pass.on_device = builder.takes_device_rows();
  pass.consumer = [&](const LayerCapture& layer) {
    return add_layer(builder, layer.layer,
                     {layer.keys, layer.values, layer.queries, layer.device, layer.attention},
                     layers, progress, adding);
  };
  return runner.prefill(tokens, pass);
}

Status read_capture(const CaptureReader& capture, const std::string& path, IndexBuilder& builder,
                    Progress& progress, double& adding) {
  const CaptureInfo& info = capture.info();
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    SQZ_ASSIGN_OR_RETURN(const CapturedLayer data, capture.read_layer(layer));
    const std::vector<float> queries =
        last_queries(data, info, info.model.layer(layer),
                     std::min(std::ssize(info.tokens), builder.options().tail));
    if (info.model.layer(layer).has_keys()) {
      const Status status = add_layer(builder, layer, {data.keys, data.values, queries, nullptr},
                                      info.model.layers, progress, adding);
      const bool of_file =  // what a caller of the library gave is the file's here
          status.code() == Code::kInvalidArgument || status.code() == Code::kNumeric;
      if (of_file) return {Code::kCorrupt, concat(path, ": ", status.message())};
      SQZ_RETURN_IF_ERROR(status);
    }
    for (size_t i = 0; i < data.state.size(); ++i) {
      StateTensor state = info.state[static_cast<size_t>(layer)][i];
      state.data = data.state[i].data();
      SQZ_RETURN_IF_ERROR(builder.add_state(layer, state));
    }
  }
  return {};
}

}  // namespace

Result<BuildInput> open_capture(const std::string& path, const BuildOptions& options) {
  BuildInput out;
  SQZ_ASSIGN_OR_RETURN(out.capture, CaptureReader::open(path));
  const CaptureInfo& info = out.capture->info();
  SQZ_RETURN_IF_ERROR(check_capture(info, path, options.tail));
  out.model = info.model;
  out.tokens = {info.tokens, info.tokenizer_hash, path};
  out.options = options;
  out.options.pass.clear();  // not known
  out.options.state = info.state;
  return out;
}

Result<BuildReport> build_index(IndexBuilder& builder, const BuildInput& input, Runner* runner,
                                Progress& progress) {
  const Stopwatch watch;
  double adding = 0;
  SQZ_RETURN_IF_ERROR(
      input.capture != nullptr
          ? read_capture(*input.capture, input.tokens.source, builder, progress, adding)
          : run_model(*runner, input, builder, progress, adding));
  const double capture = watch.seconds() - adding;
  SQZ_ASSIGN_OR_RETURN(BuildReport report, builder.finish());
  report.seconds.capture = capture;
  progress.finish();
  return report;
}

}  // namespace sqz
