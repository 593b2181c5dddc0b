# What `cmake --install` and `cpack` deliver, in three components:
#   runtime  libsqz.so.0.2        for machines that serve
#   dev      headers, CMake package, pkg-config file, examples
#   tools    the sqz-* programs, their manual pages and what bash completes
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(sqz PROPERTIES EXPORT_NAME runtime)
install(TARGETS sqz EXPORT sqzTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY libruntime/include/sqz DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(DIRECTORY examples/embed examples/embed_c
  DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libsqz-dev/examples COMPONENT dev)

set(SQZ_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/sqz)
install(EXPORT sqzTargets NAMESPACE sqz:: DESTINATION ${SQZ_CMAKE_DIR} COMPONENT dev)
configure_package_config_file(cmake/sqzConfig.cmake.in ${PROJECT_BINARY_DIR}/sqzConfig.cmake
  INSTALL_DESTINATION ${SQZ_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sqzConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sqzConfig.cmake ${PROJECT_BINARY_DIR}/sqzConfigVersion.cmake
  DESTINATION ${SQZ_CMAKE_DIR} COMPONENT dev)
# The file finds the prefix from its own place, so that it is right wherever it is unpacked.
file(RELATIVE_PATH SQZ_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/sqz.pc.in ${PROJECT_BINARY_DIR}/sqz.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/sqz.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

# Every program of tools/, and of each a manual page and a bash completion from its --help.
set(SQZ_INSTALLED_TOOLS)
set(SQZ_HELP_DIR ${PROJECT_BINARY_DIR}/help)  # what each says, asked once
if(SQZ_TOOLS AND NOT SQZ_RUNTIME_ONLY)
  get_property(targets DIRECTORY tools PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      list(APPEND SQZ_INSTALLED_TOOLS ${target})
    endif()
  endforeach()
endif()
foreach(tool ${SQZ_INSTALLED_TOOLS})
  install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  if(CMAKE_CROSSCOMPILING)  # the program cannot be asked
    continue()
  endif()
  set(page ${PROJECT_BINARY_DIR}/man/${tool}.1)
  set(completion ${PROJECT_BINARY_DIR}/completions/${tool})
  set(help ${SQZ_HELP_DIR}/${tool})
  foreach(made help:${help} man:${page} completion:${completion})
    string(REGEX MATCH "^([a-z]+):(.*)$" made ${made})
    set(script ${PROJECT_SOURCE_DIR}/scripts/make_${CMAKE_MATCH_1})
    set(file ${CMAKE_MATCH_2})
    set(from ${help})
    if(CMAKE_MATCH_1 STREQUAL "help")
      set(from $<TARGET_FILE:${tool}>)
    endif()
    get_filename_component(folder ${file} DIRECTORY)
    add_custom_command(OUTPUT ${file}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
      COMMAND ${script} ${from} ${file}
      DEPENDS ${from} ${script} ${PROJECT_SOURCE_DIR}/scripts/help.sh
      COMMENT "${CMAKE_MATCH_1} of ${tool}" VERBATIM)
  endforeach()
  list(APPEND SQZ_MAN_PAGES ${page})
  list(APPEND SQZ_COMPLETIONS ${completion})
endforeach()
if(SQZ_MAN_PAGES)
  add_custom_target(sqz_man ALL DEPENDS ${SQZ_MAN_PAGES} ${SQZ_COMPLETIONS})
  install(FILES ${SQZ_COMPLETIONS}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT tools)
  install(FILES ${SQZ_MAN_PAGES} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)
endif()

include(SqzPackage)
