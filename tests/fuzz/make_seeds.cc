// Writes the seeds of the fuzz targets and the dictionary of JSON names: make_seeds FOLDER, where
// FOLDER is tests/fuzz. Run again when a format changes, and commit what it wrote.
#include <filesystem>
#include <iostream>
#include <set>

#include "formats/checkpoint.h"
#include "libindex/compress.h"
#include "libindex/prune.h"
#include "tests/common/npy_file.h"
#include "tests/common/tiny_buckets.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz::testing {
namespace {

// The file of a seed, in a folder that is there.
std::string at(const std::filesystem::path& folder, const char* name) {
  std::filesystem::create_directories(folder);
  return folder / name;
}

Status write_indexes(const std::filesystem::path& folder) {
  TinyIndexOptions o = {
      .layers = 1, .query_heads = 1, .kv_heads = 1, .tokens = 32, .clusters = {2, 4}};
  SQZ_RETURN_IF_ERROR(write_tiny_index(at(folder, "two_levels.sqz"), o).status());
  o.clusters = {3};
  o.has_value_means = false;
  o.dtype = DType::kF16;
  SQZ_RETURN_IF_ERROR(write_tiny_index(at(folder, "one_level.sqz"), o).status());
  o.layers = 2;
  o.dtype = DType::kBF16;
  o.windows = {{0, 8}};
  o.dense_layers = {1};
  SQZ_RETURN_IF_ERROR(write_tiny_index(at(folder, "nothing_clustered.sqz"), o).status());
  o.windows.clear();
  o.dense_layers.clear();
  o.layers = 1;
  o.page_size = 8;
  o.key_calibration = o.heavy_hitters = true;
  o.layer_budgets = {8};
  SQZ_RETURN_IF_ERROR(write_tiny_index(at(folder, "pages.sqz"), o).status());
  SQZ_RETURN_IF_ERROR(write_tiny_buckets(at(folder, "buckets.sqz"), tiny_qmodel(), 132).status());

  TinyIndexOptions clusters = {
      .layers = 1, .query_heads = 1, .kv_heads = 1, .tokens = 32, .clusters = {2, 4}};
  const std::string plain = at(folder, "plain.sqz");
  SQZ_RETURN_IF_ERROR(write_tiny_index(plain, clusters).status());
  SQZ_ASSIGN_OR_RETURN(const auto rows, SqzFile::open(plain, OpenMode::kRead));
  for (const auto& [name, options] :
       {std::pair{"q8.sqz", CompressOptions{.rows = RowKind::kQ8, .key_codes = 1}},
        {"key_codes.sqz", CompressOptions{.key_codes = 2}}}) {
    SQZ_RETURN_IF_ERROR(
        compress_index(Env::posix(), *rows, options, at(folder, name), true, 1).status());
  }
  std::filesystem::remove(plain);

  o.key_calibration = false;
  o.layer_budgets = {};
  const std::string whole = at(folder, "whole.sqz");
  SQZ_RETURN_IF_ERROR(write_tiny_index(whole, o).status());
  SQZ_ASSIGN_OR_RETURN(auto index, SqzFile::open(whole, OpenMode::kRead));
  const SelectionRequest h2o = {.selector = SelectorKind::kH2o, .keep = 0.5, .dense_layers = -1};
  SQZ_RETURN_IF_ERROR(
      prune_index(Env::posix(), index, h2o, at(folder, "pruned.sqz"), true, 1).status());
  std::filesystem::remove(whole);
  return {};
}

// A capture as capture_fuzz writes it: 3 tokens, the queries of 2, one layer.
void write_capture(const std::string& path) {
  const auto model = tiny::metadata({.layers = 1, .query_heads = 2, .kv_heads = 1}).model;
  const std::vector<std::string> datasets = {{2, 0, 1, 1, 3},       {3, 0, 1, 1, 2},
                                             {0, 9, 1, 3, 1, 3, 8}, {1, 4, 1, 3, 1, 3, 8},
                                             {0, 0, 1, 3, 2, 2, 8}, {0, 0, 0, 1, 3}};
  std::string bytes = to_json(model).str() + '\0';
  for (const std::string& dataset : datasets) bytes += dataset;
  write_file(path, bytes);
}

// config.json, the index of shards if there is one, and the shard, as checkpoint_fuzz takes them.
void write_checkpoint(const std::string& path, const std::string& config, bool sharded) {
  nlohmann::json header, map;
  uint64_t bytes = 0;
  for (const auto& tensor : required_tensors(parse_model_config(config, path).value())) {
    uint64_t end = 2;
    for (const int64_t size : tensor.shape) end *= static_cast<uint64_t>(size);
    end += bytes;
    header[tensor.name] = {
        {"dtype", "BF16"}, {"shape", tensor.shape}, {"data_offsets", {bytes, end}}};
    map[tensor.name] = "1-of-1";
    bytes = end;
  }
  const std::string index = sharded ? nlohmann::json({{"weight_map", map}}).dump() : "";
  write_file(path, config + '\0' + index + '\0' +
                       safetensors_bytes(header.dump(), std::string(bytes, '\1')));
}

void write_checkpoints(const std::filesystem::path& folder) {
  constexpr const char* kShape =
      R"("hidden_size": 4, "intermediate_size": 2, "num_attention_heads": 2,
 "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 3, "max_position_embeddings": 64,
 "eos_token_id": [1, 2], "bos_token_id": 0)";
  write_checkpoint(at(folder, "llama"),
                   concat(R"({"architectures": ["LlamaForCausalLM"], )", kShape, R"(,
 "attention_bias": true, "mlp_bias": true, "rope_parameters": {"factor": 8.0, "high_freq_factor": 4.0,
 "low_freq_factor": 1.0, "original_max_position_embeddings": 48, "rope_theta": 10000.0,
 "rope_type": "llama3"}, "dtype": "bfloat16"})"),
                   false);
  write_checkpoint(at(folder, "qwen2"),
                   concat(R"({"architectures": ["Qwen2ForCausalLM"], )", kShape, R"(,
 "max_window_layers": 0, "sliding_window": 40, "use_sliding_window": true, "tie_word_embeddings": true,
 "layer_types": ["sliding_attention"], "rope_theta": 10000.0, "rope_scaling": {"beta_fast": 24,
 "beta_slow": 2, "factor": 4.0, "original_max_position_embeddings": 64, "truncate": false,
 "type": "yarn"}, "torch_dtype": "bfloat16"})"),
                   true);
  write_checkpoint(at(folder, "qwen3"),
                   concat(R"({"architectures": ["Qwen3ForCausalLM"], )", kShape, R"(,
 "head_dim": 2, "rope_scaling": {"type": "linear", "factor": 2}})"),
                   true);
}

// Every name in a JSON object below, in quotes.
void collect_names(const nlohmann::json& json, std::set<std::string>& names) {
  for (const auto& [name, value] : json.items()) {
    if (json.is_object()) names.insert(name);
    if (value.is_structured()) collect_names(value, names);
    const auto inner = value.is_string()
                           ? nlohmann::json::parse(value.get<std::string>(), nullptr, false)
                           : nlohmann::json();
    if (inner.is_structured()) collect_names(inner, names);
  }
}

void write_dictionary(const std::filesystem::path& folder, const std::string& path) {
  std::set<std::string> names = {"true", "false", "null",  "[]",         "{}",
                                 "-1",   "0",     "1e308", "4294967295", "9223372036854775807",
                                 "BF16", "F16",   "U8"};
  for (const auto& entry : std::filesystem::directory_iterator(folder / "sqz_file_fuzz")) {
    const std::string bytes = read_file(entry.path());
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    collect_names(nlohmann::json::parse(bytes.substr(8, length)), names);
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder / "checkpoint_fuzz")) {
    const std::string bytes = read_file(entry.path());
    collect_names(nlohmann::json::parse(bytes.substr(0, bytes.find('\0'))), names);
  }
  std::string text;
  for (const std::string& name : names) text += '"' + name + "\"\n";
  write_file(path, text);
}

Status write_all(const std::filesystem::path& folder) {
  const auto seeds = folder / "seeds";
  Env& env = Env::posix();
  SQZ_RETURN_IF_ERROR(write_indexes(seeds / "sqz_file_fuzz"));
  SQZ_RETURN_IF_ERROR(
      write_layers_file(env, at(seeds / "checkpoint_fuzz", "layers.json"), true, four_layers()));
  SQZ_RETURN_IF_ERROR(
      write_qmodel_file(env, at(seeds / "sqz_file_fuzz", "qmodel.sqz"), true, tiny_qmodel())
          .status());
  const std::vector<int32_t> ids = {3, 1, 4, 1, 5};
  SQZ_RETURN_IF_ERROR(testing::write_npy_tokens(env, at(seeds / "npy_fuzz", "ids.npy"), ids, true));
  write_capture(at(seeds / "capture_fuzz", "one_layer"));
  write_checkpoints(seeds / "checkpoint_fuzz");
  write_dictionary(seeds, at(folder / "dictionaries", "json.dict"));
  return {};
}

}  // namespace
}  // namespace sqz::testing

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const sqz::Status status = sqz::testing::write_all(argv[1]);
  if (!status.ok()) std::cerr << status.message() << '\n';
  return status.ok() ? 0 : 1;
}
