// Writes the seeds of sqz_file_fuzz and safetensors_fuzz: make_seeds DIR. Run again when the format
// changes, and commit what it wrote.
#include "tests/common/tiny_buckets.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/common/tiny_qmodel.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  bool ok = true;
  const auto write = [&](const char* name, const sqz::testing::TinyIndexOptions& options) {
    ok &= sqz::testing::write_tiny_index(std::string(argv[1]) + "/" + name, options).ok();
  };
  sqz::testing::TinyIndexOptions small;
  small.layers = 1;
  small.kv_heads = small.query_heads = 1;
  small.tokens = 32;
  small.clusters = {2, 4};
  write("two_levels.sqz", small);
  small.clusters = {3};
  small.has_kv = small.has_value_means = false;
  write("one_level_without_kv.sqz", small);
  small.layers = 2;
  small.has_kv = true;
  small.windows = {{0, 8}};
  small.dense_layers = {1};
  write("nothing_clustered.sqz", small);
  small.windows.clear();
  small.dense_layers.clear();
  small.layers = 1;
  small.page_size = 8;
  small.key_calibration = true;
  small.heavy_hitters = true;
  small.layer_budgets = {8};
  write("pages.sqz", small);
  ok &= sqz::write_layers_file(sqz::Env::posix(), std::string(argv[1]) + "/layers.sqz", true,
                               sqz::testing::four_layers())
            .ok();
  ok &= sqz::write_qmodel_file(sqz::Env::posix(), std::string(argv[1]) + "/qmodel.sqz", true,
                               sqz::testing::tiny_qmodel())
            .ok();
  const std::string buckets = std::string(argv[1]) + "/buckets.sqz";
  ok &= sqz::testing::write_tiny_buckets(buckets, sqz::testing::tiny_qmodel(), 132).ok();
  return ok ? 0 : 1;
}
