# The prefill kernels. Those for Hopper use instructions of that chip alone and are compiled for it
# alone.
set(SQZ_PREFILL_DIR ${CMAKE_CURRENT_LIST_DIR}/kernels/cuda/prefill)

set(SQZ_PREFILL_KERNELS)
foreach(kernel prefill/attend/sm90 prefill/lookup/sm90)
  sqz_instantiate(SQZ_PREFILL_KERNELS ${kernel} SQZ_KERNEL_DIMS __nv_bfloat16 __half)
endforeach()
add_library(sqz_runtime_cuda_sm90 OBJECT ${SQZ_PREFILL_KERNELS})
sqz_cuda_target(sqz_runtime_cuda_sm90 90a-real)

target_sources(sqz_runtime_cuda PRIVATE
  ${SQZ_PREFILL_DIR}/common/block_table.cu ${SQZ_PREFILL_DIR}/common/tiles.cc
  ${SQZ_PREFILL_DIR}/attend/sm90/kernel.cc ${SQZ_PREFILL_DIR}/attend/sm90/schedule.cu
  ${SQZ_PREFILL_DIR}/lookup/denominators.cu ${SQZ_PREFILL_DIR}/lookup/kernel.cc
  ${SQZ_PREFILL_DIR}/lookup/select.cu
  $<TARGET_OBJECTS:sqz_runtime_cuda_sm90>)
