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

find_program(SQZ_GOLD ld.gold)
find_program(SQZ_CCACHE ccache)
if(SQZ_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${SQZ_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER  # the sloppiness that ccache wants for precompiled headers
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${CMAKE_BINARY_DIR} ${SQZ_CCACHE})
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
    if(SQZ_SANITIZE MATCHES address)  # which sees these itself; they take a sixth of the compilation
      target_compile_options(${target} PRIVATE -fno-sanitize=null,object-size,vptr)
    endif()
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
  set_target_properties(${name} PROPERTIES UNITY_BUILD_BATCH_SIZE 12)  # with CMAKE_UNITY_BUILD
  sqz_configure_target(${name})
endfunction()

# sqz_executable(NAME source... [LINK library...])
function(sqz_executable name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  sqz_configure_target(${name})
endfunction()

# How test programs are compiled: quickly, since it is the libraries that are to be fast and watched: what they do to
# memory is seen without AddressSanitizer in the tests themselves. References compute for long, so `numeric` and `gpu`
# programs are optimised.
function(sqz_test_options target numeric)
  set(options -O0)
  if(numeric)
    set(options -O1)
  endif()
  if(SQZ_SANITIZE MATCHES address)
    list(APPEND options -fno-sanitize=address)
  endif()
  if(SQZ_SANITIZE MATCHES undefined)  # GoogleTest's macros take UBSan minutes to compile
    list(APPEND options -fno-sanitize=undefined)
  endif()
  # Designated initializers that leave defaults out are their point.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${options} -Wno-missing-field-initializers>)
  target_compile_definitions(${target} PRIVATE SQZ_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
endfunction()

# sqz_test_main(NAME NUMERIC header... [LINK library...])
# main() of test programs, and the headers that they share, precompiled with their options.
function(sqz_test_main name numeric)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  sqz_library(${name} ${PROJECT_SOURCE_DIR}/tests/common/test_main.cc LINK GTest::gmock nlohmann_json::nlohmann_json
    ${ARG_LINK})
  sqz_test_options(${name} ${numeric})
  set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIE)  # as executables are
  target_precompile_headers(${name} PRIVATE ${ARG_UNPARSED_ARGUMENTS})
endfunction()

# sqz_test(NAME source... LABELS label... [MAIN target] [LINK library...] [TIMEOUT seconds]
#          [ENVIRONMENT NAME=VALUE...])
# A GoogleTest program is one test of the same name; HACKING.md says what the labels mean. MAIN: a sqz_test_main()
# Its sources are compiled as one but for a GPU: two thirds of their compilation are headers.
function(sqz_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;MAIN" "LABELS;LINK;ENVIRONMENT" ${ARGN})
  set(numeric OFF)
  if(NOT ARG_MAIN)
    set(ARG_MAIN sqz_test_main)
    if("numeric" IN_LIST ARG_LABELS OR "gpu" IN_LIST ARG_LABELS)
      set(numeric ON)
      set(ARG_MAIN sqz_numeric_test_main)
    endif()
  endif()
  sqz_executable(${name} ${ARG_UNPARSED_ARGUMENTS} LINK ${ARG_LINK} ${ARG_MAIN})
  sqz_test_options(${name} ${numeric})
  target_precompile_headers(${name} REUSE_FROM ${ARG_MAIN})
  set_target_properties(${name} PROPERTIES PCH_WARN_INVALID OFF)  # flags of libraries differ
  if(NOT "gpu" IN_LIST ARG_LABELS)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
  # It reads LibTorch's symbols in a tenth of the time.
  if(SQZ_GOLD AND SQZ_TRAINING AND NOT SQZ_SANITIZE AND NOT SQZ_CUDA)
    target_link_options(${name} PRIVATE $<$<LINK_LANGUAGE:CXX>:-fuse-ld=gold>)
  endif()
  sqz_add_test(${name} LABELS ${ARG_LABELS} TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT ${ARG_ENVIRONMENT}
    COMMAND ${name})
endfunction()

# sqz_add_test(NAME LABELS label... COMMAND command... [DEPENDS target...] [TIMEOUT seconds]
#              [ENVIRONMENT NAME=VALUE...] [WORKING_DIRECTORY folder])
# A test for which `cmake --build ... --target NAME` builds what it runs. One without a label of
# SQZ_TEST_LABELS is not part of this build folder: it is neither built with `all` nor run.
function(sqz_add_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;WORKING_DIRECTORY" "LABELS;COMMAND;DEPENDS;ENVIRONMENT" ${ARGN})
  set(wanted ON)
  if(SQZ_TEST_LABELS)
    set(wanted OFF)
    foreach(label ${ARG_LABELS})
      if(label IN_LIST SQZ_TEST_LABELS)
        set(wanted ON)
      endif()
    endforeach()
  endif()
  if(NOT TARGET ${name})
    add_custom_target(${name})
  endif()
  if(ARG_DEPENDS)
    add_dependencies(${name} ${ARG_DEPENDS})
  endif()
  if(NOT wanted)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  if(NOT ARG_WORKING_DIRECTORY)
    set(ARG_WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
  endif()
  add_test(NAME ${name} COMMAND ${ARG_COMMAND} WORKING_DIRECTORY ${ARG_WORKING_DIRECTORY})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "${ARG_ENVIRONMENT}" SKIP_RETURN_CODE 77)
  if(long IN_LIST ARG_LABELS)
    set_tests_properties(${name} PROPERTIES COST 1)  # first, so that none runs alone at the end
  endif()
endfunction()

# Settings of a target with CUDA sources.
function(sqz_cuda_target name architectures)
  # Each source by itself: servers and kernels have constants of the same names.
  set_target_properties(${name} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}" CUDA_STANDARD 20 UNITY_BUILD OFF)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
  target_link_libraries(${name} PUBLIC sqz_base CUDA::cudart_static)
endfunction()
