#include "libruntime/cuda/driver.h"

#include <atomic>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

Status detail::find_driver_function(const char* name, void** function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaGetDriverEntryPointByVersion(name, function, 12010, cudaEnableDefault, &found));
#else
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found));
#endif
  if (found == cudaDriverEntryPointSuccess && *function != nullptr) return {};
  return {Code::kUnsupported, concat("the CUDA driver has no ", name,
                                     ": a driver for CUDA 12.1 or newer is needed, because kernels "
                                     "take more than 4 KB of parameters")};
}

// Elements are copied as they are, so that one type stands for bf16 and f16.
Status encode_tensor_map(CUtensorMap& map, const void* data, uint32_t rank, const uint64_t* sizes,
                         const uint64_t* strides, const uint32_t* box, uint32_t row_bytes) {
  static std::atomic<decltype(&cuTensorMapEncodeTiled)> found = nullptr;  // looked up once
  decltype(&cuTensorMapEncodeTiled) encode = found;
  if (encode == nullptr) {
    SQZ_RETURN_IF_ERROR(find_driver_function("cuTensorMapEncodeTiled", encode));
    found = encode;
  }
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::kInternal,
          concat("cuTensorMapEncodeTiled of ", rank, " dimensions, ", sizes[0], " x ", sizes[1],
                 " x ", sizes[2], ": CUDA driver error ", static_cast<int>(result))};
}

Status encode_rows(CUtensorMap& map, const void* data, int64_t heads, int64_t rows, int64_t dim,
                   uint32_t box_rows, uint32_t row_bytes) {
  const uint64_t sizes[3] = {static_cast<uint64_t>(dim), static_cast<uint64_t>(rows),
                             static_cast<uint64_t>(heads)};
  const uint64_t strides[2] = {sizes[0] * 2, sizes[0] * sizes[1] * 2};
  const uint32_t box[3] = {row_bytes / 2, box_rows, 1};
  return encode_tensor_map(map, data, 3, sizes, strides, box, row_bytes);
}

}  // namespace sqz::cuda
