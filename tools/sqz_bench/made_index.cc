#include "tools/sqz_bench/made_index.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>

#include "libindex/calibrate.h"

namespace sqz::bench {
namespace {

Result<Calibration> calibration_of(const Options& options, const IndexMetadata& metadata,
                                   const LayerData& data, std::span<const float> queries) {
  CalibrationInput input;
  input.layers = 1;
  input.kv_heads = metadata.model.kv_heads;
  input.group = metadata.model.group_size();
  input.dim = metadata.model.head_dim;
  const int64_t row = input.group * input.dim;
  input.queries = std::ssize(queries) / (input.kv_heads * row);
  input.coarse_keep = options.coarse_keep;
  input.scale = static_cast<float>(metadata.model.attention_scale);
  input.source = "made-up queries";
  CalibrationLayer layer;
  for (const LayerData::Level& level : data.levels) {
    layer.levels.push_back({{level.centroids.begin(), level.centroids.end()},
                            {level.offsets.begin(), level.offsets.end()}});
  }
  // [n, Hq, d] to [Hkv, n, group, d].
  for (int64_t head = 0; head < input.kv_heads; ++head) {
    for (int64_t t = 0; t < input.queries; ++t) {
      const float* from = queries.data() + (t * input.kv_heads + head) * row;
      layer.queries.insert(layer.queries.end(), from, from + row);
    }
  }
  input.sparse.push_back(std::move(layer));
  return calibrate(input, options.threads);
}

}  // namespace

Result<std::unique_ptr<TemporaryFile>> TemporaryFile::create(const std::string& directory,
                                                             const std::string& stem) {
  namespace fs = std::filesystem;
  static std::atomic<int> counter{0};
  std::error_code error;
  const fs::path folder = directory.empty() ? fs::temp_directory_path(error) : fs::path(directory);
  if (error || !fs::is_directory(folder, error)) {
    return Status(Code::kNotFound, bad_field("--directory", folder.string(), "no such folder",
                                             "a folder for temporary files"));
  }
  const std::string name = concat(stem, ".", ::getpid(), ".", counter.fetch_add(1), ".sqz");
  return std::unique_ptr<TemporaryFile>(new TemporaryFile((folder / name).string(), false));
}

std::unique_ptr<TemporaryFile> TemporaryFile::kept(std::string path) {
  return std::unique_ptr<TemporaryFile>(new TemporaryFile(std::move(path), true));
}

TemporaryFile::~TemporaryFile() {
  std::error_code ignored;
  if (!keep_) std::filesystem::remove(path_, ignored);
}

Result<std::unique_ptr<TemporaryFile>> index_file(const Options& options) {
  if (!options.save_index.empty()) return TemporaryFile::kept(options.save_index);
  return TemporaryFile::create(options.directory, "sqz-bench");
}

IndexMetadata made_metadata(const Options& options, int64_t tokens, int64_t layers) {
  IndexMetadata m;
  m.model.architecture = "LlamaForCausalLM";
  m.model.layers = layers;
  m.model.query_heads = options.query_heads;
  m.model.kv_heads = options.kv_heads;
  m.model.head_dim = options.head_dim;
  m.model.hidden_size = options.query_heads * options.head_dim;
  m.model.vocab_size = 128256;
  m.model.max_positions = std::max<int64_t>(tokens, 131072);
  m.model.sliding_window.assign(static_cast<size_t>(layers), 0);
  m.model.weights_hash = "0000000000000000";
  m.model.attention_scale = 1.0 / std::sqrt(static_cast<double>(options.head_dim));
  m.tokens_hash = "0000000000000000";
  m.tokens = tokens;
  m.sink = kSink;
  m.tail = kTail;
  m.levels = 2;
  m.layers.resize(static_cast<size_t>(layers));
  m.build = {{"engine", "sqz-bench"}, {"seed", options.seed}};
  return m;
}

Status write_made_index(const std::string& path, const Options& options,
                        const IndexMetadata& metadata, const LayerShape& shape,
                        const LayerData& data, std::span<const float> queries) {
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration,
                       calibration_of(options, metadata, data, queries));
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(Env::posix(), path, false, metadata, {shape}));
  SQZ_RETURN_IF_ERROR(writer->write_layer(0, data));
  return writer->commit(calibration).status();
}

}  // namespace sqz::bench
