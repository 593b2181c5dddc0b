#include "libruntime/kernels/cuda/prefill_lookup/kernel.cuh"

template sqz::Status sqz::cuda::prefill::launch_lookup_passes<__nv_bfloat16, 256>(
    const PrefillLookupParams&, const PrefillLookup&, int, cudaStream_t);
