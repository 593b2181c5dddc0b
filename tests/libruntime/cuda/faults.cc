#include "tests/libruntime/cuda/faults.h"

#include <cuda.h>

#include <atomic>
#include <cstring>

namespace sqz::cuda::test::faults {
namespace {

std::atomic<bool> failing{false}, lasting{false};
std::atomic<int64_t> next_call{0}, first_failing{0}, there{0};
std::atomic<const char*> failed{""};
thread_local cudaError_t kept = cudaSuccess;  // for cudaGetLastError()

// Whether this call is one of those that fail.
bool fails(const char* name) {
  if (!failing) return false;
  const int64_t call = next_call++;
  if (call == first_failing) failed = name;
  return call == first_failing || (lasting && call > first_failing);
}

// `change`: of the number of things that there are. What frees or waits is done in any case.
template <class Call>
cudaError_t fail_or(const char* name, int change, bool always, Call&& call) {
  const bool fail = fails(name);
  if (!fail || always) {
    const cudaError_t error = call();
    if (error == cudaSuccess) there += change;
    if (!fail) return error;
  }
  kept = change > 0 && std::strstr(name, "lloc") != nullptr ? cudaErrorMemoryAllocation
                                                            : cudaErrorLaunchFailure;
  return kept;
}

#define SQZ_ORIGINAL(function) extern "C" decltype(function) __real_##function

// Replacements of the driver's functions, once they were asked for.
#define SQZ_DRIVER(function, params, args)                            \
  decltype(&function) real_##function = nullptr;                      \
  CUresult wrapped_##function params {                                \
    const bool pops = std::strcmp(#function, "cuCtxPopCurrent") == 0; \
    const bool fail = fails(#function);                               \
    if (fail && !pops) return CUDA_ERROR_UNKNOWN;                     \
    const CUresult result = real_##function args;                     \
    return fail ? CUDA_ERROR_UNKNOWN : result;                        \
  }
SQZ_DRIVER(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice gpu), (context, gpu))
SQZ_DRIVER(cuCtxPushCurrent, (CUcontext context), (context))
SQZ_DRIVER(cuCtxPopCurrent, (CUcontext * context), (context))
SQZ_DRIVER(cuTensorMapEncodeTiled,
           (CUtensorMap * map, CUtensorMapDataType type, cuuint32_t rank, void* data,
            const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
            const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
            CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill),
           (map, type, rank, data, sizes, strides, box, steps, interleave, swizzle, promotion,
            fill))

template <class Function>
void replace(const char* name, const char* wanted, void** found, Function& real, Function wrapped) {
  if (std::strcmp(name, wanted) != 0 || *found == nullptr) return;
  real = reinterpret_cast<Function>(*found);
  *found = reinterpret_cast<void*>(wrapped);
}

}  // namespace

void begin(int64_t first, bool lost) {
  next_call = 0;
  first_failing = first;
  lasting = lost;
  failed = "";
  failing = true;
}

std::string end() {
  failing = false;
  return failed.load();
}

int64_t live() {
  return there;
}

}  // namespace sqz::cuda::test::faults

using namespace sqz::cuda::test::faults;

#define SQZ_WRAP(function, params, args)                                         \
  SQZ_ORIGINAL(function);                                                        \
  extern "C" cudaError_t __wrap_##function params {                              \
    return fail_or(#function, 0, false, [&] { return __real_##function args; }); \
  }
#define SQZ_WRAP_CREATES(function, params, args)                                 \
  SQZ_ORIGINAL(function);                                                        \
  extern "C" cudaError_t __wrap_##function params {                              \
    return fail_or(#function, 1, false, [&] { return __real_##function args; }); \
  }
#define SQZ_WRAP_DESTROYS(function, type)                                           \
  SQZ_ORIGINAL(function);                                                           \
  extern "C" cudaError_t __wrap_##function(type it) {                               \
    const int change = it == nullptr ? 0 : -1;                                      \
    return fail_or(#function, change, true, [&] { return __real_##function(it); }); \
  }
#define SQZ_WRAP_WAITS(function, params, args)                                  \
  SQZ_ORIGINAL(function);                                                       \
  extern "C" cudaError_t __wrap_##function params {                             \
    return fail_or(#function, 0, true, [&] { return __real_##function args; }); \
  }

extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads,
                                          void** args, size_t shared, cudaStream_t stream);

SQZ_WRAP_CREATES(cudaMalloc, (void** memory, size_t bytes), (memory, bytes))
SQZ_WRAP_CREATES(cudaHostAlloc, (void** memory, size_t bytes, unsigned flags),
                 (memory, bytes, flags))
SQZ_WRAP_CREATES(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags),
                 (stream, flags))
SQZ_WRAP_CREATES(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), (event, flags))
SQZ_WRAP_DESTROYS(cudaFree, void*)
SQZ_WRAP_DESTROYS(cudaFreeHost, void*)
SQZ_WRAP_DESTROYS(cudaStreamDestroy, cudaStream_t)
SQZ_WRAP_DESTROYS(cudaEventDestroy, cudaEvent_t)
SQZ_WRAP_WAITS(cudaDeviceSynchronize, (), ())
SQZ_WRAP_WAITS(cudaStreamSynchronize, (cudaStream_t stream), (stream))
SQZ_WRAP_WAITS(cudaEventSynchronize, (cudaEvent_t event), (event))
SQZ_WRAP(cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind),
         (to, from, bytes, kind))
SQZ_WRAP(cudaMemcpyAsync,
         (void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream),
         (to, from, bytes, kind, stream))
SQZ_WRAP(cudaMemcpy2DAsync,
         (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
          size_t height, cudaMemcpyKind kind, cudaStream_t stream),
         (to, to_pitch, from, from_pitch, width, height, kind, stream))
SQZ_WRAP(cudaMemset, (void* to, int value, size_t bytes), (to, value, bytes))
SQZ_WRAP(cudaMemsetAsync, (void* to, int value, size_t bytes, cudaStream_t stream),
         (to, value, bytes, stream))
SQZ_WRAP(cudaMemGetInfo, (size_t * free, size_t* total), (free, total))
SQZ_WRAP(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
SQZ_WRAP(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
         (stream, event, flags))
SQZ_WRAP(cudaFuncSetAttribute, (const void* kernel, cudaFuncAttribute what, int value),
         (kernel, what, value))
SQZ_WRAP(cudaFuncGetAttributes, (cudaFuncAttributes * attributes, const void* kernel),
         (attributes, kernel))
SQZ_WRAP(cudaOccupancyMaxActiveClusters,
         (int* count, const void* kernel, const cudaLaunchConfig_t* config),
         (count, kernel, config))
SQZ_WRAP(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
         (int* count, const void* kernel, int threads, size_t shared, unsigned flags),
         (count, kernel, threads, shared, flags))
SQZ_WRAP(cudaGetDevice, (int* gpu), (gpu))
SQZ_WRAP(cudaSetDevice, (int gpu), (gpu))
SQZ_WRAP(cudaGetDeviceCount, (int* count), (count))
SQZ_WRAP(cudaGetDeviceProperties, (cudaDeviceProp * properties, int gpu), (properties, gpu))
SQZ_WRAP(cudaDeviceGetAttribute, (int* value, cudaDeviceAttr what, int gpu), (value, what, gpu))
SQZ_WRAP(cudaLaunchKernelExC, (const cudaLaunchConfig_t* config, const void* kernel, void** args),
         (config, kernel, args))
SQZ_WRAP(__cudaLaunchKernel,
         (cudaKernel_t kernel, dim3 blocks, dim3 threads, void** args, size_t shared,
          cudaStream_t stream),
         (kernel, blocks, threads, args, shared, stream))

SQZ_ORIGINAL(cudaGetDriverEntryPointByVersion);
extern "C" cudaError_t __wrap_cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags,
    cudaDriverEntryPointQueryResult* result) {
  const cudaError_t error = fail_or("cudaGetDriverEntryPointByVersion", 0, false, [&] {
    return __real_cudaGetDriverEntryPointByVersion(name, function, version, flags, result);
  });
  if (error != cudaSuccess) return error;
#define SQZ_REPLACE(wanted) replace(name, #wanted, function, real_##wanted, &wrapped_##wanted)
  SQZ_REPLACE(cuDevicePrimaryCtxRetain);
  SQZ_REPLACE(cuCtxPushCurrent);
  SQZ_REPLACE(cuCtxPopCurrent);
  SQZ_REPLACE(cuTensorMapEncodeTiled);
  return cudaSuccess;
}

SQZ_ORIGINAL(cudaPeekAtLastError);
extern "C" cudaError_t __wrap_cudaPeekAtLastError() {
  return kept != cudaSuccess ? kept : __real_cudaPeekAtLastError();
}
SQZ_ORIGINAL(cudaGetLastError);
extern "C" cudaError_t __wrap_cudaGetLastError() {
  const cudaError_t error = kept;
  kept = cudaSuccess;
  const cudaError_t real = __real_cudaGetLastError();
  return error != cudaSuccess ? error : real;
}
