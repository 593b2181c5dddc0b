#include "formats/checkpoint.h"

#include "formats/base/hash.h"

namespace sqz {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr uint64_t kMaxJson = uint64_t{64} << 20;
constexpr uint64_t kSampleBlocks = 16;
constexpr uint64_t kSampleBlock = 4096;

// A shard's name is used to open a file: it must stay within the directory.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

Result<JsonDocument> read_json(Env& env, const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path, kMaxJson));
  return parse_json_object(text, path);
}

// Reads the tokens that end an answer from generation_config.json, if there is one.
Status merge_generation_config(Env& env, const std::string& path, ModelConfig& config) {
  if (!env.exists(path)) return {};
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, read_json(env, path));
  JsonFields fields(json.root(), path);
  std::vector<int32_t> eos = parse_tokens(fields, "eos_token_id");
  SQZ_RETURN_IF_ERROR(fields.status());
  if (!eos.empty()) config.eos_tokens = std::move(eos);
  return {};
}

// "weight_map" of an index: tensor name -> shard name.
Result<std::map<std::string, std::string>> read_weight_map(Env& env, const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, read_json(env, path));
  JsonFields fields(json.root(), path);
  const JsonValue* map = fields.find("weight_map");
  if (map == nullptr || !map->is_object() || map->size() == 0) {
    fields.complain("weight_map", "an object of file names");
    return fields.status();
  }
  std::map<std::string, std::string> out;
  for (const JsonValue& shard : map->items()) {
    if (!is_plain_name(shard.string())) {
      fields.complain_of(concat("weight_map.", in_quotes(shard.key())), found_text(shard),
                         "the name of a file beside it");
    }
    out.emplace(shard.key(), shard.string());
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

}  // namespace

Result<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& directory, Env& env) {
  auto checkpoint = std::make_unique<Checkpoint>();
  checkpoint->directory_ = directory;
  SQZ_RETURN_IF_ERROR(checkpoint->open_config(env));
  SQZ_RETURN_IF_ERROR(checkpoint->open_shards(env));
  SQZ_RETURN_IF_ERROR(checkpoint->check_tensors());
  checkpoint->config_.description.weights_hash = checkpoint->hash_weights();
  return checkpoint;
}

Status Checkpoint::open_config(Env& env) {
  const std::string path = directory_ + "/config.json";
  if (!env.exists(path)) {
    return {Code::kNotFound, concat(path, ": no such file; expected a Hugging Face model folder")};
  }
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path, kMaxJson));
  SQZ_ASSIGN_OR_RETURN(config_, parse_model_config(text, path));
  return merge_generation_config(env, directory_ + "/generation_config.json", config_);
}

Status Checkpoint::open_shards(Env& env) {
  if (env.exists(directory_ + "/" + kSingleFile)) {
    SQZ_RETURN_IF_ERROR(open_shard(env, kSingleFile));
    for (const TensorInfo& info : shards_[0].header.tensors) tensors_[info.name] = {0, &info};
    return {};
  }
  const std::string index_path = directory_ + "/" + kIndexFile;
  if (env.exists(index_path)) return open_sharded(env, index_path);
  const bool pickled = env.exists(directory_ + "/pytorch_model.bin") ||
                       env.exists(directory_ + "/pytorch_model.bin.index.json");
  return {Code::kNotFound,
          concat(directory_, ": neither ", kSingleFile, " nor ", kIndexFile,
                 pickled ? "; pytorch_model.bin must be saved as safetensors first" : "")};
}

Status Checkpoint::open_sharded(Env& env, const std::string& index_path) {
  SQZ_ASSIGN_OR_RETURN(const auto weight_map, read_weight_map(env, index_path));
  std::map<std::string, size_t> places;  // of shards_, by name
  for (const auto& [tensor, shard] : weight_map) places[shard] = 0;
  for (auto& [name, place] : places) {
    if (!env.exists(directory_ + "/" + name)) {
      return {Code::kNotFound,
              concat(directory_, "/", name, ": no such file; ", index_path, " names it")};
    }
    place = shards_.size();
    SQZ_RETURN_IF_ERROR(open_shard(env, name));
  }
  for (const auto& [tensor, name] : weight_map) {
    const size_t shard = places[name];
    const TensorInfo* info = shards_[shard].header.find(tensor);
    if (info == nullptr) {
      return Refuse{shards_[shard].file->path(), Code::kMismatch}(
          in_quotes(tensor), "no such tensor",
          concat("the tensor that ", index_path, " places there"));
    }
    tensors_[tensor] = {shard, info};
  }
  return {};
}

Status Checkpoint::open_shard(Env& env, const std::string& name) {
  Shard shard;
  SQZ_ASSIGN_OR_RETURN(shard.file, env.open_read(directory_ + "/" + name));
  SQZ_ASSIGN_OR_RETURN(shard.header, read_safetensors_header(*shard.file));
  SQZ_ASSIGN_OR_RETURN(shard.mapping, shard.file->map());
  shards_.push_back(std::move(shard));
  return {};
}

Status Checkpoint::check_tensors() const {
  for (const RequiredTensor& required : required_tensors(config_)) {
    const auto place = tensors_.find(required.name);
    if (place == tensors_.end()) {
      return {Code::kNotFound,
              concat(directory_, ": tensor ", required.name, ": found nothing, expected shape ",
                     shape_text(required.shape))};
    }
    const TensorInfo& info = *place->second.info;
    const std::string& path = shards_[place->second.shard].file->path();
    if (info.dtype != DType::kBF16 && info.dtype != DType::kF16 && info.dtype != DType::kF32) {
      return Refuse{path, Code::kUnsupported}(required.name + ": dtype", dtype_name(info.dtype),
                                              "BF16, F16 or F32");
    }
    if (info.shape != required.shape) {
      return Refuse{path, Code::kMismatch}(required.name + ": shape", shape_text(info.shape),
                                           shape_text(required.shape) + " by config.json");
    }
  }
  return {};
}

std::string Checkpoint::hash_weights() const {
  Xxh3Stream hash;
  for (const Shard& shard : shards_) {
    const std::span<const std::byte> file = shard.mapping->bytes();
    const std::span<const std::byte> data = file.subspan(shard.header.data_offset);
    hash.update(file.first(shard.header.data_offset));
    if (data.size() <= kSampleBlocks * kSampleBlock) {
      hash.update(data);
      continue;
    }
    const uint64_t room = data.size() - kSampleBlock;  // the last block ends at the end
    for (uint64_t i = 0; i < kSampleBlocks; ++i) {
      const uint64_t start = room / (kSampleBlocks - 1) * i;
      hash.update(data.subspan(start, kSampleBlock));
    }
  }
  return hex(hash.digest());
}

Result<Checkpoint::Tensor> Checkpoint::tensor(const std::string& name) const {
  const auto place = tensors_.find(name);
  if (place == tensors_.end()) {
    return Status(Code::kNotFound, concat(directory_, ": no tensor ", name));
  }
  const TensorInfo& info = *place->second.info;
  const Shard& shard = shards_[place->second.shard];
  return Tensor{info.dtype, info.shape, shard.mapping->bytes().subspan(info.offset, info.bytes)};
}

bool Checkpoint::has(const std::string& name) const {
  return tensors_.contains(name);
}

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
