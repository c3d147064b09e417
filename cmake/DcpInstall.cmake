# cmake --install: the libraries of the layers with find_package(dcp) and pkg-config, the programs,
# the sample configurations. Everything is relocatable.

include(CMakePackageConfigHelpers)
set(cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dcp)
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(layers dcp_base dcp_kernels dcp_comm dcp_runtime)
install(TARGETS ${layers} EXPORT dcpTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dcp
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dcp)
install(FILES ${PROJECT_BINARY_DIR}/generated/base/version.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dcp/base)
install(EXPORT dcpTargets NAMESPACE dcp:: DESTINATION ${cmake_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dcpConfig.cmake.in
  ${PROJECT_BINARY_DIR}/dcpConfig.cmake INSTALL_DESTINATION ${cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dcpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dcpConfig.cmake ${PROJECT_BINARY_DIR}/dcpConfigVersion.cmake
  DESTINATION ${cmake_dir})

# The way from the .pc file up to the prefix: lib/pkgconfig or lib/<triplet>/pkgconfig.
file(RELATIVE_PATH pc_to_prefix /${pkgconfig_dir} /)
string(REGEX REPLACE "/$" "" pc_to_prefix ${pc_to_prefix})
if(DCP_CUDA)
  set(pc_cuda_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  set(pc_cuda_cflags " -DDCP_WITH_CUDA -I${CUDAToolkit_INCLUDE_DIRS}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/dcp.pc.in ${PROJECT_BINARY_DIR}/dcp.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/dcp.pc DESTINATION ${pkgconfig_dir})

foreach(program IN ITEMS dcp-server dcpctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/dcp
  FILES_MATCHING PATTERN *.toml)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
