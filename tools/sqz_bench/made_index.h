// Indexes that are made for timing: no model and no k-means, so that a layer of 128K tokens is
// there in seconds.
//
// squeezed: the keys of a KV head scatter around fine centres, these around coarse ones, as k-means
// would have found them: key = coarse + 0.6 fine + 0.6 noise, entries N(0, 1); values are N(0, 1).
// There are 5 % as many fine centres as tokens and 1 % coarse ones; sizes vary like exp(N(0, 0.6)).
// A query is a mixture of 4 coarse centroids of its KV head, plus noise: its best keys have logits
// 4 to 6 above the mean, and lie together, so that selections have the runs that real ones have.
// Calibrated by libindex, with 32 such queries a head.
//
// saap and quest: keys, values and queries are N(0, 1). saap has buckets whose sizes vary like
// those of clusters, and a query classifier with weights N(0, 1 / d) and N(0, 4 / H), so that some
// buckets get much of a query's attention. quest has pages of 16 tokens.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

inline constexpr int64_t kSink = 16, kTail = 100;

// Where an index is made. What is there when this object is destroyed is removed, unless it is to
// be kept.
class IndexFile {
 public:
  // --save-index, or else a new name in --directory.
  static Result<std::shared_ptr<const IndexFile>> create(const Options& options);
  IndexFile(std::string path, bool keep) : path_(std::move(path)), keep_(keep) {}
  ~IndexFile();
  IndexFile(const IndexFile&) = delete;
  IndexFile& operator=(const IndexFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool keep_;
};

// One layer of `tokens` tokens for --selector.
Result<std::shared_ptr<const IndexFile>> make_index(const Options& options, int64_t tokens);

// An index of a model's own keys, for timing: those of a capture, tiled up to the shape of a larger
// model.
//
// KV heads are taken at even distances from all layers of the capture. Their first keys are
// clustered and ordered as a build does it; the layer then holds as many copies of these clusters,
// one after another, as make up the asked number of tokens. A vector of d dimensions is written
// head_dim / d times, so that cosines and, with queries scaled for it, logits are the model's.
// Sizes of clusters, lengths of runs and what the heads want differ as they do in the model.
// Queries are the capture's: every second one calibrates, the others are asked.
struct CapturedIndex {
  std::shared_ptr<const IndexFile> file;
  std::vector<std::vector<float>> queries;  // sets of [tokens, Hq, d]
};

// One layer of at most `tokens` tokens, as many as whole copies make, and sets of `query_tokens`
// queries that follow each other in the text. kInvalidArgument if the shape of the options is not a
// multiple of the capture's.
Result<CapturedIndex> make_captured_index(const Options& options, int64_t tokens, int64_t sets,
                                          int64_t query_tokens);

// Copies of contexts of at most `captured` tokens, without sink and tail, that make up `tokens`.
struct Tiling {
  int64_t copies = 1;
  int64_t slots = 0;  // of a copy
};
Tiling tiling(int64_t tokens, int64_t captured);

// `sets` sets of [tokens, Hq, d] queries for layer 0 of any index that --selector is served from.
std::vector<std::vector<float>> make_queries(const SqzFile& file, const Options& options,
                                             int64_t sets, int64_t tokens);

// A file that takes no space: a real header, tensors that were never written (holes of the file
// system, which read as zeros), and the header's hash. It can be opened; its contents are not an
// index that could be served or verified.
struct SparseIndex {
  std::shared_ptr<const IndexFile> file;
  uint64_t bytes = 0;
};
// Writes from offset `begin` to `end` of a file.
using Fill = std::function<Status(WriteFile& file, uint64_t begin, uint64_t end)>;
// About `bytes` in `layers` layers. With `fill`, it writes what would be holes.
Result<SparseIndex> make_sparse_index(const Options& options, double bytes, int64_t layers,
                                      const Fill& fill = {});

// Of a model of the shape that the options ask for: two levels, sink and tail as above.
IndexMetadata made_metadata(const Options& options, int64_t tokens, int64_t layers);

// Clusters per level, coarse to fine.
std::vector<int64_t> made_clusters(int64_t tokens, int64_t slots,
                                   const std::vector<double>& fractions = {0.01, 0.05});

// Writes the one layer of an index. If it has levels, `queries` ([n, Hq, d]) calibrate it.
Status write_index(const std::string& path, const Options& options, const IndexMetadata& metadata,
                   const LayerData& data, std::span<const float> queries);

}  // namespace sqz::bench
