#include "formats/checkpoint.h"

namespace sqz {
namespace {

class TensorList {
 public:
  void add(std::string name, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(name), std::move(shape)});
  }
  void add_linear(const std::string& name, int64_t out, int64_t in, bool bias) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  }
  std::vector<RequiredTensor> take() { return std::move(tensors_); }

 private:
  std::vector<RequiredTensor> tensors_;
};

void add_layer(const ModelConfig& config, const std::string& prefix, TensorList& list) {
  const ModelDescription& model = config.description;
  const int64_t hidden = model.hidden_size;
  const int64_t q = model.query_heads * model.head_dim;
  const int64_t kv = model.kv_heads * model.head_dim;
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  list.add(prefix + "input_layernorm.weight", {hidden});
  list.add_linear(attention + "q_proj", q, hidden, config.qkv_bias);
  list.add_linear(attention + "k_proj", kv, hidden, config.qkv_bias);
  list.add_linear(attention + "v_proj", kv, hidden, config.qkv_bias);
  list.add_linear(attention + "o_proj", hidden, q, config.o_bias);
  if (config.qk_norm) {
    list.add(attention + "q_norm.weight", {model.head_dim});
    list.add(attention + "k_norm.weight", {model.head_dim});
  }
  list.add(prefix + "post_attention_layernorm.weight", {hidden});
  list.add_linear(mlp + "gate_proj", config.intermediate_size, hidden, config.mlp_bias);
  list.add_linear(mlp + "up_proj", config.intermediate_size, hidden, config.mlp_bias);
  list.add_linear(mlp + "down_proj", hidden, config.intermediate_size, config.mlp_bias);
}

}  // namespace

std::vector<RequiredTensor> required_tensors(const ModelConfig& config) {
  const ModelDescription& model = config.description;
  TensorList list;
  list.add("model.embed_tokens.weight", {model.vocab_size, model.hidden_size});
  for (int64_t l = 0; l < model.layers; ++l) {
    add_layer(config, concat("model.layers.", l, "."), list);
  }
  list.add("model.norm.weight", {model.hidden_size});
  if (!config.tie_embeddings) list.add("lm_head.weight", {model.vocab_size, model.hidden_size});
  return list.take();
}

}  // namespace sqz
