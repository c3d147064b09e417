# What a build is made with: CUDA or not, the build type and ccache.

option(DCP_CUDA "Build the CUDA backends and the NCCL communicator" OFF)
if(DCP_CUDA)
  message(FATAL_ERROR "DCP_CUDA=ON: there is no CUDA code yet; configure with -DDCP_CUDA=OFF")
endif()

if(PROJECT_IS_TOP_LEVEL)
  get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT CMAKE_BUILD_TYPE AND NOT multi_config)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
  endif()

  # -DCMAKE_CXX_COMPILER_LAUNCHER= turns ccache off.
  find_program(DCP_CCACHE ccache)
  mark_as_advanced(DCP_CCACHE)
  if(DCP_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${DCP_CCACHE})
  endif()
endif()
