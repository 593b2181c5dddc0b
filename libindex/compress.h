// Rows of fewer bits: keys and values of clusters as codes of what is left after their cluster's
// means, and key codes to choose single keys by (docs/format.md, "Rows of codes"). A build writes
// its layers through the same functions, so that compressing an index gives the bytes of a build.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"

namespace sqz {

struct CompressOptions {
  RowKind rows = RowKind::k16;
  int key_codes = 0;              // bits a dimension: 0 (none), 1 or 2
  std::vector<int64_t> layers16;  // whose rows stay of 16 bits; key codes they get all the same
  uint64_t seed = 0;              // of the rotation

  bool any() const { return rows != RowKind::k16 || key_codes > 0; }
};

// What the metadata of an index say of it; nothing changes without options.any(). kInvalidArgument
// names an option that is out of range; what does not fit the index, check_metadata() refuses.
Status set_rows(const CompressOptions& options, IndexMetadata& metadata);

class LayerCompressor {
 public:
  // Of a file with these metadata (set_rows()).
  explicit LayerCompressor(const IndexMetadata& metadata);

  // Sets the pointers to the layer's rows of codes, which are made of the 16-bit rows that `data`
  // points to. They are valid until the next layer. kNumeric, naming layer, KV head and slot, where
  // a residual is beyond the dtype.
  Status compress(int64_t layer, LayerView& data, int threads);

 private:
  struct Coded {
    std::vector<std::byte> codes, scales;
  };
  const IndexMetadata& metadata_;
  std::vector<float> rotation_;  // [d, d]; empty if nothing needs it
  Coded keys_, values_, key_codes_;
};

struct CompressReport {
  uint64_t bytes = 0, bytes_before = 0;  // of the output and of the index
};

// Publishes at `output`, which may be the index's own path (with `replace`). kUnsupported for an
// index without clusters, keys or values, or with rows of codes; kCorrupt if it is damaged: it is
// read whole and checked first. `threads`: 0 = all cores. `progress` (may be empty) gets 0 .. 1.
Result<CompressReport> compress_index(Env& env, const SqzFile& index,
                                      const CompressOptions& options, const std::string& output,
                                      bool replace, int threads,
                                      const std::function<void(double)>& progress = {});

// The clustered keys of a layer, [Hkv, M, d], from whatever rows it has.
std::vector<float> decoded_keys(const LayerView& view);

}  // namespace sqz
