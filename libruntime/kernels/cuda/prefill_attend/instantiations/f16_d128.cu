#include "libruntime/kernels/cuda/prefill_attend/kernel.cuh"

template sqz::Status sqz::cuda::prefill::launch_attend<__half, 128>(const PrefillAttendParams&,
                                                                    const PrefillAttend&, int,
                                                                    cudaStream_t);
