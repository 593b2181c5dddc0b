// Runs a Hugging Face checkpoint with LibTorch: the dense pass for an index build or a capture
// file, and generation behind a fixed context.
//
// The dense pass goes layer by layer over the whole text. The hidden states [N, hidden] of all
// tokens and the keys and values of one layer are in memory; the keys and values of the other
// layers and an N x N matrix are not.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "formats/base/device_rows.h"
#include "formats/checkpoint.h"

namespace sqz {

// A text as token ids.
struct TokenText {
  std::string name;  // opens messages: "book.txt"
  std::vector<int32_t> tokens;
};

struct RunnerOptions {
  std::string device = "cpu";  // "cpu", "cuda", "cuda:1"
  DType dtype = DType::kF32;   // F32 or BF16: weights, activations, keys. Softmax is always f32
  int threads = 0;             // CPU threads of the whole process; 0 = all cores
};

// One layer of a dense pass, float32 on the host, borrowed for the call of the consumer.
struct LayerCapture {
  int64_t layer = 0;
  const DeviceRows* device = nullptr;       // with PrefillOptions::on_device: keys and values,
                                            // instead of `keys` and `values`
  std::span<const float> keys;              // [Hkv, N, d], after RoPE
  std::span<const float> keys_pre_rope;     // [Hkv, N, d], empty unless asked for
  std::span<const float> values;            // [Hkv, N, d]
  std::span<const float> queries;           // [Hq, n, d], after RoPE, of the positions asked for
  std::span<const float> queries_pre_rope;  // [Hq, n, d], empty unless asked for
  std::span<const float> cosine;     // [N] cosine of the input of the layer's first norm with the
                                     // state after the attention residual (SqueezeAttention,
                                     // section 3); empty unless asked
  std::span<const float> attention;  // [Hkv, N] attention that each token got from all tokens,
                                     // summed over the heads of the group (H2O); empty unless asked
};

class FixedContext;

struct PrefillOptions {
  std::vector<int64_t> query_positions;  // ascending, of the text; their queries are captured
  bool pre_rope = false, cosine = false;
  bool attention = false;  // costs about as much as the pass's own attention
  bool on_device = false;  // leave keys and values in GPU memory, in the model's dtype, instead of
                           // copying them to the host; no effect on a model that runs on the CPU
  FixedContext* context = nullptr;  // all tokens attend to it, too; it says at which position they
                                    // begin. The captured rows have the positions 0 .. all the same
  int64_t chunk = 0;  // tokens that a thread takes at a time; 0 = chosen for the caches
  std::function<Status(const LayerCapture&)> consumer;  // may be empty; an error stops the pass
  std::function<void(double done)> progress;  // fraction of the work, 0 .. 1; may be empty; called
                                              // after each layer, on the caller's thread
};

// Tokens that a GPU takes through a layer's norms, products and MLP at a time: enough rows to fill
// it, few enough that the widest activations stay small beside the weights.
inline constexpr int64_t kGpuChunk = 16384;

// The most tokens that a FixedContext is asked about in one call. A prompt up to this length shares
// one selection of what to read; a longer one is cut.
inline constexpr int64_t kMaxContextTokens = 4096;

// Queries of several requests. Request r has the tokens indptr[r] .. indptr[r + 1] - 1, and they
// stand at the positions first[r], first[r] + 1, ...
struct ContextQueries {
  DType dtype = DType::kF32;        // of q and out
  const void* q = nullptr;          // [T, Hq, d] after RoPE
  void* out = nullptr;              // [T, Hq, d]
  float* lse = nullptr;             // [T, Hq]
  int64_t heads = 0, dim = 0;       // Hq, d
  std::span<const int64_t> indptr;  // [requests + 1], first 0, last T
  std::span<const int64_t> first;   // [requests]
};

// Attention over a fixed context, from an index or from anything else.
class FixedContext {
 public:
  virtual ~FixedContext() = default;
  virtual int64_t tokens() const = 0;  // N: the first prompt token's position
  // Writes the state over the fixed context: out, and lse in natural logs. Each request gets the
  // answer that it would get alone.
  virtual Status attend(int64_t layer, const ContextQueries& queries) = 0;
  // The CUDA device that attend() works on. Then its tensors are in the memory of this device, and
  // it puts its work on the default stream without waiting. None: they are on the host.
  virtual std::optional<int> device() const { return {}; }
  // On a device: the type of q and out if there is more than one token. One token may also be F32.
  virtual DType device_dtype() const { return DType::kF32; }
};

struct GenerateOptions {
  int64_t max_tokens = 64;
  std::vector<int32_t> stop;  // token ids that end the answer (not part of it); model's EOS too
  std::function<bool(int32_t)> on_token;  // called for each id; returning false stops; may be empty
};

struct Generation {
  std::vector<int32_t> tokens;  // generated ids, without the stop token
  double prefill_seconds = 0, decode_seconds = 0;
  std::string stop_reason;  // "stop", "length", "callback"
};

struct Question {
  std::vector<int32_t> prompt;
  GenerateOptions options;
};

// The attention of given tokens in one layer, in its two parts: over the fixed context, and
// causally over the tokens themselves. float32, borrowed for the call.
struct ObservedAttention {
  int64_t layer = 0;
  int64_t first = 0, count = 0;  // T = count tokens, at positions first, first + 1, ...
  int64_t heads = 0, dim = 0;    // Hq, d
  const float* queries;          // [T, Hq, d], after RoPE
  const float* context_out;      // [T, Hq, d]: what the context answered
  const float* context_lse;      // [T, Hq]
  const float* own_out;          // [T, Hq, d]
  const float* own_lse;          // [T, Hq]
};

struct ScoreOptions {
  bool losses = true;  // false: for the observer alone; the last token is run, too
  // Called for each layer, and each run of up to kMaxContextTokens tokens, on the caller's thread;
  // may be empty; an error stops the pass.
  std::function<Status(const ObservedAttention&)> observer;
};

// prefill() may be called from several threads at once.
class Runner {
 public:
  static Result<std::unique_ptr<Runner>> load(const std::string& directory,
                                              const RunnerOptions& options);
  virtual ~Runner() = default;
  virtual const ModelConfig& config() const = 0;

  // Dense causal pass over `tokens` (positions 0 ..) for the consumer. Fails if the text is longer
  // than the model's positions or an id is out of range.
  virtual Status prefill(std::span<const int32_t> tokens, const PrefillOptions& options) = 0;

  // Prompt, then one token at a time: always the likeliest. With `context`, prompt tokens stand at
  // positions N, N+1, ... and each attends to the context (through it) and causally to the tokens
  // since. Without, the prompt starts at position 0. `logits`, if given, receives a row [vocab] of
  // every token that was run: the prompt's, and the generated ones' but the last (all of them after
  // a stop token). Generation ends with "length" also where the model's positions do.
  virtual Result<Generation> generate(std::span<const int32_t> prompt,
                                      const GenerateOptions& options,
                                      FixedContext* context = nullptr,
                                      std::vector<float>* logits = nullptr) = 0;

  // generate() for many questions, up to `width` >= 1 at a time: when one ends, the next joins.
  // `done` receives each answer as it ends; an error stops the others. An answer does not depend on
  // the other questions, except for the order in which products of one row or of several are added
  // up.
  virtual Status generate_batch(
      std::span<const Question> questions, int64_t width, FixedContext& context,
      const std::function<Status(int64_t question, Generation)>& done) = 0;

  // Runs given tokens behind the context, as generate() does with a prompt, and returns the loss of
  // each but the first, in nats: -log p(tokens[i + 1] | context, tokens[0 .. i]).
  virtual Result<std::vector<double>> score(std::span<const int32_t> tokens, FixedContext& context,
                                            const ScoreOptions& options) = 0;
};

}  // namespace sqz
