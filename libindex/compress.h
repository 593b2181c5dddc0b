// Rows of 8 bits: codes of the residuals of clustered keys and values to the means of their
// cluster (docs/format.md, "Rows of codes"). Builds use the same functions, so a compressed index
// has the bytes of a build.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"

namespace sqz {

struct CompressOptions {
  RowKind rows = RowKind::k16;
  std::vector<int64_t> layers16;  // layers whose rows stay at 16 bits
};

// Puts the options into the metadata of an index. kInvalidArgument names an option that is out of
// range. check_metadata() refuses options that do not fit the index.
Status set_rows(const CompressOptions& options, IndexMetadata& metadata);

class LayerCompressor {
 public:
  // `metadata`: after set_rows(). Borrowed.
  explicit LayerCompressor(const IndexMetadata& metadata) : metadata_(metadata) {}

  // Sets the pointers to the rows of codes of the layer, made of the 16-bit rows that `data` points
  // to. They are valid until the next layer. kNumeric names layer, KV head and slot of a residual
  // that is beyond the dtype.
  Status compress(int64_t layer, LayerView& data, int threads);

 private:
  struct Coded {
    std::vector<std::byte> codes, scales;
  };
  const IndexMetadata& metadata_;
  Coded keys_, values_;
};

struct CompressReport {
  uint64_t bytes = 0, bytes_before = 0;  // of the output and of the index
};

// Publishes at `output`, which may be the path of the index (with `replace`). Reads and checks the
// whole index first: kCorrupt if it is damaged. kUnsupported if it has no clusters, or rows of
// codes already. `threads`: 0 = all cores. `progress` (may be empty) gets 0 to 1.
Result<CompressReport> compress_index(Env& env, const SqzFile& index,
                                      const CompressOptions& options, const std::string& output,
                                      bool replace, int threads,
                                      const std::function<void(double)>& progress = {});

}  // namespace sqz
