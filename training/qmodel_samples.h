// Samples of one window of text, to train a query classifier and to measure it: queries before
// RoPE, and the shares of their attention that the buckets of keys hold.
//
// Only far keys count: they are further back than `recent` tokens and behind the first `sink`
// tokens. The other keys are attended exactly in any case (SAAP's "1 + 2047").
#pragma once

#include <cstdint>
#include <vector>

#include "training/aten.h"
#include "training/qmodel.h"
#include "training/qmodel_network.h"
#include "training/rope.h"
#include "training/runner.h"

namespace sqz::training {

// In the order of the texts. The rest of a text, or a text shorter than a window, is a window if it
// has at least half as many tokens.
std::vector<TokenText> cut_windows(std::span<const TokenText> texts, const QmodelOptions& options);

// A permutation of 0 .. count - 1.
std::vector<int64_t> shuffled(int64_t count, uint64_t seed);

// Draws up to `most` different tokens of a window of `tokens`, from `first` on, ascending.
std::vector<int64_t> draw_positions(int64_t first, int64_t tokens, int64_t most, uint64_t seed);

// float32 on one device. Before RoPE unless said otherwise.
struct WindowLayer {
  at::Tensor keys;                       // [Hkv, N, d]
  at::Tensor queries;                    // [Hkv, n, G, d]; G = Hq / Hkv heads share a KV head
  at::Tensor positions;                  // [n] int64, ascending: tokens of the queries
  at::Tensor roped_keys, roped_queries;  // the same after RoPE
};

// From a dense pass over the window with PrefillOptions::pre_rope. `rope`: of the window's tokens.
WindowLayer window_layer(const LayerCapture& capture, const ModelDescription& model,
                         const std::vector<int64_t>& positions, const RopeTable& rope,
                         at::Device device);

struct WindowPass {
  std::vector<int64_t> positions;             // of the queries
  std::vector<int64_t> layers;                // ascending; the other layers are skipped
  at::Device device = at::kCPU;               // of the tensors of WindowLayer
  std::function<void(double done)> progress;  // fraction of this pass; may be empty
};
// Calls body(i, layer) for pass.layers[i], in order. kNumeric if a key or query is not finite.
Status run_window(Runner& runner, const TokenText& window, const WindowPass& pass,
                  const std::function<Status(int64_t, const WindowLayer&)>& body);

struct FarKeys {
  int64_t sink = 1;
  int64_t recent = 1024;
};

// The bucket of each key: keys [Hkv, N, d], centroids [Hkv, C, d] -> [Hkv, N] int64.
at::Tensor nearest_buckets(const at::Tensor& keys, const at::Tensor& centroids);

// Rows of one KV head's queries and its keys, both after RoPE.
struct HeadRows {
  at::Tensor queries;    // [R, d]
  at::Tensor positions;  // [R] int64
  at::Tensor keys;       // [N, d]
  double scale = 1;      // logits are q.k * scale
  FarKeys far;
};
// Whether the best key, the one with the largest product of all but the sinks, is far: [R] bool.
at::Tensor best_is_far(const HeadRows& rows);
// The share of the far keys' attention in each bucket: [R, C]. Rows without a far key are zero.
// `buckets`: [N] int64 in [0, count).
at::Tensor bucket_masses(const HeadRows& rows, const at::Tensor& buckets, int64_t count);
// Keys in each bucket that are far from the tokens at `positions` [n]: [n, C] float32.
at::Tensor bucket_sizes(const at::Tensor& positions, const at::Tensor& buckets, int64_t count,
                        const FarKeys& far);

// Queries of a window to train on, drawn at random.
struct SampleChoice {
  int64_t most = 0;  // of each KV head
  double near = 0;   // share of these whose best key is not far: 0 .. 1
  uint64_t seed = 0;
};
struct TrainSamples {
  at::Tensor queries;    // [Hkv, K, d]; rows from counts[h] on are zero
  at::Tensor masses;     // [Hkv, K, C]
  at::Tensor log_sizes;  // [Hkv, K, C]: of the far keys in each bucket (qmodel_network.h)
  at::Tensor counts;     // [Hkv] int64, on the CPU
};
TrainSamples train_samples(const WindowLayer& layer, const at::Tensor& centroids, double scale,
                           const FarKeys& far, const SampleChoice& choice);

// The training samples of a bounded number of windows. A new window replaces the oldest one.
class SamplePool {
 public:
  // Room for `windows`, each with `rows` queries of every head of `shape`.
  SamplePool(const NetworkShape& shape, int64_t windows, int64_t rows, at::Device device);
  static uint64_t window_bytes(const NetworkShape& shape, int64_t rows);

  // Puts the heads of one layer of a window, from head `first` of the network on. Windows are
  // counted from 0, in the order of training.
  void put(int64_t window, int64_t first, const TrainSamples& samples);

  // Draws a batch from the windows before number `end`. Each row comes from a window of its own
  // draw, and each head has its own queries. The batch follows from the seed alone. Its tensors are
  // no inference tensors.
  NetworkBatch draw(int64_t end, int64_t rows, uint64_t seed) const;

  int64_t windows() const { return queries_.size(0); }

 private:
  at::Tensor queries_;             // [windows, n, rows, d] float32
  at::Tensor masses_, log_sizes_;  // [windows, n, rows, C] float16
  at::Tensor counts_;              // [windows, n] float64: number of rows
};

// Every query of a window, to measure with.
struct RecallSamples {
  at::Tensor queries;  // [Hkv, n G, d]
  at::Tensor masses;   // [Hkv, n, G, C]
  at::Tensor far;      // [Hkv, n, G] bool: the best key is far
  // [Hkv, n, C]: keys in each bucket without the sink's, of the whole window and far ones.
  at::Tensor window_sizes, far_sizes;
};
RecallSamples recall_samples(const WindowLayer& layer, const at::Tensor& centroids, double scale,
                             const FarKeys& far);

// The mass that is found if buckets are read by descending score until a share of the keys is read.
// Recall of the attention; only the part of the last bucket that fits is read. scores, sizes [Hkv,
// n, C], masses [Hkv, n, G, C] -> [Hkv, n, G].
at::Tensor recall_at(double selectivity, const at::Tensor& scores, const at::Tensor& sizes,
                     const at::Tensor& masses);

}  // namespace sqz::training
