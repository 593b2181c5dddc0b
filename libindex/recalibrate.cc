#include "libindex/recalibrate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "formats/base/parallel.h"
#include "libindex/calibrate.h"
#include "libindex/copy_index.h"

namespace sqz {
namespace {

constexpr double kVerifyShare = 0.3;  // of the work, roughly
constexpr double kCalibrateShare = 0.4;

Status check_finite(const RecordedQueries& queries, const ModelDescription& model) {
  const int64_t row = model.query_heads * model.head_dim;
  for (size_t layer = 0; layer < queries.layers.size(); ++layer) {
    const std::vector<float>& given = queries.layers[layer];
    const auto bad =
        std::find_if_not(given.begin(), given.end(), [](float x) { return std::isfinite(x); });
    if (bad == given.end()) continue;
    const int64_t at = bad - given.begin();
    return {Code::kNumeric, concat("calibration queries: layer ", layer, ", query ", at / row,
                                   ", head ", at % row / model.head_dim, ": NaN or infinity")};
  }
  return {};
}

template <class T>
std::vector<T> copy_of(const T* data, int64_t count) {
  return {data, data + count};
}

CalibrationLayer calibration_layer(const SqzFile& index, int64_t layer,
                                   const std::vector<float>& queries, int64_t n) {
  const ModelDescription& model = index.metadata().model;
  const LayerView view = index.layer(layer);
  CalibrationLayer out;
  out.layer = layer;
  for (int k = 0; k < view.levels; ++k) {
    const LevelView& level = view.level[static_cast<size_t>(k)];
    const int64_t bytes = view.kv_heads * level.clusters * view.head_dim * dtype_size(view.dtype);
    out.levels.push_back({copy_of(static_cast<const std::byte*>(level.centroids), bytes),
                          copy_of(level.offsets, view.kv_heads * (level.clusters + 1))});
  }
  out.queries = group_queries(queries.data(), model.kv_heads, model.group_size(), n, model.head_dim,
                              /*by_token=*/true);
  return out;
}

Result<Calibration> calibrate_index(const SqzFile& index, const RecordedQueries& queries,
                                    int threads) {
  const IndexMetadata& metadata = index.metadata();
  SQZ_ASSIGN_OR_RETURN(const Calibration before, index.calibration());
  CalibrationInput input = calibration_input(metadata, queries.source);
  input.queries = std::accumulate(queries.calls.begin(), queries.calls.end(), int64_t{0});
  input.calls = queries.calls;
  if (!before.coarse_keep.empty()) input.coarse_keep = before.coarse_keep.front();
  for (int64_t layer = 0; layer < input.layers; ++layer) {
    if (metadata.layers[static_cast<size_t>(layer)].dense) continue;
    input.sparse.push_back(
        calibration_layer(index, layer, queries.layers[static_cast<size_t>(layer)], input.queries));
  }
  return calibrate(input, threads);
}

}  // namespace

Status check_calibratable(const SqzFile& index) {
  if (index.metadata().levels > 0) return {};
  return {Code::kUnsupported, index.path() + ": the index has no clusters to calibrate"};
}

Result<uint64_t> recalibrate(Env& env, const SqzFile& index, const RecordedQueries& queries,
                             const std::string& output, const RecalibrateOptions& options,
                             const std::function<void(double)>& progress) {
  const auto show = [&](double done) {
    if (progress) progress(done);
  };
  const auto run = [&]() -> Result<uint64_t> {
    SQZ_RETURN_IF_ERROR(check_calibratable(index));
    SQZ_RETURN_IF_ERROR(check_finite(queries, index.metadata().model));
    const auto show_verify = [&](uint64_t done, uint64_t all) {
      show(kVerifyShare * static_cast<double>(done) /
           static_cast<double>(std::max<uint64_t>(all, 1)));
    };
    SQZ_RETURN_IF_ERROR(index.verify(show_verify, options.threads));
    SQZ_ASSIGN_OR_RETURN(const Calibration calibration,
                         calibrate_index(index, queries, resolve_threads(options.threads)));
    IndexMetadata metadata = index.metadata();
    return copy_index(env, index, std::move(metadata), calibration, output, options.replace,
                      [&](double done) {
                        const double before = kVerifyShare + kCalibrateShare;
                        show(before + (1 - before) * done);
                      });
  };
  return within_memory(run, "not enough memory to calibrate the index");
}

}  // namespace sqz
