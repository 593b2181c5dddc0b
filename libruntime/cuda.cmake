# sqz_runtime_cuda: the CUDA backend of libsqz (libruntime/cuda, libruntime/kernels/cuda), with the
# static CUDA runtime: the driver is all that it needs of a machine.
set(SQZ_RUNTIME_CUDA_DIR ${CMAKE_CURRENT_LIST_DIR})

add_library(sqz_runtime_cuda STATIC
  ${SQZ_RUNTIME_CUDA_DIR}/cuda/device.cc)
sqz_cuda_target(sqz_runtime_cuda "80;90")
target_link_libraries(sqz_runtime_cuda PUBLIC sqz_runtime_core)
