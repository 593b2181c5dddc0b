#include "libruntime/kernels/cuda/prefill_common/tiles.h"

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver is not linked: the library must load on machines without one.
Status find_encode(EncodeFunction& encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  SQZ_RETURN_IF_CUDA_ERROR(error);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    return {Code::kUnsupported,
            "the CUDA driver has no cuTensorMapEncodeTiled: a driver for CUDA 12.0 or newer is "
            "needed"};
  }
  encode = reinterpret_cast<EncodeFunction>(function);
  return {};
}

// Elements are copied as they are, so that one type stands for bf16 and f16.
Status encode_map(EncodeFunction encode, CUtensorMap& map, const void* data, cuuint32_t rank,
                  const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::kInternal,
          concat("cuTensorMapEncodeTiled of ", rank, " dimensions, ", sizes[0], " x ", sizes[1],
                 " x ", sizes[2], ": CUDA driver error ", static_cast<int>(result))};
}

}  // namespace

Status check_prefill(const PrefillShape& shape, const QueryBlocks& blocks) {
  if (shape.dtype != DType::kBF16 && shape.dtype != DType::kF16) {
    return {Code::kUnsupported, "prefill on the GPU takes BF16 and F16"};
  }
  if (shape.dim != 64 && shape.dim != 96 && shape.dim != 128 && shape.dim != 256) {
    return {Code::kUnsupported, concat("prefill on the GPU: head dimension ", shape.dim,
                                       ", expected 64, 96, 128 or 256")};
  }
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

Status encode_row_maps(RowMaps& maps, const void* data, int32_t heads, int32_t rows, int32_t dim) {
  EncodeFunction encode = nullptr;
  SQZ_RETURN_IF_ERROR(find_encode(encode));
  const auto d = static_cast<cuuint64_t>(dim);
  const cuuint64_t sizes[3] = {d, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {2 * d, 2 * d * sizes[1]};
  for (uint32_t i = 0; i < kBoxes; ++i) {
    const cuuint32_t box[3] = {kRowBytes / 2, 1u << i, 1};
    SQZ_RETURN_IF_ERROR(encode_map(encode, maps.box[i], data, 3, sizes, strides, box));
  }
  return {};
}

Status encode_query_map(CUtensorMap& map, const PrefillShape& shape, const void* queries,
                        int32_t total_tokens, int32_t heads, int32_t tokens) {
  EncodeFunction encode = nullptr;
  SQZ_RETURN_IF_ERROR(find_encode(encode));
  const auto d = static_cast<cuuint64_t>(shape.dim), group = static_cast<cuuint64_t>(shape.group);
  const auto kv_heads = static_cast<cuuint64_t>(shape.kv_heads);
  const cuuint64_t sizes[4] = {d, group, kv_heads, static_cast<cuuint64_t>(total_tokens)};
  const cuuint64_t strides[3] = {2 * d, 2 * d * group, 2 * d * group * kv_heads};
  const cuuint32_t box[4] = {kRowBytes / 2, static_cast<cuuint32_t>(heads), 1,
                             static_cast<cuuint32_t>(tokens)};
  return encode_map(encode, map, queries, 4, sizes, strides, box);
}

}  // namespace sqz::cuda
