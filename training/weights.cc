#include "training/weights.h"

#include <cstring>

namespace sqz::training {
namespace {

at::ScalarType scalar_type(DType dtype) {
  if (dtype == DType::kBF16) return at::kBFloat16;
  return dtype == DType::kF16 ? at::kHalf : at::kFloat;
}

class Loader {
 public:
  Loader(const Checkpoint& checkpoint, at::Device device, at::ScalarType dtype)
      : checkpoint_(checkpoint), device_(device), dtype_(dtype) {}

  // The first failure is kept; tensors after it are undefined.
  const Status& status() const { return status_; }

  at::Tensor tensor(const std::string& name) {
    const auto found = checkpoint_.tensor(name);
    if (!found.ok()) {
      if (status_.ok()) status_ = found.status();
      return {};
    }
    // Safetensors promises no alignment, so the bytes are copied before they are read as numbers.
    at::Tensor raw = at::empty(found->shape, scalar_type(found->dtype));
    std::memcpy(raw.data_ptr(), found->data.data(), found->data.size());
    return raw.to(device_, dtype_);
  }

  Linear linear(const std::string& prefix, const std::vector<std::string>& parts, bool bias) {
    std::vector<at::Tensor> weights, biases;
    for (const std::string& part : parts) {
      weights.push_back(tensor(prefix + part + ".weight"));
      if (bias) biases.push_back(tensor(prefix + part + ".bias"));
    }
    if (!status_.ok()) return {};
    return {at::cat(weights), bias ? at::cat(biases) : at::Tensor()};
  }

 private:
  const Checkpoint& checkpoint_;
  at::Device device_;
  at::ScalarType dtype_;
  Status status_;
};

LayerWeights load_layer(Loader& load, const ModelConfig& config, const std::string& prefix) {
  LayerWeights layer;
  layer.input_norm = load.tensor(prefix + "input_layernorm.weight");
  layer.attention_norm = load.tensor(prefix + "post_attention_layernorm.weight");
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  if (config.qk_norm) {
    layer.q_norm = load.tensor(attention + "q_norm.weight");
    layer.k_norm = load.tensor(attention + "k_norm.weight");
  }
  layer.qkv = load.linear(attention, {"q_proj", "k_proj", "v_proj"}, config.qkv_bias);
  layer.o = load.linear(attention, {"o_proj"}, config.o_bias);
  layer.gate_up = load.linear(mlp, {"gate_proj", "up_proj"}, config.mlp_bias);
  layer.down = load.linear(mlp, {"down_proj"}, config.mlp_bias);
  return layer;
}

}  // namespace

Result<ModelWeights> load_weights(const Checkpoint& checkpoint, at::Device device,
                                  at::ScalarType dtype) {
  const ModelConfig& config = checkpoint.config();
  Loader load(checkpoint, device, dtype);
  ModelWeights out;
  out.embedding = load.tensor("model.embed_tokens.weight");
  for (int64_t l = 0; l < config.description.layers; ++l) {
    out.layers.push_back(load_layer(load, config, concat("model.layers.", l, ".")));
    SQZ_RETURN_IF_ERROR(load.status());
  }
  out.norm = load.tensor("model.norm.weight");
  out.lm_head = config.tie_embeddings ? out.embedding : load.tensor("lm_head.weight");
  SQZ_RETURN_IF_ERROR(load.status());
  return out;
}

}  // namespace sqz::training
