// Writing a .sqz file, streamed layer by layer (docs/format.md).
//
// All shapes are known before the first key: create() lays out the whole file, write_layer() puts
// one layer's tensors at their offsets, commit() adds calibration, checksums and header, and
// publishes by AtomicFile. Nothing under the final name until commit() has succeeded.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"

namespace sqz {

// What create() must know of one layer to lay it out.
struct LayerShape {
  std::vector<int64_t> clusters;  // n_k for k = 1 .. levels; empty for a dense layer, for pages and
                                  // for buckets
  int64_t slots = 0;              // M
  int64_t exact = 0;              // E
};

// One layer's data, in the file's dtypes; shapes as in LayerView. Spans are borrowed for the call.
// What the file does not store (value means, all of the clusters in a dense layer) is ignored and
// may be empty. Contents are not looked at.
struct LayerData {
  struct Level {
    std::span<const std::byte> centroids, value_means;
    std::span<const uint32_t> offsets;
  };
  std::vector<Level> levels;
  std::span<const uint32_t> positions, heavy;
  std::span<const std::byte> page_min, page_max;
  std::span<const uint32_t> bucket_offsets;                           // [Hkv, C + 1]
  const QmodelLayer* classifier = nullptr;                            // of a layer of buckets
  std::span<const std::byte> keys, values, exact_keys, exact_values;  // in the dtype, or codes
  std::span<const std::byte> key_scales, value_scales;                // of rows of codes
  std::span<const std::byte> key_codes, key_code_scales;
};

class SqzWriter {
 public:
  // `metadata.layers` and `shapes` have one entry a layer; an empty `metadata.producer` becomes
  // this build's. Fails before creating a file if something is inconsistent (kInvalidArgument) or
  // PATH exists and `replace` is false (kExists).
  static Result<std::unique_ptr<SqzWriter>> create(Env& env, const std::string& path, bool replace,
                                                   IndexMetadata metadata,
                                                   std::vector<LayerShape> shapes);
  // The size that the file will have, without creating it (for --dry-run). Hashes and the producer
  // may be empty still.
  static Result<uint64_t> planned_bytes(const IndexMetadata& metadata,
                                        const std::vector<LayerShape>& shapes);
  ~SqzWriter();

  // Each layer once, in any order. A span of the wrong size is kInternal.
  Status write_layer(int64_t layer, const LayerData& data);

  // The same from another index, tensor by tensor as they are. kInternal if a tensor that this file
  // will have is missing there or of another size. Nothing is checked: verify() `from` before, or
  // its damage gets fresh checksums.
  Status copy_layer(int64_t layer, const SqzFile& from);

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
