// An open index as sessions use it: views of all layers, checked offsets, cluster sizes,
// calibration. It is made once for an index, shared by its sessions, and never changes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/index_tables.h"

namespace sqz {

struct ServedIndex {
  std::shared_ptr<const SqzFile> file;
  std::vector<LayerView> layers;
  std::vector<LayerTable> tables;
  Calibration calibration;  // without the tables that the index does not have
  std::string context_id;   // IndexMetadata::context_id()

  // If this is a range of KV heads: the whole index, and the first head. Views, tables and the
  // model are those of the range. Plans are made from the whole index, so that all ranks make the
  // same.
  std::shared_ptr<const ServedIndex> of;
  int64_t first_head = 0;
  std::optional<IndexMetadata> of_range;

  LayerGeometry geometry(int64_t layer) const { return metadata().model.layer(layer); }
  // The first of a layer's KV heads, of the whole index: first_head is one of full layers.
  int64_t first_head_of(int64_t layer) const {
    const ModelDescription& model = metadata().model;
    return first_head * model.layer(layer).kv_heads / model.kv_heads;
  }
  const IndexMetadata& metadata() const { return of_range ? *of_range : file->metadata(); }
  const ServedIndex& whole() const { return of != nullptr ? *of : *this; }
};

// KV heads [first, first + count) of a whole index; count 0: all from the first on. The index
// itself if that is all. kInvalidArgument if it has no such heads.
Result<std::shared_ptr<const ServedIndex>> range_of_heads(std::shared_ptr<const ServedIndex> index,
                                                          int64_t first, int64_t count);

// kCorrupt if an offset leads out of bounds. Reads all offsets: 4 bytes a cluster.
Result<std::shared_ptr<const ServedIndex>> make_served_index(std::shared_ptr<const SqzFile> file);

}  // namespace sqz
