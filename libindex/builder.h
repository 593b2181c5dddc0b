// From the keys and values of a fixed context, layer by layer, to an index file.
//
//   IndexBuilder::prepare -> begin -> add_layer (0, 1, ... L-1) -> finish
//
// Pages instead of clusters: keys stay in token order, and each page gets the range of its keys.
// Buckets: keys go to those of a query classifier (buckets.h), which is stored with them.
//
// Per layer and KV head: k-means of the L2-normalised keys (libindex/kmeans.h), the centroid tree
// (tree.h), depth-first slot order (order.h), then the tensors go to the file; after the last
// layer, calibration (calibrate.h) with the runtime's own scorer, and publication. Memory: one
// layer's keys and values, two layers' tensors (one is being written), plus the calibration queries
// of all layers.
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

struct BuildOptions {
  int64_t sink = 16;   // first tokens, always attended exactly
  int64_t tail = 100;  // last tokens, likewise; their queries calibrate. 1 or more
  std::vector<double> level_fractions = {0.01, 0.05};  // clusters per fixed-context token, coarse
                                                       // to fine, increasing: paper section 6.1
  double coarse_keep = 0.5;  // fraction of keys that the coarse levels let through, each the same
                             // fraction of what is left: T_k of n levels coarse_keep^(k / (n-1))
  int iterations = 10;       // of k-means, at every level
  uint64_t seed = 0;
  int threads = 0;             // 0: all cores. The file does not depend on it
  DType dtype = DType::kBF16;  // of stored keys, values, centroids: BF16 or F16
  Partition partition = Partition::kKmeans;
  int64_t page_size = 16;       // tokens of a page, if the partition is kPages: no k-means then
  bool calibrate_keys = false;  // calibrate the selector `ideal`, too: scores every key
  bool heavy_hitters = false;   // store the order that the selector `h2o` needs
  // The buckets, if the partition is kBuckets: no k-means then. Of the same model; its dense layers
  // are stored dense. Borrowed until finish(), null otherwise.
  const QmodelFile* qmodel = nullptr;
  CompressOptions compress;                   // rows of fewer bits and key codes, of clusters alone
  std::optional<LayerBudgets> layer_budgets;  // to embed: sessions spread their budget by it
  JsonText chat;                              // as IndexMetadata::chat
  std::string engine = "auto";                // of k-means: "auto", "faiss" or "cuda" (kmeans.h)
  int gpu = 0;                                // number of the CUDA device, for engines that use one
  // What computed the keys, for the file and for find(): "bf16, cuda". Empty: f32 on a CPU, or not
  // known, as of a capture.
  std::string pass;
};

// One layer of a dense pass, float32, borrowed for the call.
struct LayerInput {
  std::span<const float> keys;     // [Hkv, N, d], after RoPE
  std::span<const float> values;   // [Hkv, N, d]
  std::span<const float> queries;  // [Hq, n, d], after RoPE: those that calibrate, normally of the
                                   // last n = tail tokens. n >= 1, the same for all layers; unused
                                   // (may be empty) for layers that are stored dense, and for
                                   // pages and buckets unless keys are calibrated
  const DeviceRows* device = nullptr;  // keys and values, instead of the two spans, if
                                       // takes_device_rows() and on the device `gpu`
  std::span<const float> attention =
      {};  // [Hkv, N] attention that each token got from all tokens of
           // the context; for `heavy_hitters` only, of clustered layers
};

struct BuildSeconds {
  double cluster = 0, calibrate = 0;
  double write = 0;  // that the build waited: a layer is written beside the next one's pass
};

struct BuildReport {
  uint64_t bytes = 0;
  int64_t tokens = 0, clustered = 0;  // N, and M of a sparse layer
  std::vector<int64_t> clusters;      // per level, coarse to fine; of buckets their number; empty
                                      // for pages
  int64_t pages = 0;                  // a KV head; 0 for clusters
  std::string engine;                 // that clustered: "faiss", "cuda (NVIDIA H200)"; else "none"
  std::string build_id;               // formats/sqz_metadata.h
  BuildSeconds seconds;
};

// What a build will take.
struct BuildPlan {
  uint64_t bytes = 0;             // of the file
  uint64_t peak_memory = 0;       // bytes, libindex's own
  uint64_t gpu_memory = 0;        // bytes that the engine takes on its GPU where there is room
  uint64_t gpu_memory_least = 0;  // and the least that it needs: one KV head at a time
  std::vector<int64_t> clusters;
  int64_t pages = 0;
};

class IndexBuilder {
 public:
  // Plans a build and makes its engine. No file is made. kInvalidArgument if an option is out of
  // range or the text too short: N must be at least sink + tail + 2, two keys to cluster; the
  // message says how many are needed. Layers with a sliding window are stored dense, with their
  // last min(window, N) tokens.
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
  // The report of the index at `path`, if this build has made it: one of the same build id, which
  // its tail calibrated. kNotFound if there is none. kMismatch names what differs if it is another.
  // The keys are not looked at.
  virtual Result<BuildReport> find(Env& env, const std::string& path) const = 0;

  // Makes the file, which has no name yet. kExists if `path` is there and `replace` is false; kIo
  // if there is no room. A build that is destroyed before finish() leaves no file.
  virtual Status begin(Env& env, const std::string& path, bool replace) = 0;
  // Whether layers may be given as LayerInput::device.
  virtual bool takes_device_rows() const = 0;

  // Layers in order. A key or value that is NaN, infinite or beyond the stored dtype is kNumeric
  // and names layer, KV head, token. `progress(done, total)` counts the KV heads of this layer.
  // After a failure the build is over: destroy it. That a layer could not be written may be the
  // answer to the next call.
  virtual Status add_layer(int64_t layer, const LayerInput& input,
                           const std::function<void(int64_t, int64_t)>& progress = {}) = 0;
  // Calibrates and publishes; once, after the last layer.
  virtual Result<BuildReport> finish() = 0;
};

}  // namespace sqz
