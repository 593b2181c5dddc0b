# What `cmake --install` and `cpack` deliver, in three components:
#   runtime  libsqz.so.0          for machines that serve
#   dev      headers, CMake package, pkg-config file
#   tools    the sqz-* programs and their manual pages
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(sqz PROPERTIES EXPORT_NAME runtime)
install(TARGETS sqz EXPORT sqzTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY libruntime/include/sqz DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(SQZ_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/sqz)
install(EXPORT sqzTargets NAMESPACE sqz:: DESTINATION ${SQZ_CMAKE_DIR} COMPONENT dev)
configure_package_config_file(cmake/sqzConfig.cmake.in ${PROJECT_BINARY_DIR}/sqzConfig.cmake
  INSTALL_DESTINATION ${SQZ_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sqzConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sqzConfig.cmake ${PROJECT_BINARY_DIR}/sqzConfigVersion.cmake
  DESTINATION ${SQZ_CMAKE_DIR} COMPONENT dev)
configure_file(cmake/sqz.pc.in ${PROJECT_BINARY_DIR}/sqz.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/sqz.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

foreach(tool sqz-index sqz-generate sqz-eval sqz-bench)
  if(TARGET ${tool})
    install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  endif()
endforeach()
