#include "libindex/compress.h"

#include <algorithm>
#include <cmath>

#include "formats/base/parallel.h"
#include "formats/sqz_layout.h"
#include "libindex/copy_index.h"

namespace sqz {
namespace {

template <class T>
T to_stored(float x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return to_float16(x);
  }
}

// The codes of a residual [d], and their scale.
template <class T>
T encode_row(const float* residual, int64_t dim, std::byte* codes) {
  float most = 0;
  for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::abs(residual[i]));
  const T stored = to_stored<T>(most / 127);
  const float scale = to_float(stored);
  for (int64_t i = 0; i < dim; ++i) {
    const float x = scale > 0 ? std::nearbyint(residual[i] / scale) : 0.0f;
    codes[i] = static_cast<std::byte>(static_cast<int8_t>(std::clamp(x, -127.0f, 127.0f)));
  }
  return stored;
}

// Codes of rows [Hkv, M, d] of a layer, as residuals of the means [Hkv, n, d] of its finest level.
// Values have a d of their own.
// codes, scales: [Hkv, M, ...].
template <class T>
Status encode(const LayerView& layer, const void* all_rows, const void* all_means, int64_t d,
              const std::string& what, int threads, std::byte* codes, T* scales) {
  const LevelView& finest = layer.level[static_cast<size_t>(layer.levels - 1)];
  const int64_t clusters = finest.clusters, slots = layer.slots;
  return parallel_for(layer.kv_heads, threads, [&](int64_t head) {
    const uint32_t* offsets = finest.offsets + head * (clusters + 1);
    const T* rows = static_cast<const T*>(all_rows) + head * slots * d;
    const T* means = static_cast<const T*>(all_means) + head * clusters * d;
    std::vector<float> residual(static_cast<size_t>(d));
    for (int64_t c = 0; c < clusters; ++c) {
      for (int64_t slot = offsets[c]; slot < offsets[c + 1]; ++slot) {
        for (int64_t i = 0; i < d; ++i) {
          residual[static_cast<size_t>(i)] =
              to_float(rows[slot * d + i]) - to_float(means[c * d + i]);
        }
        const int64_t row = head * slots + slot;
        scales[row] = encode_row<T>(residual.data(), d, codes + row * d);
        if (std::isfinite(to_float(scales[row]))) continue;
        return Status(Code::kNumeric, concat(what, ", KV head ", head, ", slot ", slot,
                                             ": too far from its cluster's mean"));
      }
    }
    return Status();
  });
}

Status check_compressible(const SqzFile& index) {
  const IndexMetadata& metadata = index.metadata();
  const Refuse refuse{index.path(), Code::kUnsupported};
  if (metadata.partition != Partition::kKmeans || metadata.levels == 0) {
    return refuse("partition", partition_name(metadata.partition), "kmeans, with clusters");
  }
  if (!metadata.has_value_means) return refuse("value means", "none", "some");
  if (!metadata.has_codes()) return {};
  return refuse("rows", rows_name(metadata.rows),
                "16 bits: compress the index that this one was made of");
}

}  // namespace

Status set_rows(const CompressOptions& options, IndexMetadata& metadata) {
  if (options.rows == RowKind::k16) {
    if (options.layers16.empty()) return {};
    return {Code::kInvalidArgument, "layers of 16-bit rows: found some, expected rows q8"};
  }
  metadata.rows = options.rows;
  for (const int64_t layer : options.layers16) {
    if (layer < 0 || layer >= metadata.model.layers) {
      return {Code::kInvalidArgument, concat("layers of 16-bit rows: found ", layer,
                                             ", expected 0 to ", metadata.model.layers - 1)};
    }
    metadata.layers[static_cast<size_t>(layer)].rows16 = true;
  }
  return {};
}

Status LayerCompressor::compress(int64_t layer, LayerView& data, int threads) {
  if (data.levels == 0) return {};
  const LevelView& finest = data.level[static_cast<size_t>(data.levels - 1)];
  const auto make = [&](const void* rows, const void* means, int64_t dim, const char* what,
                        Coded& out, CodedRows& coded) {
    const auto count = data.kv_heads * data.slots;
    out.codes.resize(static_cast<size_t>(count * dim));
    out.scales.resize(static_cast<size_t>(count * dtype_size(data.dtype)));
    coded.codes = out.codes.data();
    coded.scales = out.scales.data();
    const auto run = [&](auto* scales) {
      return encode(data, rows, means, dim, concat("layer ", layer, ", ", what), threads,
                    out.codes.data(), scales);
    };
    return data.dtype == DType::kBF16 ? run(reinterpret_cast<BFloat16*>(out.scales.data()))
                                      : run(reinterpret_cast<Float16*>(out.scales.data()));
  };
  if (metadata_.rows_of(layer) == RowKind::k16) return {};
  data.coded_keys.bits = data.coded_values.bits = 8;
  SQZ_RETURN_IF_ERROR(
      make(data.keys, finest.centroids, data.head_dim, "key", keys_, data.coded_keys));
  return make(data.values, finest.value_means, data.value_dim, "value", values_, data.coded_values);
}

Result<CompressReport> compress_index(Env& env, const SqzFile& index,
                                      const CompressOptions& options, const std::string& output,
                                      bool replace, int threads,
                                      const std::function<void(double)>& progress) {
  const auto compress = [&]() -> Result<CompressReport> {
    SQZ_RETURN_IF_ERROR(check_compressible(index));
    IndexMetadata metadata = index.metadata();
    SQZ_RETURN_IF_ERROR(set_rows(options, metadata));
    SQZ_RETURN_IF_ERROR(index.verify({}, threads));
    SQZ_ASSIGN_OR_RETURN(const Calibration calibration, index.calibration());
    LayerCompressor compressor(metadata);
    const auto put = [&](SqzWriter& writer, int64_t layer) {
      LayerView data = index.layer(layer);
      SQZ_RETURN_IF_ERROR(compressor.compress(layer, data, resolve_threads(threads)));
      return writer.write_layer(layer, data);
    };
    CompressReport report;
    report.bytes_before = index.file_bytes();
    SQZ_ASSIGN_OR_RETURN(report.bytes, copy_index(env, index, metadata, calibration, output,
                                                  replace, progress, put));
    return report;
  };
  return within_memory(compress, "not enough memory to compress the index");
}

}  // namespace sqz
