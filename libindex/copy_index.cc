#include "libindex/copy_index.h"

namespace sqz {

Result<uint64_t> copy_index(Env& env, const SqzFile& index, IndexMetadata metadata,
                            const Calibration& calibration, const std::string& output, bool replace,
                            const std::function<void(double)>& progress,
                            const std::function<Status(SqzWriter&, int64_t)>& put) {
  metadata.producer.clear();  // this build's
  const int64_t layers = metadata.model.layers;
  ClusterCounts clusters(static_cast<size_t>(layers));
  for (int64_t layer = 0; layer < layers; ++layer) {
    const LayerView view = index.layer(layer);
    for (int k = 0; k < view.levels; ++k) clusters[layer].push_back(view.level[k].clusters);
  }
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(env, output, replace, std::move(metadata), clusters));
  for (int64_t layer = 0; layer < layers; ++layer) {
    SQZ_RETURN_IF_ERROR(put ? put(*writer, layer) : writer->write_layer(layer, index.layer(layer)));
    if (progress) progress(static_cast<double>(layer + 1) / static_cast<double>(layers));
  }
  return writer->commit(calibration);
}

}  // namespace sqz
