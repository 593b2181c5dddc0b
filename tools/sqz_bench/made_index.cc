// How indexes for timing are written; made_keys.cc makes what is in them.
#include "tools/sqz_bench/made_index.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>

#include "formats/base/hash.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "libindex/calibrate.h"
#include "libindex/tree.h"
#include "tools/common/signals.h"

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

Result<std::shared_ptr<const IndexFile>> IndexFile::create(const Options& options) {
  namespace fs = std::filesystem;
  if (!options.save_index.empty()) {
    protect_output(options.save_index);
    return std::make_shared<const IndexFile>(options.save_index, true);
  }
  static std::atomic<int> counter{0};
  std::error_code error;
  const fs::path folder =
      options.directory.empty() ? fs::temp_directory_path(error) : fs::path(options.directory);
  if (error || !fs::is_directory(folder, error)) {
    return Status(Code::kInvalidArgument,
                  bad_field("--directory", folder.string(), "no such folder",
                            "a folder for temporary files"));
  }
  // A name that protect_output() looks for.
  const std::string base = (folder / "sqz-bench").string();
  protect_output(base);
  return std::make_shared<const IndexFile>(
      concat(base, ".tmp.", ::getpid(), ".", counter.fetch_add(1), ".sqz"), false);
}

IndexFile::~IndexFile() {
  std::error_code ignored;
  if (!keep_) std::filesystem::remove(path_, ignored);
}

std::vector<int64_t> made_clusters(const Options& options, int64_t tokens, int64_t slots) {
  return cluster_counts(options.level_fractions, tokens, slots);
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

Status write_index(const std::string& path, const Options& options, const IndexMetadata& metadata,
                   const LayerData& data, std::span<const float> queries) {
  const int64_t exact = kSink + kTail;
  LayerShape shape{{}, metadata.tokens - exact, exact};
  for (const LayerData::Level& level : data.levels) {
    shape.clusters.push_back(std::ssize(level.offsets) / metadata.model.kv_heads - 1);
  }
  Calibration calibration;
  if (metadata.levels > 0) {
    SQZ_ASSIGN_OR_RETURN(calibration, calibration_of(options, metadata, data, queries));
  }
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(Env::posix(), path, false, metadata, {shape}));
  SQZ_RETURN_IF_ERROR(writer->write_layer(0, data));
  return writer->commit(calibration).status();
}

Result<SparseIndex> make_sparse_index(const Options& options, double bytes, int64_t layers,
                                      const Fill& fill) {
  SparseIndex out;
  SQZ_ASSIGN_OR_RETURN(out.file, IndexFile::create(options));
  const std::string& path = out.file->path();
  // Key and value of a token in 16 bits.
  const auto token_bytes = static_cast<double>(4 * options.kv_heads * options.head_dim * layers);
  const auto tokens = static_cast<int64_t>(bytes / token_bytes);
  IndexMetadata metadata = made_metadata(options, std::max<int64_t>(tokens, 1000), layers);
  metadata.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_metadata(metadata, path, Code::kInvalidArgument));
  const int64_t exact = kSink + kTail, slots = metadata.tokens - exact;
  const std::vector<LayerShape> shapes(
      static_cast<size_t>(layers), {made_clusters(options, metadata.tokens, slots), slots, exact});
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan_tensors(metadata, shapes, path));
  SQZ_ASSIGN_OR_RETURN(tensors, place_tensors(std::move(tensors)));
  Calibration calibration;
  calibration.queries = 1;
  calibration.source = "none";
  calibration.coarse_keep = {0.5};
  auto strings = metadata_to_strings(metadata);
  strings[kCalibrationKey] = calibration_text(calibration);
  strings[kChecksumsKey] = checksum_text(tensors, {});

  const std::string text = header_text(strings, tensors);
  const uint64_t data_offset = data_start(text.size());
  const std::string header = sealed_header(text, data_offset);
  const auto header_bytes = std::as_bytes(std::span(header));
  SQZ_ASSIGN_OR_RETURN(const auto file, Env::posix().create(path, Temporary::kNamed));
  SQZ_RETURN_IF_ERROR(file->write(0, header_bytes));
  // Written at its place far beyond: what lies between is a hole.
  const PlannedTensor& last = tensors.back();
  if (fill) SQZ_RETURN_IF_ERROR(fill(*file, data_offset, data_offset + last.offset));
  SQZ_RETURN_IF_ERROR(file->write(data_offset + last.offset, xxh3_128(header_bytes)));
  SQZ_RETURN_IF_ERROR(file->close());
  out.bytes = data_offset + last.offset + last.bytes;
  return out;
}

}  // namespace sqz::bench
