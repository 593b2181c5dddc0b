// What the indexes that are made for timing have in common: a file with one layer, and queries.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

inline constexpr int64_t kSink = 16, kTail = 100;

// A path that nothing is at yet. What is there when this object is destroyed is removed, unless it
// is to be kept.
class TemporaryFile {
 public:
  // In `directory` ("" = the system's for temporary files).
  static Result<std::unique_ptr<TemporaryFile>> create(const std::string& directory,
                                                       const std::string& stem);
  static std::unique_ptr<TemporaryFile> kept(std::string path);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  TemporaryFile(std::string path, bool keep) : path_(std::move(path)), keep_(keep) {}
  std::string path_;
  bool keep_;
};

struct MadeIndex {
  std::unique_ptr<TemporaryFile> file;
  std::vector<std::vector<float>> queries;  // sets of [tokens, Hq, d]
};

// Metadata of a model of this shape, with `layers` layers, two levels, sink and tail as above.
IndexMetadata made_metadata(const Options& options, int64_t tokens, int64_t layers);

// Writes one layer of bfloat16 tensors with a calibration by `queries` ([n, Hq, d]).
Status write_made_index(const std::string& path, const Options& options,
                        const IndexMetadata& metadata, const LayerShape& shape,
                        const LayerData& data, std::span<const float> queries);

// Where an index of --save-index, or a temporary one, goes.
Result<std::unique_ptr<TemporaryFile>> index_file(const Options& options);

}  // namespace sqz::bench
