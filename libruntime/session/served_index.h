// An open index with what sessions need of it: views of all layers, checked offsets, cluster sizes,
// calibration. Made once per index, shared by its sessions, immutable.
#pragma once

#include <memory>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/index_tables.h"

namespace sqz {

struct ServedIndex {
  std::shared_ptr<const SqzFile> file;
  std::vector<LayerView> layers;
  std::vector<LayerTable> tables;
  Calibration calibration;  // without the tables that the index does not have

  const IndexMetadata& metadata() const { return file->metadata(); }
};

// kCorrupt if an offset leads out of bounds. Reads all offsets: 4 bytes a cluster.
Result<std::shared_ptr<const ServedIndex>> make_served_index(std::shared_ptr<const SqzFile> file);

}  // namespace sqz
