# Every dependency, found once. Order matters: Debian's faiss config names OpenMP::OpenMP_CXX without
# finding it, so OpenMP comes first.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)          # header only
find_path(SQZ_XXHASH_INCLUDE xxhash.h REQUIRED)    # header only (XXH_INLINE_ALL)
find_path(SQZ_HIGHWAY_INCLUDE hwy/highway.h REQUIRED)  # header only (no libhwy at run time)

if(NOT SQZ_RUNTIME_ONLY)
  find_package(OpenMP REQUIRED)
  find_package(faiss REQUIRED)
  find_package(HDF5 REQUIRED COMPONENTS C)
  find_package(CLI11 REQUIRED)
  find_package(spdlog REQUIRED)
  if(SQZ_TOOLS)
    find_package(benchmark QUIET)
    if(NOT benchmark_FOUND)
      message(STATUS "Google Benchmark (libbenchmark-dev) not found: sqz-bench is left out")
    endif()
  endif()
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
  pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
  if(SQZ_TRAINING)
    find_package(Torch REQUIRED)
    unset(CMAKE_CUDA_FLAGS)  # LibTorch's architectures: our kernels would be compiled for them, too
  endif()
endif()
if(SQZ_TESTS)
  find_package(GTest REQUIRED)
endif()
if(SQZ_CUDA)
  enable_language(CUDA)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc 13 has it
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  find_package(CUDAToolkit 12.4 REQUIRED)
  # Machine code for each generation, and PTX of the oldest for those to come. CUDA 12.8 knows Blackwell.
  set(architectures "80;86-real;89-real;90-real")
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND architectures 100-real 120-real)
  endif()
  set(SQZ_CUDA_ARCHITECTURES "${architectures}" CACHE STRING
    "GPUs for which the kernels that need no special one are compiled")
endif()
