#include "formats/rope_config.h"

#include <cmath>

namespace sqz {
namespace {

using Kind = RopeDescription::Kind;

constexpr double kMaxFactor = 1e6;
constexpr int64_t kMaxPositions = int64_t{1} << 40;
constexpr std::string_view kTypes = "\"default\", \"linear\", \"llama3\" or \"yarn\"";

// YaRN's temperature for a context stretched by `scale` (paper section 3.4).
double yarn_mscale(double scale, double weight) {
  return scale <= 1.0 ? 1.0 : 0.1 * weight * std::log(scale) + 1.0;
}

Result<Kind> kind_of(const ConfigReader& rope) {
  const std::string_view field = rope.has("rope_type") ? "rope_type" : "type";
  SQZ_ASSIGN_OR_RETURN(const std::string type, rope.text(field, "default"));
  if (type == "default") return Kind::kDefault;
  if (type == "linear") return Kind::kLinear;
  if (type == "llama3") return Kind::kLlama3;
  if (type == "yarn") return Kind::kYarn;
  return rope.bad(field, concat("\"", type, "\""), kTypes, Code::kUnsupported);
}

// A field next to the block wins over one inside it, which wins over max_position_embeddings: the
// order in which transformers looks.
Result<int64_t> original_positions(const ConfigReader& config, const ConfigReader& rope,
                                   int64_t max_positions) {
  constexpr std::string_view kField = "original_max_position_embeddings";
  return (config.has(kField) ? config : rope).integer(kField, 1, kMaxPositions, max_positions);
}

Status read_llama3(const ConfigReader& rope, RopeDescription& out) {
  SQZ_ASSIGN_OR_RETURN(out.low_freq_factor, rope.number("low_freq_factor", 1e-6, kMaxFactor));
  SQZ_ASSIGN_OR_RETURN(out.high_freq_factor, rope.number("high_freq_factor", 1e-6, kMaxFactor));
  if (out.high_freq_factor <= out.low_freq_factor) {
    return rope.bad("high_freq_factor", concat(out.high_freq_factor),
                    concat("more than low_freq_factor, ", out.low_freq_factor));
  }
  return {};
}

Status read_yarn(const ConfigReader& rope, RopeDescription& out) {
  SQZ_ASSIGN_OR_RETURN(out.beta_fast, rope.number("beta_fast", 0, kMaxFactor, 32.0));
  SQZ_ASSIGN_OR_RETURN(out.beta_slow, rope.number("beta_slow", 0, kMaxFactor, 1.0));
  if (out.beta_fast == 0) out.beta_fast = 32;  // 0 means "the default" to transformers
  if (out.beta_slow == 0) out.beta_slow = 1;
  if (out.beta_fast < out.beta_slow) {
    return rope.bad("beta_fast", concat(out.beta_fast),
                    concat("at least beta_slow, ", out.beta_slow));
  }
  SQZ_ASSIGN_OR_RETURN(out.truncate, rope.boolean("truncate", true));
  SQZ_ASSIGN_OR_RETURN(const double mscale, rope.number("mscale", 0, kMaxFactor, 0.0));
  SQZ_ASSIGN_OR_RETURN(const double mscale_all, rope.number("mscale_all_dim", 0, kMaxFactor, 0.0));
  const double paper = mscale > 0 && mscale_all > 0
                           ? yarn_mscale(out.factor, mscale) / yarn_mscale(out.factor, mscale_all)
                           : yarn_mscale(out.factor, 1.0);
  SQZ_ASSIGN_OR_RETURN(out.attention_factor,
                       rope.number("attention_factor", 1e-6, kMaxFactor, paper));
  return {};
}

// transformers 5 can nest one block per kind of layer: {"full_attention": {...}, ...}.
Status refuse_nested(const ConfigReader& config, std::string_view field, const Json& block) {
  for (const auto& [key, value] : block.items()) {
    if (value.is_object()) {
      return config.bad(concat(field, ".", key), "RoPE parameters of one kind of layer",
                        "the same parameters for all layers", Code::kUnsupported);
    }
  }
  return {};
}

Status refuse_partial(const ConfigReader& reader) {
  SQZ_ASSIGN_OR_RETURN(const double part, reader.number("partial_rotary_factor", 0, 1, 1.0));
  if (part == 1.0) return {};
  return reader.bad("partial_rotary_factor", concat(part), "1 (all of a head rotated)",
                    Code::kUnsupported);
}

}  // namespace

Result<RopeDescription> parse_rope(const ConfigReader& config, int64_t max_positions) {
  static const Json kEmpty = Json::object();
  const std::string_view field = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const Json* block = config.find(field);
  if (block == nullptr) block = &kEmpty;
  if (!block->is_object()) return config.bad(field, found_text(*block), "an object or null");
  SQZ_RETURN_IF_ERROR(refuse_nested(config, field, *block));
  const ConfigReader rope(*block, config.path(), concat(field, "."));
  SQZ_RETURN_IF_ERROR(refuse_partial(config));
  SQZ_RETURN_IF_ERROR(refuse_partial(rope));

  RopeDescription out;
  SQZ_ASSIGN_OR_RETURN(out.kind, kind_of(rope));
  const ConfigReader& theta = rope.has("rope_theta") ? rope : config;
  SQZ_ASSIGN_OR_RETURN(out.theta, theta.number("rope_theta", 1.0 + 1e-9, 1e18, 10000.0));
  if (out.kind == Kind::kDefault) return out;

  if (out.kind != Kind::kLinear) {
    SQZ_ASSIGN_OR_RETURN(out.original_max_positions,
                         original_positions(config, rope, max_positions));
  }
  std::optional<double> factor;
  if (out.kind == Kind::kYarn && rope.mentions("factor")) {  // null: the ratio of the lengths
    factor = static_cast<double>(max_positions) / static_cast<double>(out.original_max_positions);
  }
  SQZ_ASSIGN_OR_RETURN(out.factor, rope.number("factor", 1e-6, kMaxFactor, factor));
  if (out.kind == Kind::kLlama3) SQZ_RETURN_IF_ERROR(read_llama3(rope, out));
  if (out.kind == Kind::kYarn) SQZ_RETURN_IF_ERROR(read_yarn(rope, out));
  return out;
}

}  // namespace sqz
