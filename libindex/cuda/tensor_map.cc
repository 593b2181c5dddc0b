#include "libindex/cuda/tensor_map.h"

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

}  // namespace

Status encode_rows(CUtensorMap& map, const void* data, int64_t heads, int64_t rows, int64_t dim,
                   uint32_t box_rows, uint32_t row_bytes) {
  EncodeFunction encode = nullptr;
  SQZ_RETURN_IF_ERROR(find_encode(encode));
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {sizes[0] * 2, sizes[0] * sizes[1] * 2};
  const cuuint32_t box[3] = {row_bytes / 2, box_rows, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::kInternal, concat("cuTensorMapEncodeTiled of ", heads, " x ", rows, " x ", dim,
                                  ": CUDA driver error ", static_cast<int>(result))};
}

}  // namespace sqz::cuda
