# `cpack` in the build folder makes Debian packages of the three components:
#   libsqz0.2  libsqz-dev  sqz-tools
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME sqz)
set(CPACK_PACKAGE_VENDOR sqz)
file(STRINGS ${PROJECT_SOURCE_DIR}/pyproject.toml authors REGEX "^authors = ")
string(REGEX REPLACE ".*name = \"([^\"]*)\", email = \"([^\"]*)\".*" "\\1 <\\2>" CPACK_PACKAGE_CONTACT "${authors}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL runtime dev)
if(SQZ_INSTALLED_TOOLS)
  list(APPEND CPACK_COMPONENTS_ALL tools)
endif()

set(SQZ_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libsqz${SQZ_SOVERSION})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The shared library that an inference engine loads.")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libsqz-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_COMPONENT_DEV_DESCRIPTION "Headers, CMake package, pkg-config file and examples.")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libsqz${SQZ_SOVERSION} (= ${PROJECT_VERSION})")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME sqz-tools)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "The programs that build, check, serve and measure indexes.")
set(CPACK_DEBIAN_TOOLS_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS "libsqz${SQZ_SOVERSION} (= ${PROJECT_VERSION})")
# Where dpkg-shlibdeps finds the library that is not installed yet.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/libruntime)

# What a program that is built against the library will depend on.
file(WRITE ${PROJECT_BINARY_DIR}/debian/shlibs "libsqz ${SQZ_SOVERSION} libsqz${SQZ_SOVERSION} (>= ${PROJECT_VERSION})\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/shlibs)
foreach(component ${CPACK_COMPONENTS_ALL})
  string(TOUPPER ${component} upper)
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME}
    RENAME copyright COMPONENT ${component})
endforeach()
include(CPack)
