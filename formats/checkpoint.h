// A Hugging Face checkpoint directory: config.json, and weights in one model.safetensors or in
// shards named by model.safetensors.index.json. This file decodes the directory; training/ turns
// tensors into a running model.
//
// Architectures: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
// Every tensor that the architecture needs is looked for when the checkpoint is opened, with dtype
// (BF16, F16, F32) and shape, so that a run never fails halfway for a missing weight.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/json_fields.h"
#include "formats/model_description.h"
#include "formats/safetensors.h"

namespace sqz {

// config.json, decoded. `description` identifies the model, for an index and for a capture.
struct ModelConfig {
  ModelDescription description;
  int64_t intermediate_size = 0;
  double rms_norm_eps = 1e-5;
  std::string hidden_act = "silu";
  bool tie_embeddings = false;
  bool qkv_bias = false;  // Qwen2; attention_bias of Llama also gives o_bias
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;        // Qwen3: RMS norm of each head's q and k before RoPE
  DType dtype = DType::kBF16;  // torch_dtype / dtype: what the weights were saved in
  std::optional<int32_t> bos_token;
  std::vector<int32_t> eos_tokens;  // config.json or generation_config.json; may be several
};

// `text` is config.json's; `path` names it in messages. description.weights_hash is left empty.
Result<ModelConfig> parse_model_config(const std::string& text, const std::string& path);

// The ids of a field, which is one id or an array of ids. Empty if it is absent.
std::vector<int32_t> parse_tokens(JsonFields& config, std::string_view field);
// The RoPE parameters in both spellings: "rope_theta" + "rope_scaling" ("type" or "rope_type"), and
// the "rope_parameters" block that transformers 5 writes. `max_positions` is
// max_position_embeddings. Types other than default, linear, llama3 and yarn, partial rotation and
// parameters that differ between layers are kUnsupported.
Result<RopeDescription> parse_rope(JsonFields& config, int64_t max_positions);

// The names and shapes of all weights that a model of this configuration has.
struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
};
std::vector<RequiredTensor> required_tensors(const ModelConfig& config);

class Checkpoint {
 public:
  // Reads config.json, generation_config.json (its eos_token_id wins, if there is one) and the
  // headers of the shards; weights are mapped, not read. model.safetensors is preferred to an
  // index.
  static Result<std::unique_ptr<Checkpoint>> open(const std::string& directory,
                                                  Env& env = Env::posix());

  const std::string& directory() const { return directory_; }
  // description.weights_hash is the XXH3-64 of all shards in order of file name: the safetensors
  // header (names, dtypes, shapes, offsets), then 64 KiB of the data as 16 blocks spread evenly
  // (all of it if there is less). It tells models apart; it is no checksum.
  const ModelConfig& config() const { return config_; }

  struct Tensor {
    DType dtype;
    std::vector<int64_t> shape;
    std::span<const std::byte> data;  // mapped; valid while the Checkpoint lives
  };
  // kNotFound names the tensor and the directory.
  Result<Tensor> tensor(const std::string& name) const;
  bool has(const std::string& name) const;

 private:
  struct Shard {
    std::unique_ptr<ReadFile> file;
    std::unique_ptr<Mapping> mapping;
    SafetensorsHeader header;
  };
  struct Place {
    size_t shard;
    const TensorInfo* info;  // in that shard's header
  };

  Status open_config(Env& env);
  Status open_shards(Env& env);
  Status open_shard(Env& env, const std::string& name);
  Status open_sharded(Env& env, const std::string& index_path);
  Status check_tensors() const;
  std::string hash_weights() const;

  std::string directory_;
  ModelConfig config_;
  std::vector<Shard> shards_;  // by name
  std::map<std::string, Place, std::less<>> tensors_;
};

}  // namespace sqz
