# How every target of the project is made: C++20, position independent, hidden visibility, warnings
# as errors in our own code only (dependencies are SYSTEM), sanitizers where asked.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(SQZ_CCACHE ccache)
if(SQZ_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${SQZ_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${SQZ_CCACHE})
endif()

function(sqz_configure_target target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion
    -Wno-sign-conversion -Wno-unknown-pragmas>)
  if(SQZ_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  if(SQZ_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SQZ_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${SQZ_SANITIZE})
  endif()
  if(SQZ_FUZZ)  # the libraries' branches are what libFuzzer steers by
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# sqz_library(NAME source... [LINK library...]) - a static library, private to the tree.
function(sqz_library name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PUBLIC ${ARG_LINK})
  sqz_configure_target(${name})
endfunction()

# sqz_executable(NAME source... [LINK library...])
function(sqz_executable name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  sqz_configure_target(${name})
endfunction()

# sqz_test(NAME source... [LINK library...] [WHOLE] [TIMEOUT seconds])
# A GoogleTest program. Each TEST becomes one ctest entry; with WHOLE the program is one entry,
# for programs that are slow to start (LibTorch loads hundreds of shared objects).
function(sqz_test name)
  cmake_parse_arguments(ARG "WHOLE" "TIMEOUT" "LINK" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  sqz_executable(${name} ${ARG_UNPARSED_ARGUMENTS} LINK ${ARG_LINK} GTest::gmock GTest::gtest_main)
  if(SQZ_SANITIZE MATCHES undefined)
    # It is the libraries that UBSan is to watch; GoogleTest's macros take it minutes to compile.
    target_compile_options(${name} PRIVATE -fno-sanitize=undefined)
  endif()
  target_compile_definitions(${name} PRIVATE SQZ_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  else()
    gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST
      PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  endif()
endfunction()

# Settings of a target with CUDA sources.
function(sqz_cuda_target name architectures)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_STANDARD 20)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
  target_link_libraries(${name} PUBLIC sqz_base CUDA::cudart_static)
endfunction()
