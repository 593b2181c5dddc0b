# What a Python wheel holds beside python/sqz: libsqz.so, with CUDA where nvcc is on the PATH or in CUDACXX.
# pyproject.toml has the rest.
if(NOT DEFINED SQZ_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(SQZ_CUDA ON)
  endif()
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
