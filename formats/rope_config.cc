#include <cmath>

#include "formats/checkpoint.h"

namespace sqz {
namespace {

using Kind = RopeDescription::Kind;

constexpr double kMaxFactor = 1e6;
constexpr int64_t kMaxOriginal = int64_t{1} << 40;
constexpr std::string_view kTypes = "\"default\", \"linear\", \"llama3\" or \"yarn\"";

// YaRN's temperature for a context stretched by `scale` (paper section 3.4).
double yarn_mscale(double scale, double weight) {
  return scale <= 1.0 ? 1.0 : 0.1 * weight * std::log(scale) + 1.0;
}

Kind kind_of(JsonFields& rope) {
  const std::string_view field = rope.has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.text(field, "default");
  if (type == "linear") return Kind::kLinear;
  if (type == "llama3") return Kind::kLlama3;
  if (type == "yarn") return Kind::kYarn;
  if (type != "default") rope.complain(field, kTypes, Code::kUnsupported);
  return Kind::kDefault;
}

// A field next to the block wins over one inside it, which wins over max_position_embeddings: the
// order in which transformers looks.
int64_t original_positions(JsonFields& config, JsonFields& rope, int64_t max_positions) {
  constexpr std::string_view kField = "original_max_position_embeddings";
  return (config.has(kField) ? config : rope).integer(kField, 1, kMaxOriginal, max_positions);
}

void read_llama3(JsonFields& rope, RopeDescription& out) {
  out.low_freq_factor = rope.number("low_freq_factor", 1e-6, kMaxFactor);
  out.high_freq_factor = rope.number("high_freq_factor", 1e-6, kMaxFactor);
  if (out.high_freq_factor > out.low_freq_factor) return;
  rope.complain("high_freq_factor", concat("more than low_freq_factor, ", out.low_freq_factor));
}

void read_yarn(JsonFields& rope, RopeDescription& out) {
  out.beta_fast = rope.number("beta_fast", 0, kMaxFactor, 32.0);
  out.beta_slow = rope.number("beta_slow", 0, kMaxFactor, 1.0);
  if (out.beta_fast == 0) out.beta_fast = 32;  // 0 means "the default" to transformers
  if (out.beta_slow == 0) out.beta_slow = 1;
  if (out.beta_fast < out.beta_slow) {
    rope.complain_of("beta_fast", concat(out.beta_fast),
                     concat("at least beta_slow, ", out.beta_slow));
  }
  out.truncate = rope.boolean("truncate", true);
  const double mscale = rope.number("mscale", 0, kMaxFactor, 0.0);
  const double mscale_all = rope.number("mscale_all_dim", 0, kMaxFactor, 0.0);
  const double paper = mscale > 0 && mscale_all > 0
                           ? yarn_mscale(out.factor, mscale) / yarn_mscale(out.factor, mscale_all)
                           : yarn_mscale(out.factor, 1.0);
  out.attention_factor = rope.number("attention_factor", 1e-6, kMaxFactor, paper);
}

// transformers 5 can nest one block per kind of layer: {"full_attention": {...}, ...}.
void refuse_nested(JsonFields& rope, const JsonValue& block) {
  for (const JsonValue& member : block.items()) {
    if (!member.is_object()) continue;
    rope.complain_of(member.key(), "RoPE parameters of one kind of layer",
                     "the same parameters for all layers", Code::kUnsupported);
  }
}

void refuse_partial(JsonFields& fields) {
  constexpr std::string_view kField = "partial_rotary_factor";
  if (fields.number(kField, 0, 1, 1.0) == 1.0) return;
  fields.complain(kField, "1 (all of a head rotated)", Code::kUnsupported);
}

RopeDescription read_rope(JsonFields& config, JsonFields& rope, int64_t max_positions) {
  refuse_partial(config);
  refuse_partial(rope);
  RopeDescription out;
  out.kind = kind_of(rope);
  JsonFields& theta = rope.has("rope_theta") ? rope : config;
  out.theta = theta.number("rope_theta", 1.0 + 1e-9, 1e18, 10000.0);
  if (out.kind == Kind::kDefault) return out;
  if (out.kind != Kind::kLinear) {
    out.original_max_positions = original_positions(config, rope, max_positions);
  }
  std::optional<double> factor;
  if (out.kind == Kind::kYarn && rope.mentions("factor")) {  // null: the ratio of the lengths
    factor = static_cast<double>(max_positions) / static_cast<double>(out.original_max_positions);
  }
  out.factor = rope.number("factor", 1e-6, kMaxFactor, factor);
  if (out.kind == Kind::kLlama3) read_llama3(rope, out);
  if (out.kind == Kind::kYarn) read_yarn(rope, out);
  return out;
}

}  // namespace

Result<RopeDescription> parse_rope(JsonFields& config, int64_t max_positions) {
  const std::string field = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  SQZ_ASSIGN_OR_RETURN(const JsonDocument none, parse_json("{}", field));
  const JsonValue* block = config.find(field);
  if (block == nullptr) block = &none.root();
  if (!block->is_object()) config.complain(field, "an object or null");
  JsonFields rope(*block, config.label(), field + ".");
  refuse_nested(rope, *block);
  const RopeDescription out = read_rope(config, rope, max_positions);
  SQZ_RETURN_IF_ERROR(config.status());
  SQZ_RETURN_IF_ERROR(rope.status());
  return out;
}

}  // namespace sqz
