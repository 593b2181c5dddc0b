// Writing a .sqz index, streamed layer by layer (docs/format.md).
//
// All shapes are known before the first key: create() lays out the whole file, write_layer() puts
// one layer's tensors at their offsets, commit() adds calibration, checksums and header, and
// publishes by AtomicFile. There is nothing under the final name until commit() has succeeded.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "formats/sqz_layout.h"

namespace sqz {

std::map<std::string, std::string> metadata_to_strings(const IndexMetadata& metadata);
// The parameters of a calibration (queries, source, coarse_keep).
std::string calibration_text(const Calibration& calibration);

class SqzWriter {
 public:
  // `metadata.layers` and `clusters` have one entry a layer; an empty `metadata.producer` becomes
  // this build's. Fails before creating a file if something is inconsistent (kInvalidArgument) or
  // PATH exists and `replace` is false (kExists).
  static Result<std::unique_ptr<SqzWriter>> create(Env& env, const std::string& path, bool replace,
                                                   IndexMetadata metadata,
                                                   const ClusterCounts& clusters);
  // The size that the file will have, without creating it (for --dry-run).
  static Result<uint64_t> planned_bytes(const IndexMetadata& metadata,
                                        const ClusterCounts& clusters);
  ~SqzWriter();

  // Each layer once, in any order. `data` has the layer's sizes (layer_shape()) and pointers to its
  // tensors; a view of another index (SqzFile::layer()) will do. kInternal if a tensor that the
  // file will have is missing in it or of another shape. Contents are not checked: call verify() of
  // another index first, or its damage gets fresh checksums.
  Status write_layer(int64_t layer, const LayerView& data);
  // A state tensor, which write_layer() leaves out where its data are null. kInvalidArgument if the
  // file will have no such tensor.
  Status write_state(int64_t layer, const StateTensor& tensor);

  // Writes calibration, checksums and header, then publishes. Fails if a layer is missing or the
  // calibration's sizes are wrong; its tables are ignored if every layer is dense. Returns the
  // file's size. After it, or after a failure of any call, only destruction is left to do.
  Result<uint64_t> commit(const Calibration& calibration);

 private:
  struct State;
  explicit SqzWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace sqz
