// Writes the seeds of the fuzz targets that are no text: make_seeds FOLDER, where FOLDER is
// tests/fuzz. Run again when a format changes, and commit what it wrote.
#include <filesystem>
#include <iostream>

#include "libindex/compress.h"
#include "libindex/prune.h"
#include "tests/common/layered_index.h"
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
  o.heavy_hitters = true;
  o.layer_budgets = {8};
  SQZ_RETURN_IF_ERROR(write_tiny_index(at(folder, "pages.sqz"), o).status());
  SQZ_RETURN_IF_ERROR(
      write_layered_index(at(folder, "layers.sqz"), {.partition = Partition::kPages}));
  SQZ_RETURN_IF_ERROR(write_tiny_buckets(at(folder, "buckets.sqz"), tiny_qmodel(), 132).status());

  TinyIndexOptions clusters = {
      .layers = 1, .query_heads = 1, .kv_heads = 1, .tokens = 32, .clusters = {2, 4}};
  const std::string plain = at(folder, "plain.sqz");
  SQZ_RETURN_IF_ERROR(write_tiny_index(plain, clusters).status());
  SQZ_ASSIGN_OR_RETURN(const auto rows, SqzFile::open(plain, OpenMode::kRead));
  SQZ_RETURN_IF_ERROR(
      compress_index(Env::posix(), *rows, {.rows = RowKind::kQ8}, at(folder, "q8.sqz"), true, 1)
          .status());
  std::filesystem::remove(plain);

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
  const std::vector<std::string> datasets = {{2, 0, 1, 1, 3},
                                             {3, 0, 1, 1, 2},
                                             {0, 9, 1, 3, 1, 3, 8},
                                             {1, 4, 1, 3, 1, 3, 8},
                                             {0, 0, 1, 3, 2, 2, 8}};
  std::string bytes = to_json(model).str() + '\0';
  for (const std::string& dataset : datasets) bytes += dataset;
  write_file(path, bytes);
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
  write_capture(at(seeds / "capture_fuzz", "one_layer"));
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
