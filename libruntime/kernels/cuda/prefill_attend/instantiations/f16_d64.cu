#include "libruntime/kernels/cuda/prefill_attend/kernel.cuh"

template sqz::Status sqz::cuda::prefill::launch_attend<__half, 64>(const AttendParams&,
                                                                   const PrefillAttend&, int,
                                                                   cudaStream_t);
