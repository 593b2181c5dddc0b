// The layout of an index, known before its first key: which layers are dense, and the shape of
// every tensor.
#pragma once

#include "libindex/builder.h"

namespace sqz {

struct BuildLayout {
  int64_t clustered = 0;          // M: keys a head of a sparse layer; 0 if all layers are dense
  std::vector<int64_t> clusters;  // per level, coarse to fine; empty if all layers are dense
  int64_t pages = 0;              // a head of a sparse layer
  IndexMetadata metadata;         // without the hashes of tokens and tokenizer
  ClusterCounts cluster_counts;   // of each layer

  LayerView shape(int64_t layer) const {
    return layer_shape(metadata, layer, cluster_counts[layer]);
  }
  BuildReport report() const;  // without what the build measures
};

// kInvalidArgument if options do not fit each other, or the text is too short to cluster two keys.
// `engine`: BuildReport::engine.
Result<BuildLayout> plan_layout(const ModelDescription& model, int64_t tokens,
                                const BuildOptions& options, const std::string& engine);

// Bytes that libindex holds at its peak, without the buffers of the writer and of the caller.
uint64_t peak_memory(const BuildLayout& layout, const BuildOptions& options);

}  // namespace sqz
