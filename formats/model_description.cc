#include "formats/model_description.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "formats/json_fields.h"

namespace sqz {
namespace {

constexpr int64_t kMaxLayers = 1 << 16;
constexpr int64_t kMaxHeads = 1 << 16;               // the memory of a session grows with this,
constexpr int64_t kMaxHeadDim = 4096;                // and with this, whatever the file's size
constexpr int64_t kMaxWidth = 1 << 24;               // hidden size
constexpr int64_t kMaxPositions = int64_t{1} << 40;  // vocabulary, positions
constexpr double kTiny = 1e-30, kHuge = 1e30;

// By RopeDescription::Kind.
constexpr const char* kRopeKinds[] = {"default", "linear", "llama3", "yarn", "other"};

// Calls visit(name, member, lowest, highest) for each field that has a range.
template <class Rope, class Visit>
void each_number(Rope& rope, Visit visit) {
  visit("theta", rope.theta, kTiny, kHuge);
  visit("factor", rope.factor, kTiny, kHuge);
  visit("low_freq_factor", rope.low_freq_factor, 0.0, kHuge);
  visit("high_freq_factor", rope.high_freq_factor, 0.0, kHuge);
  visit("beta_fast", rope.beta_fast, 0.0, kHuge);
  visit("beta_slow", rope.beta_slow, 0.0, kHuge);
  visit("attention_factor", rope.attention_factor, kTiny, kHuge);
}

JsonText rope_to_json(const RopeDescription& rope) {
  JsonMembers out = {{"kind", kRopeKinds[static_cast<size_t>(rope.kind)]},
                     {"original_max_positions", rope.original_max_positions},
                     {"truncate", rope.truncate}};
  if (rope.rotary_dim >= 0) out["rotary_dim"] = rope.rotary_dim;
  each_number(rope, [&](const char* name, double value, double, double) { out[name] = value; });
  return out;
}

Result<RopeDescription> rope_from_json(const JsonValue& json, const std::string& label) {
  JsonFields fields(json, label);
  RopeDescription rope;
  const auto known = std::find(std::begin(kRopeKinds), std::end(kRopeKinds), fields.text("kind"));
  if (known == std::end(kRopeKinds)) {
    fields.complain("kind", "default, linear, llama3, yarn or other");
  } else {
    rope.kind = static_cast<RopeDescription::Kind>(known - std::begin(kRopeKinds));
  }
  each_number(rope, [&](const char* name, double& value, double low, double high) {
    value = fields.number(name, low, high);
  });
  rope.original_max_positions = fields.integer("original_max_positions", 0, kMaxPositions);
  rope.truncate = fields.boolean("truncate");
  if (fields.has("rotary_dim")) rope.rotary_dim = fields.integer("rotary_dim", 0, kMaxHeadDim);
  if (!fields.status().ok()) return fields.status();
  return rope;
}

// By LayerKind.
constexpr const char* kLayerKinds[] = {"full", "recent", "state", "shared", "none"};

// A layer without an entry in `geometry`.
LayerGeometry usual_layer(const ModelDescription& model, int64_t index) {
  const auto windows = std::ssize(model.sliding_window);
  const int64_t window = index < windows ? model.sliding_window[static_cast<size_t>(index)] : 0;
  return {.kind = window > 0 ? LayerKind::kRecent : LayerKind::kFull,
          .query_heads = model.query_heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .value_dim = model.head_dim,
          .attention_scale = model.attention_scale,
          .window = window};
}

// An array of entries; null for a layer that needs none. `all`: whole entries, to compare layers.
std::vector<JsonText> geometry_to_json(const ModelDescription& model, bool all) {
  std::vector<JsonText> entries;
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry layer = model.layer(l), usual = usual_layer(model, l);
    JsonMembers entry = {{"kind", layer_kind_name(layer.kind)}};
    const auto add = [&](const char* name, auto value, auto expected) {
      if (all || value != expected) entry[name] = value;
    };
    if (layer.kind == LayerKind::kShared) entry["of"] = layer.of;
    if (layer.has_keys()) {
      add("query_heads", layer.query_heads, usual.query_heads);
      add("kv_heads", layer.kv_heads, usual.kv_heads);
      add("head_dim", layer.head_dim, usual.head_dim);
      add("value_dim", layer.value_dim, layer.head_dim);
      add("attention_scale", layer.attention_scale, usual.attention_scale);
      add("chunk", layer.chunk, int64_t{0});
    }
    entries.push_back(layer == usual && !all ? JsonText() : JsonText(entry));
  }
  return entries;
}

void read_shared(JsonFields& in, const std::vector<LayerGeometry>& before, LayerGeometry& layer) {
  const int64_t of = in.integer("of", 0, std::ssize(before) - 1);
  if (!in.status().ok()) return;
  const LayerGeometry& source = before[static_cast<size_t>(of)];
  if (!source.has_keys()) in.complain("of", "an earlier layer that is full or recent");
  if (layer.window != source.window) {
    in.complain_of("of", concat(of, ", of sliding window ", source.window),
                   concat("a layer of sliding window ", layer.window));
  }
  layer = source;
  layer.kind = LayerKind::kShared;
  layer.of = of;
}

// layer: the usual one.
void read_layer(JsonFields& in, const std::vector<LayerGeometry>& before, LayerGeometry& layer) {
  const auto known = std::find(std::begin(kLayerKinds), std::end(kLayerKinds), in.text("kind"));
  if (known == std::end(kLayerKinds)) {
    return in.complain("kind", "full, recent, state, shared or none");
  }
  layer.kind = static_cast<LayerKind>(known - std::begin(kLayerKinds));
  if (layer.kind == LayerKind::kShared) return read_shared(in, before, layer);
  const bool recent = layer.kind == LayerKind::kRecent;
  if ((layer.window > 0) > recent) in.complain("kind", "recent: the layer has a sliding window");
  if (recent && layer.window == 0) layer.chunk = in.integer("chunk", 1, kMaxPositions);
  if (recent && layer.window > 0 && in.has("chunk")) {
    in.complain("chunk", "none: the layer has a sliding window");
  }
  if (!layer.has_keys()) return;
  layer.query_heads = in.integer("query_heads", 1, kMaxHeads, layer.query_heads);
  layer.kv_heads = in.integer("kv_heads", 1, layer.query_heads, layer.kv_heads);
  if (layer.query_heads % layer.kv_heads != 0) {
    in.complain_of("kv_heads", concat(layer.kv_heads),
                   concat("a divisor of query_heads, ", layer.query_heads));
  }
  layer.head_dim = in.integer("head_dim", 1, kMaxHeadDim, layer.head_dim);
  layer.value_dim = in.integer("value_dim", 1, kMaxHeadDim, layer.head_dim);
  layer.attention_scale = in.number("attention_scale", kTiny, kHuge, layer.attention_scale);
}

void read_geometry(JsonFields& fields, ModelDescription& model) {
  const JsonValue* entries = fields.array("geometry");
  if (entries == nullptr || !fields.status().ok()) return;
  if (std::cmp_not_equal(entries->size(), model.layers)) {
    fields.complain("geometry", concat("an array of ", model.layers, ", one entry a layer"));
    return;
  }
  std::vector<LayerGeometry> layers;
  bool usual = true;
  for (size_t l = 0; l < entries->size(); ++l) {
    LayerGeometry layer = usual_layer(model, static_cast<int64_t>(l));
    if (!entries->items()[l].is_null()) {
      JsonFields in = fields.element("geometry", l);
      read_layer(in, layers, layer);
      fields.complain_of(in.status());
      usual &= layer == usual_layer(model, static_cast<int64_t>(l));
    }
    layers.push_back(layer);
  }
  if (!usual) model.geometry = std::move(layers);
}

// One entry a layer; an empty vector means no window anywhere.
std::vector<int64_t> windows(const ModelDescription& model) {
  std::vector<int64_t> all = model.sliding_window;
  all.resize(static_cast<size_t>(std::max<int64_t>(model.layers, 0)), 0);
  return all;
}

JsonMembers fields_to_json(const ModelDescription& model) {
  return {{"architecture", model.architecture}, {"layers", model.layers},
          {"query_heads", model.query_heads},   {"kv_heads", model.kv_heads},
          {"head_dim", model.head_dim},         {"hidden_size", model.hidden_size},
          {"vocab_size", model.vocab_size},     {"max_positions", model.max_positions},
          {"rope", rope_to_json(model.rope)},   {"sliding_window", windows(model)},
          {"weights_hash", model.weights_hash}, {"attention_scale", model.attention_scale}};
}

}  // namespace

const char* layer_kind_name(LayerKind kind) {
  return kLayerKinds[static_cast<size_t>(kind)];
}

LayerGeometry ModelDescription::layer(int64_t index) const {
  return geometry.empty() ? usual_layer(*this, index) : geometry[static_cast<size_t>(index)];
}

bool ModelDescription::may_select(int64_t index) const {
  const LayerGeometry own = layer(index);
  return own.kind == LayerKind::kFull && own.query_heads == query_heads &&
         own.kv_heads == kv_heads && own.head_dim == head_dim &&
         own.attention_scale == attention_scale;
}

JsonText to_json(const ModelDescription& model) {
  JsonMembers out = fields_to_json(model);
  if (!model.geometry.empty()) out["geometry"] = geometry_to_json(model, false);
  return out;
}

Result<ModelDescription> model_from_json(const JsonValue& json, const std::string& label) {
  JsonFields fields(json, label);
  ModelDescription model;
  model.architecture = fields.text("architecture");
  model.layers = fields.integer("layers", 1, kMaxLayers);
  model.query_heads = fields.integer("query_heads", 1, kMaxHeads);
  model.kv_heads = fields.integer("kv_heads", 1, model.query_heads);
  if (model.query_heads % model.kv_heads != 0) {
    fields.complain("kv_heads", concat("a divisor of query_heads, ", model.query_heads));
  }
  model.head_dim = fields.integer("head_dim", 1, kMaxHeadDim);
  // 0: not known, as in a capture of an engine that does not say.
  model.hidden_size = fields.integer("hidden_size", 0, kMaxWidth);
  model.vocab_size = fields.integer("vocab_size", 0, kMaxPositions);
  model.max_positions = fields.integer("max_positions", 0, kMaxPositions);
  model.weights_hash = fields.text("weights_hash");
  model.attention_scale = fields.number("attention_scale", kTiny, kHuge);
  model.sliding_window = fields.integers("sliding_window", 0, kMaxPositions);
  if (std::ssize(model.sliding_window) != model.layers) {
    fields.complain("sliding_window", concat("an array of ", model.layers, ", one window a layer"));
  }
  fields.parse("rope", model.rope, rope_from_json);
  if (const int64_t turned = model.rope.rotary_dim; turned > model.head_dim || turned % 2 == 1) {
    fields.complain_of("rope.rotary_dim", concat(turned),
                       concat("an even number up to head_dim, ", model.head_dim));
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  if (fields.has("geometry")) read_geometry(fields, model);
  SQZ_RETURN_IF_ERROR(fields.status());
  return model;
}

std::string fingerprint(const ModelDescription& model) {
  const std::string canonical = to_json(model).str();
  return hex(xxh3_64(std::as_bytes(std::span(canonical))));
}

Status check_same_model(const ModelDescription& index_model, const ModelDescription& model,
                        const std::string& index_path) {
  // Layers are compared with all their fields, so that one is named and not a whole entry.
  const bool layers = index_model.layers == model.layers && index_model.geometry != model.geometry;
  const auto comparable = [&](const ModelDescription& one) {
    JsonMembers out = fields_to_json(one);
    if (layers) out["geometry"] = geometry_to_json(one, true);
    return JsonText(out).parsed();
  };
  const JsonDocument index = comparable(index_model), asked = comparable(model);
  const auto difference = first_difference(&index.root(), &asked.root());
  if (!difference) return {};
  return {Code::kMismatch, concat(index_path, ": not an index of this model: ", difference->name,
                                  ": the index was built for ", difference->left,
                                  ", this model has ", difference->right)};
}

}  // namespace sqz
