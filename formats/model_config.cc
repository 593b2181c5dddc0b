#include <cmath>
#include <map>
#include <string_view>

#include "formats/checkpoint.h"

namespace sqz {
namespace {

// Far above any model, and low enough that no product of two overflows.
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr int64_t kMaxPositions = int64_t{1} << 40;

// The defaults of Hugging Face's config classes for absent fields.
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

std::string read_architecture(JsonFields& config) {
  constexpr std::string_view kExpected =
      "one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM; `python -m "
      "sqz build` makes indexes of other models with transformers";
  const JsonValue* list = config.find("architectures");
  if (list == nullptr || !list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
    config.complain("architectures", kExpected);
    return {};
  }
  std::string name((*list)[0].string());
  if (!architectures().contains(name)) {
    config.complain_of("architectures", found_text((*list)[0]), kExpected, Code::kUnsupported);
  }
  return name;
}

void read_head_dim(JsonFields& config, const Defaults& defaults, ModelDescription& model) {
  const bool class_default = defaults.head_dim > 0 && !config.mentions("head_dim");
  if (config.has("head_dim") || class_default) {
    model.head_dim = config.integer("head_dim", 1, kMaxHeadDim, defaults.head_dim);
  } else {
    if (model.hidden_size % model.query_heads != 0) {
      config.complain("hidden_size", concat("a multiple of num_attention_heads, ",
                                            model.query_heads, ", or head_dim to be given"));
    }
    model.head_dim = model.hidden_size / model.query_heads;
  }
  if (model.head_dim % 2 != 0 || model.head_dim > kMaxHeadDim) {
    config.complain_of("head_dim", concat(model.head_dim),
                       concat("an even number up to ", kMaxHeadDim));
  }
}

void read_shape(JsonFields& config, const Defaults& defaults, ModelDescription& model) {
  model.layers = config.integer("num_hidden_layers", 1, kMaxLayers);
  model.query_heads = config.integer("num_attention_heads", 1, kMaxHeads);
  model.hidden_size = config.integer("hidden_size", 1, kMaxSize);
  model.vocab_size = config.integer("vocab_size", 1, kMaxSize);
  model.max_positions = config.integer("max_position_embeddings", 1, kMaxPositions);

  std::optional<int64_t> kv_heads;
  if (defaults.kv_heads_optional || config.mentions("num_key_value_heads")) {
    kv_heads = model.query_heads;
  }
  model.kv_heads = config.integer("num_key_value_heads", 1, kMaxHeads, kv_heads);
  if (model.query_heads % model.kv_heads != 0) {
    config.complain("num_key_value_heads",
                    concat("a divisor of num_attention_heads, ", model.query_heads));
  }
  read_head_dim(config, defaults, model);
}

int64_t read_window(JsonFields& config) {
  return config.integer("sliding_window", 1, kMaxPositions,
                        config.mentions("sliding_window") ? 0 : 4096);
}

void read_windows_by_layer_type(JsonFields& config, std::vector<int64_t>& windows) {
  if (!config.boolean("use_sliding_window", false)) return;
  const int64_t window = read_window(config);
  const JsonValue* types = config.find("layer_types");
  if (types == nullptr) {
    const auto first = static_cast<size_t>(config.integer("max_window_layers", 0, kMaxSize, 28));
    for (size_t l = first; l < windows.size(); ++l) windows[l] = window;
    return;
  }
  if (!types->is_array() || types->size() != windows.size()) {
    config.complain("layer_types", concat("an array of ", windows.size(), " strings"));
    return;
  }
  for (size_t l = 0; l < windows.size(); ++l) {
    const JsonValue& type = (*types)[l];
    if (type.string() == "sliding_attention") {
      windows[l] = window;
    } else if (type.string() != "full_attention") {
      config.complain_of(concat("layer_types[", l, "]"), found_text(type),
                         "\"full_attention\" or \"sliding_attention\"", Code::kUnsupported);
    }
  }
}

std::vector<int64_t> read_windows(JsonFields& config, const Defaults& defaults, int64_t layers) {
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  if (defaults.window == Defaults::kLayerTypes) read_windows_by_layer_type(config, windows);
  if (defaults.window != Defaults::kEveryLayer) return windows;
  if (config.has("layer_types")) {
    config.complain("layer_types", "nothing (one kind of attention in every layer)",
                    Code::kUnsupported);
  }
  windows.assign(windows.size(), read_window(config));
  return windows;
}

DType read_dtype(JsonFields& config) {
  const std::string_view field = config.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = config.text(field, "float32");
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  if (name != "float32") {
    config.complain(field, "bfloat16, float16 or float32", Code::kUnsupported);
  }
  return DType::kF32;
}

}  // namespace

std::vector<int32_t> parse_tokens(JsonFields& config, std::string_view field) {
  std::vector<int32_t> tokens;
  const JsonValue* value = config.find(field);
  if (value == nullptr) return tokens;
  for (const JsonValue& element : value->is_array() ? value->items() : std::span(value, 1)) {
    const auto token = element.integer(0, INT32_MAX);
    if (!token) config.complain_of(field, found_text(element), "token ids from 0 to 2147483647");
    tokens.push_back(static_cast<int32_t>(token.value_or(0)));
  }
  return tokens;
}

Result<ModelConfig> parse_model_config(const std::string& text, const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json_object(text, path));
  JsonFields config(json.root(), path);
  ModelConfig out;
  ModelDescription& model = out.description;
  model.architecture = read_architecture(config);
  if (config.has("quantization_config")) {
    config.complain("quantization_config", "unquantised weights", Code::kUnsupported);
  }
  SQZ_RETURN_IF_ERROR(config.status());
  const Defaults& defaults = architectures().find(model.architecture)->second;
  read_shape(config, defaults, model);
  SQZ_ASSIGN_OR_RETURN(model.rope, parse_rope(config, model.max_positions));
  model.sliding_window = read_windows(config, defaults, model.layers);
  model.attention_scale = 1.0 / std::sqrt(static_cast<double>(model.head_dim));

  out.intermediate_size = config.integer("intermediate_size", 1, kMaxSize);
  out.rms_norm_eps = config.number("rms_norm_eps", 0, 1, 1e-6);
  out.hidden_act = config.text("hidden_act", "silu");
  if (out.hidden_act != "silu" && out.hidden_act != "swish") {
    config.complain("hidden_act", "\"silu\"", Code::kUnsupported);
  }
  out.tie_embeddings = config.boolean("tie_word_embeddings", false);
  const bool attention_bias = config.boolean("attention_bias", false);
  out.o_bias = defaults.attention_bias_option && attention_bias;
  out.qkv_bias = defaults.qkv_bias || out.o_bias;
  out.mlp_bias = config.boolean("mlp_bias", false) && defaults.mlp_bias_option;
  out.qk_norm = defaults.qk_norm;
  out.dtype = read_dtype(config);
  if (const JsonValue* bos = config.find("bos_token_id")) {
    if (bos->is_array()) config.complain("bos_token_id", "token ids from 0 to 2147483647");
    const auto tokens = parse_tokens(config, "bos_token_id");
    if (!tokens.empty()) out.bos_token = tokens.front();
  }
  out.eos_tokens = parse_tokens(config, "eos_token_id");
  SQZ_RETURN_IF_ERROR(config.status());
  return out;
}

}  // namespace sqz
