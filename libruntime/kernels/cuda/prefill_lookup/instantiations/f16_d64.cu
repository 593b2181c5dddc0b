#include "libruntime/kernels/cuda/prefill_lookup/kernel.cuh"

template sqz::Status sqz::cuda::prefill::launch_lookup_passes<__half, 64>(
    const PrefillLookupParams&, const PrefillLookup&, int, cudaStream_t);
