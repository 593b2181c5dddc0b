#include "libruntime/kernels/cuda/prefill_attend/kernel.cuh"

template sqz::Status sqz::cuda::prefill::launch_attend<__nv_bfloat16, 256>(
    const PrefillAttendParams&, const PrefillAttend&, int, cudaStream_t);
