# `cmake --install` lays down the library, its headers, the command and a package file for find_package(sluice).
include(CMakePackageConfigHelpers)
set(SLUICE_INSTALLED sluice)
if(SLUICE_WITH_MPI)
  list(APPEND SLUICE_INSTALLED sluice_mpi)
endif()
install(TARGETS ${SLUICE_INSTALLED} EXPORT sluice-targets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT sluice-targets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
configure_package_config_file(cmake/sluice-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/sluice-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/sluice-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sluice-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/sluice-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
