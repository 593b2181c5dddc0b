#include <cmath>
#include <map>
#include <string_view>

#include "formats/checkpoint.h"
#include "formats/config_reader.h"
#include "formats/rope_config.h"

namespace sqz {
namespace {

// Far above any model, and low enough that no product of two overflows.
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr int64_t kMaxPositions = int64_t{1} << 40;

// What Hugging Face's config classes do when a field is absent.
struct Defaults {
  bool kv_heads_optional = false;      // absent num_key_value_heads: as many as query heads
  int64_t head_dim = 0;                // absent head_dim; 0 = hidden_size / num_attention_heads
  bool attention_bias_option = false;  // reads attention_bias (q, k, v and o)
  bool mlp_bias_option = false;
  bool qkv_bias = false;  // always there
  bool qk_norm = false;
  enum { kNoWindow, kEveryLayer, kLayerTypes } window = kNoWindow;
};

const std::map<std::string, Defaults, std::less<>>& architectures() {
  static const std::map<std::string, Defaults, std::less<>> kTable = {
      {"LlamaForCausalLM",
       {.kv_heads_optional = true, .attention_bias_option = true, .mlp_bias_option = true}},
      {"MistralForCausalLM", {.window = Defaults::kEveryLayer}},
      {"Qwen2ForCausalLM", {.qkv_bias = true, .window = Defaults::kLayerTypes}},
      {"Qwen3ForCausalLM",
       {.head_dim = 128,
        .attention_bias_option = true,
        .qk_norm = true,
        .window = Defaults::kLayerTypes}},
  };
  return kTable;
}

Result<std::string> read_architecture(const ConfigReader& config) {
  constexpr std::string_view kExpected =
      "one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";
  const Json* list = config.find("architectures");
  if (list == nullptr) return config.missing("architectures", kExpected);
  if (!list->is_array() || list->size() != 1 || !list->at(0).is_string()) {
    return config.bad("architectures", found_text(*list), kExpected);
  }
  std::string name = list->at(0).get<std::string>();
  if (!architectures().contains(name)) {
    return config.bad("architectures", concat("\"", name, "\""), kExpected, Code::kUnsupported);
  }
  return name;
}

Status read_shape(const ConfigReader& config, const Defaults& defaults, ModelDescription& model) {
  SQZ_ASSIGN_OR_RETURN(model.layers, config.integer("num_hidden_layers", 1, kMaxLayers));
  SQZ_ASSIGN_OR_RETURN(model.query_heads, config.integer("num_attention_heads", 1, kMaxHeads));
  SQZ_ASSIGN_OR_RETURN(model.hidden_size, config.integer("hidden_size", 1, kMaxSize));
  SQZ_ASSIGN_OR_RETURN(model.vocab_size, config.integer("vocab_size", 1, kMaxSize));
  SQZ_ASSIGN_OR_RETURN(model.max_positions,
                       config.integer("max_position_embeddings", 1, kMaxPositions));

  std::optional<int64_t> kv_heads;
  if (defaults.kv_heads_optional || config.mentions("num_key_value_heads")) {
    kv_heads = model.query_heads;
  }
  SQZ_ASSIGN_OR_RETURN(model.kv_heads,
                       config.integer("num_key_value_heads", 1, kMaxHeads, kv_heads));
  if (model.query_heads % model.kv_heads != 0) {
    return config.bad("num_key_value_heads", concat(model.kv_heads),
                      concat("a divisor of num_attention_heads, ", model.query_heads));
  }

  const bool class_default = defaults.head_dim > 0 && !config.mentions("head_dim");
  if (!config.has("head_dim") && !class_default) {
    if (model.hidden_size % model.query_heads != 0) {
      return config.bad("hidden_size", concat(model.hidden_size),
                        concat("a multiple of num_attention_heads, ", model.query_heads,
                               ", or head_dim to be given"));
    }
    model.head_dim = model.hidden_size / model.query_heads;
  } else {
    SQZ_ASSIGN_OR_RETURN(model.head_dim,
                         config.integer("head_dim", 1, kMaxHeadDim, defaults.head_dim));
  }
  if (model.head_dim % 2 != 0 || model.head_dim > kMaxHeadDim) {
    return config.bad("head_dim", concat(model.head_dim),
                      concat("an even number up to ", kMaxHeadDim));
  }
  return {};
}

Result<std::vector<int64_t>> windows_by_layer_type(const ConfigReader& config, int64_t layers) {
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  SQZ_ASSIGN_OR_RETURN(const bool enabled, config.boolean("use_sliding_window", false));
  if (!enabled) return windows;
  SQZ_ASSIGN_OR_RETURN(const int64_t window,
                       config.integer("sliding_window", 1, kMaxPositions,
                                      config.mentions("sliding_window") ? 0 : 4096));
  const Json* types = config.find("layer_types");
  if (types == nullptr) {
    SQZ_ASSIGN_OR_RETURN(const int64_t first, config.integer("max_window_layers", 0, kMaxSize, 28));
    for (int64_t l = first; l < layers; ++l) windows[static_cast<size_t>(l)] = window;
    return windows;
  }
  if (!types->is_array() || types->size() != windows.size()) {
    return config.bad("layer_types", found_text(*types),
                      concat("an array of ", layers, " strings"));
  }
  for (size_t l = 0; l < windows.size(); ++l) {
    const Json& type = types->at(l);
    if (type == "sliding_attention") {
      windows[l] = window;
    } else if (type != "full_attention") {
      return config.bad(concat("layer_types[", l, "]"), found_text(type),
                        "\"full_attention\" or \"sliding_attention\"", Code::kUnsupported);
    }
  }
  return windows;
}

Result<std::vector<int64_t>> read_windows(const ConfigReader& config, const Defaults& defaults,
                                          int64_t layers) {
  if (defaults.window == Defaults::kLayerTypes) return windows_by_layer_type(config, layers);
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  if (defaults.window == Defaults::kNoWindow) return windows;
  if (config.has("layer_types")) {
    return config.bad("layer_types", found_text(*config.find("layer_types")),
                      "nothing (one kind of attention in every layer)", Code::kUnsupported);
  }
  SQZ_ASSIGN_OR_RETURN(const int64_t window,
                       config.integer("sliding_window", 1, kMaxPositions,
                                      config.mentions("sliding_window") ? 0 : 4096));
  std::fill(windows.begin(), windows.end(), window);
  return windows;
}

Result<DType> read_dtype(const ConfigReader& config) {
  const std::string_view field = config.has("dtype") ? "dtype" : "torch_dtype";
  SQZ_ASSIGN_OR_RETURN(const std::string name, config.text(field, "float32"));
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  if (name == "float32") return DType::kF32;
  return config.bad(field, concat("\"", name, "\""), "bfloat16, float16 or float32",
                    Code::kUnsupported);
}

Result<int32_t> read_token(const ConfigReader& config, std::string_view field, const Json& value) {
  if (value.is_number_integer() && value >= 0 && value <= 0x7fffffff) return value.get<int32_t>();
  return config.bad(field, found_text(value), "token ids from 0 to 2147483647");
}

}  // namespace

Result<std::vector<int32_t>> parse_eos_tokens(const ConfigReader& config) {
  std::vector<int32_t> tokens;
  const Json* value = config.find("eos_token_id");
  if (value == nullptr) return tokens;
  if (!value->is_array()) {
    SQZ_ASSIGN_OR_RETURN(const int32_t token, read_token(config, "eos_token_id", *value));
    tokens.push_back(token);
    return tokens;
  }
  for (const Json& element : *value) {
    SQZ_ASSIGN_OR_RETURN(const int32_t token, read_token(config, "eos_token_id", element));
    tokens.push_back(token);
  }
  return tokens;
}

Result<ModelConfig> parse_model_config(const std::string& text, const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const Json json, parse_json(text, path));
  if (!json.is_object()) {
    return Status(Code::kCorrupt, bad_field(path, "top level", found_text(json), "an object"));
  }
  const ConfigReader config(json, path);
  ModelConfig out;
  ModelDescription& model = out.description;
  SQZ_ASSIGN_OR_RETURN(model.architecture, read_architecture(config));
  const Defaults& defaults = architectures().find(model.architecture)->second;
  if (const Json* quantization = config.find("quantization_config")) {
    return config.bad("quantization_config", found_text(*quantization), "unquantised weights",
                      Code::kUnsupported);
  }
  SQZ_RETURN_IF_ERROR(read_shape(config, defaults, model));
  SQZ_ASSIGN_OR_RETURN(model.rope, parse_rope(config, model.max_positions));
  SQZ_ASSIGN_OR_RETURN(model.sliding_window, read_windows(config, defaults, model.layers));
  model.attention_scale = 1.0 / std::sqrt(static_cast<double>(model.head_dim));

  SQZ_ASSIGN_OR_RETURN(out.intermediate_size, config.integer("intermediate_size", 1, kMaxSize));
  SQZ_ASSIGN_OR_RETURN(out.rms_norm_eps, config.number("rms_norm_eps", 0, 1, 1e-6));
  SQZ_ASSIGN_OR_RETURN(out.hidden_act, config.text("hidden_act", "silu"));
  if (out.hidden_act != "silu" && out.hidden_act != "swish") {
    return config.bad("hidden_act", concat("\"", out.hidden_act, "\""), "\"silu\"",
                      Code::kUnsupported);
  }
  SQZ_ASSIGN_OR_RETURN(out.tie_embeddings, config.boolean("tie_word_embeddings", false));
  SQZ_ASSIGN_OR_RETURN(const bool attention_bias, config.boolean("attention_bias", false));
  out.o_bias = defaults.attention_bias_option && attention_bias;
  out.qkv_bias = defaults.qkv_bias || out.o_bias;
  SQZ_ASSIGN_OR_RETURN(const bool mlp_bias, config.boolean("mlp_bias", false));
  out.mlp_bias = defaults.mlp_bias_option && mlp_bias;
  out.qk_norm = defaults.qk_norm;
  SQZ_ASSIGN_OR_RETURN(out.dtype, read_dtype(config));
  if (const Json* bos = config.find("bos_token_id")) {
    SQZ_ASSIGN_OR_RETURN(out.bos_token, read_token(config, "bos_token_id", *bos));
  }
  SQZ_ASSIGN_OR_RETURN(out.eos_tokens, parse_eos_tokens(config));
  return out;
}

}  // namespace sqz
