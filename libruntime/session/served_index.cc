#include "libruntime/session/served_index.h"

namespace sqz {

Result<std::shared_ptr<const ServedIndex>> make_served_index(std::shared_ptr<const SqzFile> file) {
  auto index = std::make_shared<ServedIndex>();
  index->file = std::move(file);
  const IndexMetadata& metadata = index->metadata();
  for (int64_t layer = 0; layer < metadata.model.layers; ++layer) {
    index->layers.push_back(index->file->layer(layer));
    SQZ_ASSIGN_OR_RETURN(LayerTable table,
                         make_layer_table(index->layers.back(), layer, index->file->path()));
    index->tables.push_back(std::move(table));
  }
  if (metadata.levels > 0 || metadata.key_calibration) {
    SQZ_ASSIGN_OR_RETURN(index->calibration, index->file->calibration());
  }
  return std::shared_ptr<const ServedIndex>(std::move(index));
}

}  // namespace sqz
