# What a build is made with: CUDA or not, the build type and ccache.

include(CheckLanguage)
check_language(CUDA)
set(cuda_found OFF)
if(CMAKE_CUDA_COMPILER)
  cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_bin)
  find_path(DCP_NCCL_INCLUDE nccl.h HINTS ${cuda_bin}/../include)
  mark_as_advanced(DCP_NCCL_INCLUDE)
  if(DCP_NCCL_INCLUDE)
    set(cuda_found ON)
  endif()
endif()
option(DCP_CUDA "Build the CUDA backends and the NCCL communicator" ${cuda_found})

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
  if(DCP_CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${DCP_CCACHE})
  endif()
endif()

if(DCP_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake 3.25 knows neither 100f nor C++20 here: dcp_flags
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)

  # Machine code only, no PTX: a GPU that is not in this list says so instead of compiling at start.
  set(architectures 80 90a)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    list(APPEND architectures 100f 103a)
  endif()
  set(DCP_CUDA_ARCHITECTURES ${architectures} CACHE STRING
    "Compute capabilities that GPU code is built for")
endif()
