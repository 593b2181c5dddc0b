# What a Python wheel holds beside python/sqz: libsqz.so with the index builder, and with CUDA where nvcc is on the PATH
# or in CUDACXX: for the GPUs of this machine, or for all if there is none. pyproject.toml has the rest.
if(NOT DEFINED SQZ_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(SQZ_CUDA ON)
  endif()
endif()
if(SQZ_CUDA AND NOT DEFINED SQZ_CUDA_ARCHITECTURES)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities
    ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    string(REGEX MATCHALL "([89]|1[0-9])\\.[0-9]" capabilities "${capabilities}")
    list(REMOVE_DUPLICATES capabilities)
    string(REPLACE "." "" capabilities "${capabilities}")
    list(TRANSFORM capabilities APPEND -real OUTPUT_VARIABLE SQZ_CUDA_ARCHITECTURES)
  endif()
endif()
if(SQZ_CUDA)
  set(compiled "all GPUs, which takes 13 minutes of one core")
  if(SQZ_CUDA_ARCHITECTURES)
    list(JOIN SQZ_CUDA_ARCHITECTURES " " compiled)
  endif()
  message(NOTICE "sqz is compiled with CUDA for ${compiled}; --config-settings=cmake.define.SQZ_CUDA=OFF leaves it out")
else()
  message(NOTICE "sqz is compiled without CUDA: SQZ_CUDA is OFF, or nvcc is neither on the PATH nor in CUDACXX")
endif()

function(sqz_install_wheel)
  # A wheel holds no links, so the library has one name.
  set_property(TARGET sqz PROPERTY VERSION)
  set_property(TARGET sqz PROPERTY SOVERSION)
  install(TARGETS sqz LIBRARY DESTINATION . COMPONENT python)

  # GCC 12's C++ library has condition_variable::wait() in two versions. The older is in GCC 11's as well, which
  # manylinux_2_34 stands for.
  if(SQZ_CUDA AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    set(wait _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE)
    set(header ${PROJECT_BINARY_DIR}/older_versions.h)
    file(CONFIGURE OUTPUT ${header} CONTENT "__asm__(\".symver ${wait}, ${wait}@GLIBCXX_3.4.11\");\n")
    target_compile_options(sqz_runtime_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include ${header}>")
  endif()
endfunction()
