#include "libindex/copy_index.h"

#include <new>

namespace sqz {

LayerShape shape_of(const LayerView& view) {
  LayerShape shape;
  for (int k = 0; k < view.levels; ++k) {
    shape.clusters.push_back(view.level[static_cast<size_t>(k)].clusters);
  }
  shape.slots = view.slots;
  shape.exact = view.exact;
  return shape;
}

Result<uint64_t> copy_index(Env& env, const SqzFile& index, IndexMetadata metadata,
                            const Calibration& calibration, const std::string& output, bool replace,
                            const std::function<void(double)>& progress) {
  metadata.producer.clear();  // this build's
  const int64_t layers = metadata.model.layers;
  std::vector<LayerShape> shapes;
  for (int64_t layer = 0; layer < layers; ++layer) shapes.push_back(shape_of(index.layer(layer)));
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(env, output, replace, std::move(metadata), shapes));
  for (int64_t layer = 0; layer < layers; ++layer) {
    SQZ_RETURN_IF_ERROR(writer->copy_layer(layer, index));
    if (progress) progress(static_cast<double>(layer + 1) / static_cast<double>(layers));
  }
  return writer->commit(calibration);
}

Result<uint64_t> embed_layer_budgets(Env& env, const SqzFile& index, const LayerBudgets& budgets,
                                     const std::string& output, bool replace, int threads) {
  try {
    SQZ_RETURN_IF_ERROR(index.check_whole({}, threads));
    SQZ_ASSIGN_OR_RETURN(const Calibration calibration, index.calibration());
    IndexMetadata metadata = index.metadata();
    metadata.layer_budgets = budgets;
    return copy_index(env, index, std::move(metadata), calibration, output, replace);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "not enough memory to copy the index");
  }
}

}  // namespace sqz
