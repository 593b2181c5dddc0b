// A tiny index with rows of codes, ready for sessions, and what its rows decode to.
#pragma once

#include "libindex/compress.h"
#include "tests/common/must.h"
#include "tests/libruntime/served_index.h"

namespace sqz::testing {

inline Served serve_coded(const TinyIndexOptions& options, const CompressOptions& compress) {
  const TemporaryDirectory dir;
  const std::string path = dir.file("whole.sqz"), out = dir.file("codes.sqz");
  EXPECT_TRUE(write_tiny_index(path, options).ok());
  must(compress_index(Env::posix(), **SqzFile::open(path), compress, out, true, 1));
  return {options, must(make_served_index(must(SqzFile::open(out, OpenMode::kRead))))};
}

// The layer as float32: rows of codes decoded.
struct Decoded {
  LayerView view;
  std::vector<float> keys, values, exact_keys, exact_values;
  std::vector<std::vector<float>> means;
};

inline std::vector<float> floats(const LayerView& view, const void* data, int64_t rows, int64_t d) {
  std::vector<float> out;
  for (int64_t i = 0; i < view.kv_heads * rows * d; ++i) {
    out.push_back(static_cast<float>(reference::element(view.dtype, data, i)));
  }
  return out;
}

inline std::vector<float> decode(const LayerView& view, const CodedRows& all, const void* means,
                                 int64_t d) {
  const LevelView& finest = view.level[static_cast<size_t>(view.levels - 1)];
  std::vector<float> out;
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const CodedRows rows = all.from_head(head, view.slots, d);
    const uint32_t* offsets = finest.offsets + head * (finest.clusters + 1);
    for (int64_t c = 0, slot = 0; slot < view.slots; ++slot) {
      while (slot >= offsets[c + 1]) ++c;
      const double scale = reference::element(view.dtype, rows.scales, slot);
      for (int64_t i = 0; i < d; ++i) {
        const auto number = static_cast<int8_t>(rows.codes[slot * d + i]);
        const double mean =
            reference::element(view.dtype, means, (head * finest.clusters + c) * d + i);
        out.push_back(static_cast<float>(number * scale + mean));
      }
    }
  }
  return out;
}

inline Decoded decode(const LayerView& view) {
  Decoded out{.view = view};
  const LevelView& finest = view.level[static_cast<size_t>(std::max(view.levels - 1, 0))];
  const bool coded = view.coded_keys.bits > 0;
  const int64_t d = view.head_dim, dv = view.value_dim;
  out.keys = coded ? decode(view, view.coded_keys, finest.centroids, d)
                   : floats(view, view.keys, view.slots, d);
  out.values = coded ? decode(view, view.coded_values, finest.value_means, dv)
                     : floats(view, view.values, view.slots, dv);
  out.exact_keys = floats(view, view.exact_keys, view.exact, d);
  out.exact_values = floats(view, view.exact_values, view.exact, dv);
  for (int k = 0; k < view.levels; ++k) {
    LevelView& level = out.view.level[static_cast<size_t>(k)];
    out.means.push_back(floats(view, level.centroids, level.clusters, d));
    out.means.push_back(floats(view, level.value_means, level.clusters, dv));
  }
  for (int k = 0; k < view.levels; ++k) {
    out.view.level[static_cast<size_t>(k)].centroids = out.means[static_cast<size_t>(2 * k)].data();
    out.view.level[static_cast<size_t>(k)].value_means =
        out.means[static_cast<size_t>(2 * k + 1)].data();
  }
  out.view.dtype = DType::kF32;
  out.view.keys = out.keys.data();
  out.view.values = out.values.data();
  out.view.exact_keys = out.exact_keys.data();
  out.view.exact_values = out.exact_values.data();
  return out;
}

}  // namespace sqz::testing
