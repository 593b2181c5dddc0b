# What `cmake --install` and `cpack` deliver, in three components:
#   runtime  libsqz.so.0.2        for machines that serve
#   dev      headers, CMake package, pkg-config file, examples
#   tools    the sqz-* programs, and their manual pages where help2man is found
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(sqz PROPERTIES EXPORT_NAME runtime)
install(TARGETS sqz EXPORT sqzTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(SQZ_HEADERS libruntime/include/sqz)
if(NOT SQZ_RUNTIME_ONLY)
  list(APPEND SQZ_HEADERS libindex/include/sqz)
endif()
install(DIRECTORY ${SQZ_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(DIRECTORY examples/embed_c
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

set(SQZ_INSTALLED_TOOLS)
if(SQZ_TOOLS AND NOT SQZ_RUNTIME_ONLY)
  get_property(targets DIRECTORY tools PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      list(APPEND SQZ_INSTALLED_TOOLS ${target})
    endif()
  endforeach()
endif()
find_program(SQZ_HELP2MAN help2man)
foreach(tool ${SQZ_INSTALLED_TOOLS})
  install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  if(SQZ_HELP2MAN AND NOT CMAKE_CROSSCOMPILING)  # it asks the built program for --help
    install(CODE "
      set(folder \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_MANDIR}/man1\")
      file(MAKE_DIRECTORY \"\${folder}\")
      execute_process(COMMAND \"${SQZ_HELP2MAN}\" --no-info --output \"\${folder}/${tool}.1\"
        \"$<TARGET_FILE:${tool}>\")" COMPONENT tools)
  endif()
endforeach()

include(SqzPackage)
