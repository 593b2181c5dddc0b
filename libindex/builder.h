// Builds an index file from the keys and values of a fixed context, layer by layer:
//
//   IndexBuilder::prepare -> begin -> add_layer (0, 1, ... L-1) -> finish
//
// The keys of each layer and KV head are clustered (kmeans.h), the clusters form a tree (tree.h),
// and the tree gives the order of the slots (order.h). After the last layer the builder calibrates
// with the runtime's own scores (calibrate.h) and publishes the file. Instead of clusters there may
// be pages, where keys stay in token order, or the buckets of a query classifier (buckets.h).
//
// The builder holds the keys and values of one layer, the tensors of two layers (one of them is
// being written), and the calibration queries of all layers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "formats/base/device_rows.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_writer.h"
#include "libindex/compress.h"

namespace sqz {

// The caller has checked the ranges of single options and the model (model_from_json()).
struct BuildOptions {
  int64_t sink = 16;   // the sinks: first tokens, which are always attended exactly
  int64_t tail = 100;  // the recent window: last tokens, likewise. Their queries calibrate; >= 1
  // Clusters per token, increasing from coarse to fine (paper section 6.1).
  std::vector<double> level_fractions = {0.01, 0.05};
  // Fraction of the keys that the coarse levels let through. Each of n levels passes the same part
  // of the keys that it gets: T_k keeps coarse_keep^(k / (n-1)).
  double coarse_keep = 0.5;
  int iterations = 10;  // of k-means, at every level
  uint64_t seed = 0;
  int threads = 0;             // 0: all cores. The file does not depend on it.
  DType dtype = DType::kBF16;  // of stored keys, values, centroids: BF16 or F16
  Partition partition = Partition::kKmeans;
  int64_t page_size = 16;          // tokens of a page, for kPages
  std::vector<std::string> after;  // IndexMetadata::after
  bool heavy_hitters = false;      // stores the order that the selector `h2o` needs
  // The classifier of the same model, for kBuckets; its dense layers are stored dense. Borrowed
  // until finish().
  const QmodelFile* qmodel = nullptr;
  CompressOptions compress;                   // for clusters only
  std::optional<LayerBudgets> layer_budgets;  // sessions spread their budget by it
  JsonText chat;                              // as IndexMetadata::chat
  // [layers], or empty: names, types and shapes of the state that add_state() will bring.
  std::vector<std::vector<StateTensor>> state;
  std::string engine = "auto";  // of k-means: "auto", "faiss" or "cuda" (kmeans.h)
  int gpu = 0;                  // number of the CUDA device, for engines that use one
  // Precision and device that computed the keys, as "bf16, cuda". Empty: f32 on a CPU, or not
  // known, as for a capture.
  std::string pass;
};

// The default clusters a token of so many levels: 0.05 at the finest, five times fewer at each
// coarser one (Squeezed Attention, section 6.1: 5 % and 1 %).
std::vector<double> default_level_fractions(int levels);

// One layer of a dense pass, float32, borrowed for the call.
struct LayerInput {
  // In a recent layer N may be the last E tokens that are stored (LayerView::exact).
  std::span<const float> keys;    // [Hkv, N, d], after RoPE
  std::span<const float> values;  // [Hkv, N, dv]
  // [Hq, n, d], after RoPE: the queries that calibrate, normally of the last n = tail tokens. n is
  // 1 or more, and the same for all layers. May be empty for layers that are stored dense, and for
  // pages and buckets unless keys are calibrated.
  std::span<const float> queries;
  // Keys and values on the device `gpu`, instead of the two spans, if takes_device_rows().
  const DeviceRows* device = nullptr;
  // [Hkv, N] attention that each token got from all tokens of the context, for `heavy_hitters`.
  std::span<const float> attention = {};
};

struct BuildSeconds {
  double cluster = 0, calibrate = 0;
  double write = 0;    // while the build waited: a layer is written beside the pass of the next one
  double capture = 0;  // of the dense pass, or of reading the capture: the caller knows
};

struct BuildReport {
  uint64_t bytes = 0;
  int64_t tokens = 0, clustered = 0;  // N, and M of a sparse layer
  std::vector<int64_t> clusters;      // per level, coarse to fine; or the number of buckets
  int64_t pages = 0;                  // a KV head
  std::string engine;                 // "faiss", "cuda (NVIDIA H200)"; "none" without clusters
  std::string build_id;               // formats/sqz_metadata.h
  std::string fingerprint;            // of the model
  BuildSeconds seconds;
};

// Bytes that a build will take.
struct BuildPlan {
  uint64_t bytes = 0;             // of the file
  uint64_t peak_memory = 0;       // of libindex
  uint64_t gpu_memory = 0;        // of the engine on its GPU, where there is room
  uint64_t gpu_memory_least = 0;  // of the engine, with one KV head at a time
  std::vector<int64_t> clusters;
  int64_t pages = 0;
};

class IndexBuilder {
 public:
  // Plans a build and makes its engine. No file is made. kInvalidArgument if options do not fit
  // each other or the text is too short: N must be at least sink + tail + 2, two keys to cluster;
  // the message says how many are needed. Recent layers are stored dense, with the last tokens that
  // a query at position N sees.
  static Result<std::unique_ptr<IndexBuilder>> prepare(const ModelDescription& model,
                                                       std::span<const int32_t> tokens,
                                                       const std::string& tokenizer_hash,
                                                       const BuildOptions& options);
  // prepare() and begin().
  static Result<std::unique_ptr<IndexBuilder>> create(Env& env, const std::string& path,
                                                      bool replace, const ModelDescription& model,
                                                      std::span<const int32_t> tokens,
                                                      const std::string& tokenizer_hash,
                                                      const BuildOptions& options);
  virtual ~IndexBuilder() = default;

  virtual const BuildOptions& options() const = 0;
  // `on_device`: layers will come as LayerInput::device, if the engine takes such.
  virtual Result<BuildPlan> plan(bool on_device = false) const = 0;
  // The report of the index at `path`, if this build has made it: it has the same build id, and its
  // recent window calibrated it. kNotFound if there is no file; kMismatch names the first setting
  // that differs. Keys are not compared.
  virtual Result<BuildReport> find(Env& env, const std::string& path) const = 0;

  // Makes the file, which has no name yet. kExists if `path` is there and `replace` is false; kIo
  // if there is no room. A build that is destroyed before finish() leaves no file.
  virtual Status begin(Env& env, const std::string& path, bool replace) = 0;
  // Whether layers may be given as LayerInput::device.
  virtual bool takes_device_rows() const = 0;

  // The next layer that has keys; the number of layers if none is left.
  virtual int64_t next_layer() const = 0;
  // Takes one of the tensors of BuildOptions::state, in any order, each once.
  virtual Status add_state(int64_t layer, const StateTensor& tensor) = 0;

  // Takes the layers that have keys in order. kNumeric names layer, KV head and token of a key or
  // value that is NaN, infinite or beyond the stored dtype. `progress(done, total)` counts the KV
  // heads of this layer. A failed write may be the answer to the next call. After a failure only
  // destruction is left to do.
  virtual Status add_layer(int64_t layer, const LayerInput& input,
                           const std::function<void(int64_t, int64_t)>& progress = {}) = 0;
  // Calibrates and publishes. To be called once, after the last layer.
  virtual Result<BuildReport> finish() = 0;
};

}  // namespace sqz
