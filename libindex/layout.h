// What a build will make, decided before the first key: options checked, layers sorted into
// clustered and dense ones, every tensor's shape.
#pragma once

#include "libindex/builder.h"

namespace sqz {

struct BuildLayout {
  int64_t clustered = 0;          // M: keys a head of a sparse layer; 0 if all layers are dense
  std::vector<int64_t> clusters;  // per level, coarse to fine; empty if all layers are dense
  int64_t pages = 0;              // a head of a sparse layer, of page_size tokens but the last
  IndexMetadata metadata;         // hashes of tokens and tokenizer left empty
  ClusterCounts cluster_counts;   // of each layer

  LayerView shape(int64_t layer) const {
    return layer_shape(metadata, layer, cluster_counts[layer]);
  }
  int64_t sparse_layers() const;
  // Clusters of each level, or the number of buckets, of a KV head; for the report.
  std::vector<int64_t> parts() const;
  BuildReport report() const;  // as far as it is known before
  // First token that a dense layer stores: 0, or N - window.
  int64_t dense_first(int64_t layer) const { return metadata.tokens - shape(layer).exact; }
};

// kInvalidArgument where an option is out of range, or the text too short to cluster two keys.
// `engine`: the name of what clusters, or "none".
Result<BuildLayout> plan_layout(const ModelDescription& model, int64_t tokens,
                                const BuildOptions& options, const std::string& engine);

// Bytes that libindex holds at its peak, the writer's and the caller's own buffers not included.
uint64_t peak_memory(const BuildLayout& layout, const BuildOptions& options);

}  // namespace sqz
