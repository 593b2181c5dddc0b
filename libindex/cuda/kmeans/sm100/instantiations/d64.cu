#include "libindex/cuda/kmeans/sm100/kernel.cuh"

template sqz::Status sqz::cuda::sm100::launch_assign<64>(const AssignParams&, int, cudaStream_t);
