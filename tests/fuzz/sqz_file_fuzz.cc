// Any bytes as a .sqz file, index or query classifier: opened, every view walked,
// verified; or refused.
#include "formats/base/checked.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_layout.h"
#include "tests/fuzz/sqz_input.h"

namespace {

// The first and the last byte of every tensor.
void walk(const sqz::IndexMetadata& metadata, const sqz::LayerView& view) {
  sqz::each_tensor(metadata, view,
                   [&](const std::string&, const auto* data, sqz::DType dtype, sqz::Dims dims) {
                     dims.push_back(view.kv_heads * sqz::dtype_size(dtype));
                     const int64_t bytes = sqz::checked_elements(dims).value();
                     if (bytes == 0) return;
                     const auto* at = reinterpret_cast<const volatile unsigned char*>(data);
                     (void)at[0], (void)at[bytes - 1];
                   });
  for (const sqz::StateTensor& state : view.state) {
    const int64_t bytes = sqz::checked_elements(state.shape).value() * sqz::dtype_size(state.dtype);
    const auto* at = static_cast<const volatile unsigned char*>(state.data);
    if (bytes > 0) (void)at[0], (void)at[bytes - 1];
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const sqz::SqzInput input({data, size});
  sqz::MemoryEnv env(input.file);
  (void)sqz::read_qmodel_file("fuzz.sqz", env).ok();
  auto file = sqz::SqzFile::open("fuzz.sqz", sqz::OpenMode::kMmap, env);
  if (!file.ok()) return 0;
  for (int64_t l = 0; l < (*file)->metadata().model.layers; ++l) {
    walk((*file)->metadata(), (*file)->layer(l));
  }
  (void)(*file)->calibration().ok();
  (void)(*file)->verify().ok();
  return 0;
}
