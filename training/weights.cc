#include "training/weights.h"

#include <cstring>
#include <optional>
#include <stdexcept>

namespace sqz::training {

at::ScalarType scalar_type(DType dtype) {
  if (dtype == DType::kBF16) return at::kBFloat16;
  return dtype == DType::kF16 ? at::kHalf : at::kFloat;
}

namespace {

// Copies tensors to the device.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, at::Device device, at::ScalarType dtype)
      : checkpoint_(checkpoint), device_(device), dtype_(dtype) {}

  at::Tensor tensor(const std::string& name) { return joined({name}, dtype_); }
  at::Tensor matrix(const std::string& name) { return joined({name}, matrix_type({name})); }

  Linear linear(const std::string& prefix, const std::vector<std::string>& parts, bool bias) {
    std::vector<std::string> weights, biases;
    for (const std::string& part : parts) {
      weights.push_back(prefix + part + ".weight");
      if (bias) biases.push_back(prefix + part + ".bias");
    }
    return {joined(weights, matrix_type(weights)), bias ? joined(biases, dtype_) : at::Tensor()};
  }

 private:
  // On a CPU, 16-bit matrices keep their type: a product of a few rows takes as long as reading
  // them. apply() widens them for a product of many rows.
  at::ScalarType matrix_type(const std::vector<std::string>& names) const {
    std::optional<at::ScalarType> type;
    for (const std::string& name : names) {
      if (!device_.is_cpu() || dtype_ != at::kFloat) return dtype_;
      const at::ScalarType found = scalar_type(part(name).dtype);
      if (type.value_or(found) != found) return dtype_;
      type = found;
    }
    return type.value_or(dtype_);
  }

  // Checkpoint::open() has seen that the tensor is there.
  Checkpoint::Tensor part(const std::string& name) const {
    const auto found = checkpoint_.tensor(name);
    if (!found.ok()) throw std::runtime_error(found.status().message());
    return *found;
  }

  // Joins tensors along the first dimension.
  at::Tensor joined(const std::vector<std::string>& names, at::ScalarType dtype) {
    std::vector<Checkpoint::Tensor> parts;
    std::vector<int64_t> shape;
    for (const std::string& name : names) {
      parts.push_back(part(name));
      if (shape.empty()) {
        shape = parts.back().shape;
      } else {
        shape[0] += parts.back().shape[0];
      }
    }
    const at::Tensor out = at::empty(shape, at::device(device_).dtype(dtype));
    int64_t row = 0;
    for (const Checkpoint::Tensor& part : parts) {
      const int64_t rows = part.shape[0];
      fill(out.narrow(0, row, rows), part);
      row += rows;
    }
    return out;
  }

  // `to` is contiguous. The numbers in the file have no particular alignment.
  static void fill(const at::Tensor& to, const Checkpoint::Tensor& from) {
    const at::ScalarType type = scalar_type(from.dtype);
    const bool direct = to.is_cpu() && to.scalar_type() == type;
    const at::Tensor raw = direct ? to : at::empty(to.sizes(), type);
    std::memcpy(raw.data_ptr(), from.data.data(), from.data.size());
    if (!direct) to.copy_(raw);
  }

  const Checkpoint& checkpoint_;
  at::Device device_;
  at::ScalarType dtype_;
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

ModelWeights load_weights(const Checkpoint& checkpoint, at::Device device, at::ScalarType dtype) {
  const ModelConfig& config = checkpoint.config();
  Loader load(checkpoint, device, dtype);
  ModelWeights out;
  out.embedding = load.matrix("model.embed_tokens.weight");
  for (int64_t l = 0; l < config.description.layers; ++l) {
    out.layers.push_back(load_layer(load, config, concat("model.layers.", l, ".")));
  }
  out.norm = load.tensor("model.norm.weight");
  out.lm_head = config.tie_embeddings ? out.embedding : load.matrix("lm_head.weight");
  return out;
}

}  // namespace sqz::training
