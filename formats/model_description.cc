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

// One entry a layer; an empty vector means no window anywhere.
std::vector<int64_t> windows(const ModelDescription& model) {
  std::vector<int64_t> all = model.sliding_window;
  all.resize(static_cast<size_t>(std::max<int64_t>(model.layers, 0)), 0);
  return all;
}

}  // namespace

JsonText to_json(const ModelDescription& model) {
  return {{"architecture", model.architecture}, {"layers", model.layers},
          {"query_heads", model.query_heads},   {"kv_heads", model.kv_heads},
          {"head_dim", model.head_dim},         {"hidden_size", model.hidden_size},
          {"vocab_size", model.vocab_size},     {"max_positions", model.max_positions},
          {"rope", rope_to_json(model.rope)},   {"sliding_window", windows(model)},
          {"weights_hash", model.weights_hash}, {"attention_scale", model.attention_scale}};
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
  return model;
}

std::string fingerprint(const ModelDescription& model) {
  const std::string canonical = to_json(model).str();
  return hex(xxh3_64(std::as_bytes(std::span(canonical))));
}

Status check_same_model(const ModelDescription& index_model, const ModelDescription& model,
                        const std::string& index_path) {
  const JsonDocument index = to_json(index_model).parsed(), asked = to_json(model).parsed();
  const auto difference = first_difference(&index.root(), &asked.root());
  if (!difference) return {};
  return {Code::kMismatch, concat(index_path, ": not an index of this model: ", difference->name,
                                  ": the index was built for ", difference->left,
                                  ", this model has ", difference->right)};
}

}  // namespace sqz
