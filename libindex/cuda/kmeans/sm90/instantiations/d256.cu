#include "libindex/cuda/kmeans/sm90/kernel.cuh"

template sqz::Status sqz::cuda::sm90::launch_assign<256>(const AssignParams&, int, cudaStream_t);
