# sqz_runtime_cuda: the CUDA backend of libsqz (libruntime/cuda, libruntime/kernels/cuda), with the
# static CUDA runtime: the driver is all that it needs of a machine.
set(SQZ_RUNTIME_CUDA_DIR ${CMAKE_CURRENT_LIST_DIR})

# Adds to the list `sources` a kernel's instantiation.cu.in for each of its dimensions and types. Its
# folder is in SQZ_KERNELS_DIR.
set(SQZ_KERNELS_DIR ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda)
set(SQZ_KERNEL_DIMS 64 96 128 256)
set(SQZ_SM80_DIMS 64 80 96 128 160 192 256 512)
function(sqz_instantiate sources kernel dims)
  foreach(TYPE ${ARGN})
    foreach(DIM ${${dims}})
      string(REPLACE ", " "_" name "${TYPE}_d${DIM}")
      set(file ${CMAKE_CURRENT_BINARY_DIR}/${kernel}/${name}.cu)
      configure_file(${SQZ_KERNELS_DIR}/${kernel}/instantiation.cu.in ${file} @ONLY)
      list(APPEND ${sources} ${file})
    endforeach()
  endforeach()
  set(${sources} ${${sources}} PARENT_SCOPE)
endfunction()

set(SQZ_RUNTIME_CUDA_KERNELS)
foreach(kernel batch/lookup decode/lookup decode/attend prefill/attend/sm80)
  list(APPEND SQZ_RUNTIME_CUDA_KERNELS ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/${kernel}/kernel.cc)
endforeach()
foreach(kernel batch/lookup decode/lookup decode/attend)
  sqz_instantiate(SQZ_RUNTIME_CUDA_KERNELS ${kernel} SQZ_KERNEL_DIMS all)
endforeach()
sqz_instantiate(SQZ_RUNTIME_CUDA_KERNELS prefill/lookup/sm80 SQZ_SM80_DIMS all)
list(APPEND SQZ_SM80_DIMS "192, 128")  # of keys, and of values
sqz_instantiate(SQZ_RUNTIME_CUDA_KERNELS prefill/attend/sm80 SQZ_SM80_DIMS all)

add_library(sqz_runtime_cuda STATIC
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/block_server.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/bucket_lookup.cc
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/context_table.cc
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/device.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/driver.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/device_index.cc
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/session.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/session_create.cc
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/static_lists.cc
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/block_chunks.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/batch_server.cc ${SQZ_RUNTIME_CUDA_DIR}/cuda/upload.cc
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/add_counters/kernel.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/batch/lookup/chosen.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/compiled_for/kernel.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/decode/contexts/kernel.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/classify/kernel.cc
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/classify/product.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/classify/queries.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/classify/shares.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/classify/weights.cc
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/merge_states/kernel.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/turn_rows/kernel.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/common/launch_options.cc
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/attend/merge.cu
  ${SQZ_RUNTIME_CUDA_DIR}/kernels/cuda/prefill/unpack_rows/kernel.cu
  ${SQZ_RUNTIME_CUDA_KERNELS})
sqz_cuda_target(sqz_runtime_cuda "${SQZ_CUDA_ARCHITECTURES}")
target_link_libraries(sqz_runtime_cuda PUBLIC sqz_runtime_core)
include(${CMAKE_CURRENT_LIST_DIR}/cuda_prefill.cmake)
