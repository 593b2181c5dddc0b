// An index of made-up keys, for timing: no model and no k-means, so that a layer of 128K tokens is
// there in seconds.
//
// The keys of a KV head scatter around fine centres, these around coarse ones, as k-means would
// have found them: key = coarse + 0.6 fine + 0.6 noise, entries N(0, 1); values are N(0, 1). There
// are 5 % as many fine centres as tokens and 1 % coarse ones; sizes vary like exp(N(0, 0.6)). A
// query is a mixture of 4 coarse centres of its KV head, plus noise: its best keys have logits 4 to
// 6 above the mean, and lie together, so that selections have the runs that real ones have.
// Calibrated by libindex, with 32 such queries a head.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

// A file that is removed when this object is destroyed.
class TemporaryFile {
 public:
  // A path that does not exist yet, in `directory` ("" = the system's for temporary files).
  static Result<std::unique_ptr<TemporaryFile>> create(const std::string& directory,
                                                       const std::string& stem);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

struct SyntheticIndex {
  std::unique_ptr<TemporaryFile> file;
  std::vector<std::vector<float>> queries;  // sets of [tokens, Hq, d]
};

// One layer of `tokens` tokens, and `sets` sets of `query_tokens` query tokens.
Result<SyntheticIndex> make_synthetic_index(const Options& options, int64_t tokens, int64_t sets,
                                            int64_t query_tokens);

// The metadata of such an index, without a file: `layers` layers, sink 16, tail 100.
IndexMetadata synthetic_metadata(const Options& options, int64_t tokens, int64_t layers);
// Its clusters per level, coarse to fine.
std::vector<int64_t> synthetic_clusters(int64_t tokens, int64_t slots);

}  // namespace sqz::bench
