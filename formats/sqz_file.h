// Reading a .sqz file: the index of a fixed context (docs/format.md has the layout, byte by byte).
//
// A .sqz file is a legal safetensors file with page alignment and a hash of its own header. open()
// reads and checks the header alone: its cost does not grow with the tensors. After open()
// succeeds, every tensor that the metadata promises is there with the right dtype, shape and
// alignment, so LayerView's pointers may be used without a check. verify() checks the *contents*
// (offsets that increase, positions that are a permutation). libruntime also checks all offsets
// when a session is created, because a wrong offset would read out of bounds.
//
// An object is immutable after open() and may be used from several threads.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"
#include "formats/coded_rows.h"
#include "formats/model_description.h"
#include "formats/sqz_container.h"

namespace sqz {

inline constexpr int kMaxLevels = 4;
// The version that is written, unless layers differ in geometry or have state: then it is
// kVersionOfLayers, the newest one that is read. Version 2 brought rows of codes. Versions 1 and 2
// have calibration curves for three group policies, of which the first one, the mean, is left.
inline constexpr int64_t kFormatVersion = 3;
inline constexpr int64_t kVersionOfLayers = 4;

// How the keys of a KV head are split. kKmeans: into clusters, in cluster order. kPages: into runs
// of consecutive tokens, in token order. kPruned: not at all; the index holds only the keys that
// one policy reads. kBuckets: into the buckets of a query classifier (formats/qmodel_file.h), in
// bucket order.
enum class Partition { kKmeans, kPages, kPruned, kBuckets };
const char* partition_name(Partition partition);  // "kmeans", "pages", "pruned", "buckets"

inline constexpr int64_t kMaxPageSize = int64_t{1} << 20;  // tokens

// The curves that turn a sparsity into thresholds, and a budget into the keys of each head.
// libindex/calibrate makes them, libruntime reads them. All thresholds are natural logarithms.
//
// `thresholds[scope][path][i]`: log T such that, over all (sparse layer, KV head,
// calibration query), the mean fraction of clustered keys in clusters with score >= T is i / (kGrid
// - 1).
//   scope 0: one query at a time (generation); scope 1: the calibration queries as one block
//   (prompt) path  0: finest level alone; path 1: the whole tree, coarser levels filtered by
//   `coarse`
// `coarse[scope][k]`: log T of level k+1 (k < levels - 1), each keeping `coarse_keep[k]`.
// Ends: thresholds[..][0] is above every score, thresholds[..][kGrid - 1] below every finite score
//   (at most -1e30). A fraction that the coarser levels do not let through has that lowest
//   threshold too: it can be met by path 0 alone.
// `shares[scope][layer][kv_head][i]`: the fraction of its clustered keys that this head keeps at
//   thresholds[scope][0][i]. Dense layers hold 1.
// All of them are there if the index has levels.
struct Calibration {
  static constexpr int64_t kGrid = 1025;
  static constexpr int kScopes = 2, kPaths = 2;

  int64_t queries = 0;              // calibration queries per (layer, query head)
  std::string source;               // "tail", or a description of the prompts
  std::vector<double> coarse_keep;  // [levels - 1]
  std::vector<float> thresholds;    // [kScopes, kPaths, kGrid]
  std::vector<float> coarse;        // [kScopes, max(levels - 1, 1)]
  std::vector<float> shares;        // [kScopes, layers, kv_heads, kGrid]
};

// The calibration's source if no prompts calibrated the index.
inline constexpr const char* kTailSource = "tail";

struct LayerPolicy {
  bool dense = false;   // all keys in `exact`, none clustered
  int64_t window = 0;   // the model's sliding window in tokens, 0 = none; such a layer is dense
  int64_t kept = 0;     // keys a KV head that a pruned layer has left, sink and tail not counted;
                        // 0 if it is dense or the partition is another
  bool rows16 = false;  // it has rows of 16 bits in an index of rows of codes
};

// The policy that an index was pruned for, the only one that it can serve.
struct PrunedPolicy {
  std::string selector;  // "window", "stream", "h2o"
  double budget = 0;     // as SelectionPlan::asked_budget, in (0, 1]
  double keep = 0;       // and asked_keep
};

inline constexpr const char* kAllocationGroups = "groups";      // SqueezeAttention, Algorithm 1
inline constexpr const char* kAllocationMeasured = "measured";  // by the layers' own errors

// The keys of each layer of a budget, from a layer profile (formats/layers_file.h) that an index
// embeds: sessions spread their budget over the layers in these proportions.
struct LayerBudgets {
  std::string allocation = kAllocationGroups;  // how they were found
  int64_t context = 0;                         // tokens that they are for
  int64_t uniform_budget = 0;                  // mean keys of a layer, 1 .. context
  double p = 1;                                // share of it that layers of group 2 keep, in (0, 1]
  std::vector<int64_t> budget;  // [layers], keys, 1 .. context; sum = layers * uniform_budget
  std::vector<double> cosine;   // [layers], mean over tokens, in [-1, 1]
};

// A tensor of an engine's own cache behind token N, as it was given.
struct StateTensor {
  std::string name;  // letters, digits and _
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
};

// Everything in "__metadata__" but the checksums, decoded and range-checked.
struct IndexMetadata : FileOrigin {
  int64_t version = kFormatVersion;  // of the file that was read
  std::string tokens_hash;           // XXH3-64 hex of the token ids as little-endian i32
  int64_t tokens = 0;                // N
  int64_t sink = 0;
  int64_t tail = 0;
  Partition partition = Partition::kKmeans;
  int64_t page_size = 0;            // tokens of a page, 1 .. kMaxPageSize; 0 of another partition
  int64_t buckets = 0, hidden = 0;  // C and H of the query classifier; 0 unless kBuckets
  int levels = 0;              // 1 .. kMaxLevels; 0 if every layer is dense, or of pages or buckets
  DType dtype = DType::kBF16;  // of keys, values, centroids, value means: BF16 or F16
  RowKind rows = RowKind::k16;  // of clusters' keys and values; sink, tail and dense layers: k16
  bool has_value_means = true;  // false if the partition is not kKmeans
  bool heavy_hitters = false;   // there is LayerView::heavy, for the selector `h2o`
  std::vector<LayerPolicy> layers;
  std::optional<LayerBudgets> layer_budgets;  // none: every layer alike
  std::optional<PrunedPolicy> pruned;         // if the partition is kPruned
  JsonText build;  // parameters and seed as given, for people and for `info`
  JsonText chat;   // the turns that the text stands in (formats/chat_format.h); null: none
  // The contexts that stood in front when the keys were made, by context_id(), in their order.
  std::vector<std::string> after;
  // [layers], or empty if no layer has state: names and shapes, which the file's header has.
  std::vector<std::vector<StateTensor>> state;

  // Equal for contexts with equal keys: hash of the tokens and of what stood in front.
  std::string context_id() const;

  RowKind rows_of(int64_t layer) const {
    const LayerPolicy& policy = layers[static_cast<size_t>(layer)];
    return policy.dense || policy.rows16 ? RowKind::k16 : rows;
  }
  bool has_codes() const { return rows != RowKind::k16; }
};

struct LevelView {
  int64_t clusters = 0;               // n_k
  const void* centroids = nullptr;    // [Hkv, n_k, d] dtype: mean of the raw keys below
  const uint32_t* offsets = nullptr;  // [Hkv, n_k + 1]: first child at level k+1, or first slot
  const void* value_means = nullptr;  // [Hkv, n_k, dv] dtype, or null
};

// The query classifier of a layer, as in QmodelLayer; all null but in a layer of buckets.
struct ClassifierView {
  int64_t hidden = 0;                    // H
  const float* centroids = nullptr;      // [Hkv, C, d]
  const float* hidden_weight = nullptr;  // [Hkv, H, d]
  const float* hidden_bias = nullptr;    // [Hkv, H]
  const float* output_weight = nullptr;  // [Hkv, C, H]
  const float* output_bias = nullptr;    // [Hkv, C]
};

// Pointers into the file; valid while the SqzFile lives. Level k of the papers is level[k - 1].
struct LayerView {
  DType dtype = DType::kBF16;
  int64_t kv_heads = 0;   // Hkv
  int64_t head_dim = 0;   // d
  int64_t value_dim = 0;  // dv
  int levels = 0;         // 0: dense layer, or a layer of pages or buckets
  std::array<LevelView, kMaxLevels> level;
  int64_t slots = 0;                    // M, clustered keys a head (of a pruned index, the keys
                                        // that are left); 0 for a dense layer only
  const uint32_t* positions = nullptr;  // [Hkv, M] token position of each slot
  const uint32_t* heavy = nullptr;      // [Hkv, M] slots by the attention that the context gave to
                                        // them, most first; null without heavy hitters
  int64_t page_size = 0;                // slots of a page, the last one's excepted; 0: no pages
  int64_t pages = 0;                    // P = ceil(M / page_size)
  const void* page_min = nullptr;       // [Hkv, P, d] dtype: least of the page's keys, by dimension
  const void* page_max = nullptr;       // [Hkv, P, d] greatest
  int64_t buckets = 0;                  // C; 0: no buckets
  const uint32_t* bucket_offsets = nullptr;  // [Hkv, C + 1]: first slot of each; may be empty
  ClassifierView classifier;
  const void* keys = nullptr;          // [Hkv, M, d] slot order; null if there are rows of codes in
  const void* values = nullptr;        // [Hkv, M, dv] their place:
  CodedRows coded_keys, coded_values;  // 8 bits
  int64_t exact = 0;                   // E
  const void* exact_keys = nullptr;    // [Hkv, E, d]: sink then tail; dense: all tokens in order;
                                       // recent: the last E tokens
  const void* exact_values = nullptr;  // [Hkv, E, dv]
  std::vector<StateTensor> state;

  // Bytes of a clustered key and its value as they are stored, with their scales.
  int64_t slot_bytes() const {
    if (coded_keys.bits == 0) return (head_dim + value_dim) * dtype_size(dtype);
    return head_dim + value_dim + 2 * dtype_size(dtype);
  }
};

class SqzFile {
 public:
  static Result<std::shared_ptr<const SqzFile>> open(const std::string& path,
                                                     OpenMode mode = OpenMode::kMmap,
                                                     Env& env = Env::posix());

  const std::string& path() const { return container_.path; }
  uint64_t file_bytes() const { return container_.bytes.size(); }
  const IndexMetadata& metadata() const { return metadata_; }
  // Raw "__metadata__" strings as stored, for `info`.
  const std::map<std::string, std::string>& raw_metadata() const { return header().metadata; }
  const SafetensorsHeader& header() const { return container_.header; }
  // The bytes of a tensor; empty if there is none of this name. They live as long as the SqzFile.
  std::span<const std::byte> tensor(std::string_view name) const { return container_.tensor(name); }
  const LayerView& layer(int64_t index) const { return layers_[index]; }  // from 0 on
  // Copies bytes of a tensor, from `at` on. A mapped file is read by a system call, which is fast
  // for many bytes and returns a Status where touching the mapping would raise SIGBUS.
  Status copy(const void* at, std::span<std::byte> out) const;
  // Copies the calibration tensors out of the file; kCorrupt if a value is NaN or out of order.
  Result<Calibration> calibration() const;
  // The same without the tables, which are checked where they lie.
  Result<Calibration> checked_calibration() const;

  // Checks every checksum, and the orders, offsets and ranges that docs/format.md lists: kCorrupt
  // with the first problem, in the order of the file. `progress` (may be empty) gets the bytes done
  // and the total, from one thread at a time. `threads`: 0 = all cores; the result does not depend
  // on it. Takes at most 16 MiB a thread, whatever the file's size.
  Status verify(const std::function<void(uint64_t, uint64_t)>& progress = {},
                int threads = 0) const;

 private:
  SqzFile() = default;

  SqzContainer container_;
  IndexMetadata metadata_;
  std::vector<LayerView> layers_;
};

}  // namespace sqz
