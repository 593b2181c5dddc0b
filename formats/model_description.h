// The description of a model: the architecture's numbers, the RoPE parameters and a hash of the
// weights. It is written into every index and capture as JSON text, and compared field by field
// before an index is used with a model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

// Rotary position embedding, after scaling is applied to theta. Kinds as in Hugging Face configs.
struct RopeDescription {
  // kOther: the model turns its keys in a way that no other kind describes.
  enum class Kind { kDefault, kLinear, kLlama3, kYarn, kOther };
  Kind kind = Kind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                 // linear, llama3, yarn
  double low_freq_factor = 1.0;        // llama3
  double high_freq_factor = 4.0;       // llama3
  int64_t original_max_positions = 0;  // llama3, yarn
  double beta_fast = 32.0;             // yarn
  double beta_slow = 1.0;              // yarn
  double attention_factor = 1.0;       // yarn: cos and sin are multiplied by it
  bool truncate = true;                // yarn: the correction range is rounded to whole dimensions
  int64_t rotary_dim = -1;             // first dimensions of a head that are turned; -1 = all

  // Whether it describes how every dimension of a head is turned.
  bool is_whole() const { return kind != Kind::kOther && rotary_dim < 0; }
  bool operator==(const RopeDescription&) const = default;
};

// kFull: serves every token. kRecent: a sliding or chunked layer, the last tokens. kState: tensors
// of the engine's own cache. kShared: the keys and values of another layer. kNone: nothing is
// stored.
enum class LayerKind { kFull, kRecent, kState, kShared, kNone };

const char* layer_kind_name(LayerKind kind);  // "full", "recent", ...

// The attention of one layer.
struct LayerGeometry {
  LayerKind kind = LayerKind::kFull;
  int64_t query_heads = 0, kv_heads = 0;
  int64_t head_dim = 0, value_dim = 0;  // of queries and keys, of values
  double attention_scale = 0;
  int64_t window = 0;  // recent: a query sees so many tokens, its own included; 0: no such limit
  int64_t chunk = 0;   // recent: a query sees the tokens of its chunk of so many; 0: no chunks
  int64_t of = -1;     // shared: the layer whose keys and values it uses

  int64_t widest() const { return std::max(head_dim, value_dim); }
  bool has_keys() const { return kind == LayerKind::kFull || kind == LayerKind::kRecent; }
  int64_t group_size() const { return query_heads / kv_heads; }
  // The first token that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position - position % chunk;
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
  bool operator==(const LayerGeometry&) const = default;
};

struct ModelDescription {
  std::string architecture;  // "LlamaForCausalLM", ...
  int64_t layers = 0;
  int64_t query_heads = 0;  // Hq
  int64_t kv_heads = 0;     // Hkv; divides Hq
  int64_t head_dim = 0;     // d
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  RopeDescription rope;
  std::vector<int64_t> sliding_window;  // per layer: window in tokens, 0 = full attention
  std::string weights_hash;             // XXH3-64 hex, see formats/checkpoint.h
  double attention_scale = 0.0;         // logits are q.k * attention_scale; 1/sqrt(d) normally
  // One a layer, where some differ from what is above, which is that of full layers; else empty.
  std::vector<LayerGeometry> geometry;

  int64_t group_size() const { return query_heads / kv_heads; }
  LayerGeometry layer(int64_t index) const;
  // The largest number of(layer) of all layers.
  template <class Of>
  int64_t most(const Of& of) const {
    int64_t out = 0;
    for (int64_t l = 0; l < layers; ++l) out = std::max<int64_t>(out, of(layer(l)));
    return out;
  }
  // Whether a layer may be clustered: a full one with the heads, head_dim and scale from above.
  bool may_select(int64_t index) const;
  bool operator==(const ModelDescription&) const = default;
};

JsonText to_json(const ModelDescription& model);
// `label` names the source of the JSON in messages. Every number is range-checked.
Result<ModelDescription> model_from_json(const JsonValue& json, const std::string& label);

// XXH3-64 hex of the canonical JSON: one string that identifies a model.
std::string fingerprint(const ModelDescription& model);

// kMismatch naming the first field that differs, with both values; `index_path` opens the message.
Status check_same_model(const ModelDescription& index_model, const ModelDescription& model,
                        const std::string& index_path);

}  // namespace sqz
