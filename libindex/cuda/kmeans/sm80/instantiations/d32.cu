#include "libindex/cuda/kmeans/sm80/kernel.cuh"

template sqz::Status sqz::cuda::sm80::launch_assign<32>(const AssignParams&, cudaStream_t);
