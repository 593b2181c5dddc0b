# sqz_index_cuda: k-means on the GPU (libindex/cuda/kmeans.h). The Hopper kernels use instructions
# of that chip alone and are compiled for it alone; everything else runs from compute capability
# 8.0.
set(SQZ_INDEX_CUDA_DIR ${CMAKE_CURRENT_LIST_DIR}/cuda)
set(SQZ_KERNELS_DIR ${SQZ_INDEX_CUDA_DIR})  # for sqz_instantiate()

set(SQZ_KMEANS_DIMS 64 96 128 256)
sqz_instantiate(SQZ_KMEANS_SM90 kmeans/sm90 SQZ_KMEANS_DIMS all)
add_library(sqz_index_cuda_sm90 OBJECT ${SQZ_KMEANS_SM90})
sqz_cuda_target(sqz_index_cuda_sm90 90a-real)

list(APPEND SQZ_KMEANS_DIMS 32)
sqz_instantiate(SQZ_KMEANS_SM80 kmeans/sm80 SQZ_KMEANS_DIMS all)
add_library(sqz_index_cuda STATIC
  ${SQZ_INDEX_CUDA_DIR}/kmeans/kmeans.cc
  ${SQZ_INDEX_CUDA_DIR}/kmeans/means.cu
  ${SQZ_INDEX_CUDA_DIR}/layer/kernels.cu
  ${SQZ_INDEX_CUDA_DIR}/calibrate/kernels.cu
  ${SQZ_INDEX_CUDA_DIR}/kmeans/resolve/kernel.cu
  ${SQZ_INDEX_CUDA_DIR}/kmeans/update/centroids.cu
  ${SQZ_INDEX_CUDA_DIR}/kmeans/update/group.cu
  ${SQZ_INDEX_CUDA_DIR}/kmeans/update/points.cu
  ${SQZ_INDEX_CUDA_DIR}/kmeans/update/sort.cu
  ${SQZ_KMEANS_SM80}
  $<TARGET_OBJECTS:sqz_index_cuda_sm90>)
sqz_cuda_target(sqz_index_cuda "${SQZ_CUDA_ARCHITECTURES}")
target_link_libraries(sqz_index_cuda PUBLIC sqz_runtime_cuda)
