#include "formats/checkpoint.h"

namespace sqz {

std::vector<RequiredTensor> required_tensors(const ModelConfig& config) {
  const ModelDescription& model = config.description;
  const int64_t hidden = model.hidden_size, inner = config.intermediate_size;
  const int64_t q = model.query_heads * model.head_dim, kv = model.kv_heads * model.head_dim;
  std::vector<RequiredTensor> out = {{"model.embed_tokens.weight", {model.vocab_size, hidden}}};
  for (int64_t l = 0; l < model.layers; ++l) {
    const std::string prefix = concat("model.layers.", l, ".");
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      out.push_back({prefix + name, std::move(shape)});
    };
    const auto add_linear = [&](const std::string& name, int64_t rows, int64_t columns, bool bias) {
      add(name + ".weight", {rows, columns});
      if (bias) add(name + ".bias", {rows});
    };
    add("input_layernorm.weight", {hidden});
    add_linear("self_attn.q_proj", q, hidden, config.qkv_bias);
    add_linear("self_attn.k_proj", kv, hidden, config.qkv_bias);
    add_linear("self_attn.v_proj", kv, hidden, config.qkv_bias);
    add_linear("self_attn.o_proj", hidden, q, config.o_bias);
    if (config.qk_norm) {
      add("self_attn.q_norm.weight", {model.head_dim});
      add("self_attn.k_norm.weight", {model.head_dim});
    }
    add("post_attention_layernorm.weight", {hidden});
    add_linear("mlp.gate_proj", inner, hidden, config.mlp_bias);
    add_linear("mlp.up_proj", inner, hidden, config.mlp_bias);
    add_linear("mlp.down_proj", hidden, inner, config.mlp_bias);
  }
  out.push_back({"model.norm.weight", {hidden}});
  if (!config.tie_embeddings) out.push_back({"lm_head.weight", {model.vocab_size, hidden}});
  return out;
}

}  // namespace sqz
