// For what host and device code share.
#pragma once

#ifdef __CUDACC__
#define SQZ_HOST_DEVICE __host__ __device__
#else
#define SQZ_HOST_DEVICE
#endif
