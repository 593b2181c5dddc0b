// Any bytes as a .sqz file, index or query classifier: opened, every view walked,
// verified; or refused.
#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "tests/fuzz/sqz_input.h"

namespace {

template <class T>
void touch(const T* data, int64_t count) {
  if (data == nullptr || count == 0) return;
  volatile T first = data[0], last = data[count - 1];
  (void)first, (void)last;
}

void walk(const sqz::LayerView& view) {
  const int64_t row = view.head_dim * sqz::dtype_size(view.dtype);
  const auto bytes = [](const void* p) { return static_cast<const unsigned char*>(p); };
  for (int k = 0; k < view.levels; ++k) {
    const sqz::LevelView& level = view.level[k];
    touch(bytes(level.centroids), view.kv_heads * level.clusters * row);
    touch(bytes(level.value_means), level.value_means ? view.kv_heads * level.clusters * row : 0);
    touch(level.offsets, view.kv_heads * (level.clusters + 1));
  }
  touch(bytes(view.page_min), view.kv_heads * view.pages * row);
  touch(bytes(view.page_max), view.kv_heads * view.pages * row);
  touch(view.bucket_offsets, view.kv_heads * (view.buckets + 1));
  const sqz::ClassifierView& network = view.classifier;
  touch(network.centroids, view.kv_heads * view.buckets * view.head_dim);
  touch(network.hidden_weight, view.kv_heads * network.hidden * view.head_dim);
  touch(network.hidden_bias, view.kv_heads * network.hidden);
  touch(network.output_weight, view.kv_heads * view.buckets * network.hidden);
  touch(network.output_bias, view.kv_heads * view.buckets);
  touch(view.positions, view.kv_heads * view.slots);
  touch(view.heavy, view.kv_heads * view.slots);
  touch(bytes(view.keys), view.kv_heads * view.slots * row);
  touch(bytes(view.values), view.kv_heads * view.slots * row);
  touch(bytes(view.exact_keys), view.kv_heads * view.exact * row);
  touch(bytes(view.exact_values), view.kv_heads * view.exact * row);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const sqz::SqzInput input({data, size});
  sqz::MemoryEnv env(input.file);
  (void)sqz::read_qmodel_file("fuzz.sqz", env).ok();
  (void)sqz::verify_qmodel_file("fuzz.sqz", env).ok();
  auto file = sqz::SqzFile::open("fuzz.sqz", sqz::OpenMode::kMmap, env);
  if (!file.ok()) return 0;
  for (int64_t l = 0; l < (*file)->metadata().model.layers; ++l) walk((*file)->layer(l));
  (void)(*file)->calibration().ok();
  (void)(*file)->verify().ok();
  return 0;
}
