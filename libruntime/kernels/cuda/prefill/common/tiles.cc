#include "libruntime/kernels/cuda/prefill/common/tiles.h"

#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

Status check_prefill(const PrefillShape& shape, const QueryBlocks& blocks, bool sm90) {
  if (shape.dtype != DType::kBF16 && shape.dtype != DType::kF16) {
    return {Code::kUnsupported, "prefill on the GPU takes BF16 and F16"};
  }
  if (sm90 && !is_kernel_dim(shape.dim)) return no_such_dim(shape.dim);
  if (shape.kv_heads <= 0 || shape.group <= 0 || shape.group > 128 || !(shape.scale > 0)) {
    return {Code::kInvalidArgument,
            concat("prefill on the GPU: ", shape.kv_heads, " KV heads of ", shape.group,
                   " query heads, scale ", shape.scale,
                   "; expected at least one of 1 to 128 and a scale above zero")};
  }
  if (blocks.tokens < 0 || blocks.count < 0 || blocks.block_tokens <= 0) {
    return {Code::kInvalidArgument, concat("prefill on the GPU: ", blocks.tokens, " tokens in ",
                                           blocks.count, " blocks of ", blocks.block_tokens)};
  }
  return {};
}

Status encode_row_maps(RowMaps& maps, const void* data, int32_t heads, int64_t rows, int32_t dim) {
  for (uint32_t i = 0; i < kBoxes; ++i) {
    SQZ_RETURN_IF_ERROR(encode_rows(maps.box[i], data, heads, rows, dim, 1u << i, kRowBytes));
  }
  return {};
}

Status encode_key_maps(KeyMaps& maps, const PrefillShape& shape, const AttendLayer& keys) {
  if (maps.made) return {};
  // A tensor without rows is never read; another one stands in for its map.
  AttendLayer all = keys;
  if (keys.slots == 0) {
    all.keys = keys.exact_keys;
    all.values = keys.exact_values;
    all.slots = keys.exact;
  }
  if (keys.exact == 0) {
    all.exact_keys = keys.keys;
    all.exact_values = keys.values;
    all.exact = keys.slots;
  }
  const auto encode = [&](RowMaps& to, const void* data, int64_t rows) {
    return encode_row_maps(to, data, shape.kv_heads, rows, shape.dim);
  };
  SQZ_RETURN_IF_ERROR(encode(maps.keys, all.keys, all.slots));
  SQZ_RETURN_IF_ERROR(encode(maps.values, all.values, all.slots));
  SQZ_RETURN_IF_ERROR(encode(maps.exact_keys, all.exact_keys, all.exact));
  SQZ_RETURN_IF_ERROR(encode(maps.exact_values, all.exact_values, all.exact));
  maps.made = true;
  return {};
}

Status encode_query_map(CUtensorMap& map, const PrefillShape& shape, const void* queries,
                        int32_t total_tokens, int32_t heads, int32_t tokens) {
  const auto d = static_cast<uint64_t>(shape.dim), group = static_cast<uint64_t>(shape.group);
  const auto kv_heads = static_cast<uint64_t>(shape.kv_heads);
  const uint64_t sizes[4] = {d, group, kv_heads, static_cast<uint64_t>(total_tokens)};
  const uint64_t strides[3] = {2 * d, 2 * d * group, 2 * d * group * kv_heads};
  const uint32_t box[4] = {kRowBytes / 2, static_cast<uint32_t>(heads), 1,
                           static_cast<uint32_t>(tokens)};
  return encode_tensor_map(map, queries, 4, sizes, strides, box, kRowBytes);
}

}  // namespace sqz::cuda
