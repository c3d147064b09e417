# The few functions that make targets. One library per layer, dcp::<layer>.

add_library(dcp_flags INTERFACE)
target_compile_features(dcp_flags INTERFACE cxx_std_20)
target_compile_options(dcp_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Werror -Wno-missing-field-initializers>)
# __int128 is how byte sizes are checked; both compilers of the project have it.
target_compile_options(dcp_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-pedantic>)
if(DCP_CUDA)
  foreach(arch IN LISTS DCP_CUDA_ARCHITECTURES)
    target_compile_options(dcp_flags INTERFACE
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode arch=compute_${arch},code=sm_${arch}>")
  endforeach()
  target_compile_options(dcp_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-std=c++20 -Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr -Werror=all-warnings>")
  # Kernels keep what they work on in registers: a build in which one spills fails.
  target_compile_options(dcp_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas --warn-on-spills,--warn-on-local-memory-usage>")
endif()
if(DCP_SANITIZE)
  # GCC's flow analysis loses its way in instrumented code; the release build judges this warning.
  target_compile_options(dcp_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DCP_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${DCP_SANITIZE})
  if(DCP_SANITIZE MATCHES "undefined")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
  endif()
endif()

# dcp_library(<layer> [STATIC] SOURCES ... HEADERS ... [DEPS <target> ...])
# Static, unless BUILD_SHARED_LIBS says otherwise for those not marked STATIC.
function(dcp_library layer)
  cmake_parse_arguments(PARSE_ARGV 1 arg "STATIC" "" "SOURCES;HEADERS;DEPS")
  set(type "")
  if(arg_STATIC)
    set(type STATIC)
  endif()
  add_library(dcp_${layer} ${type} ${arg_SOURCES})
  add_library(dcp::${layer} ALIAS dcp_${layer})
  set_target_properties(dcp_${layer} PROPERTIES EXPORT_NAME ${layer} POSITION_INDEPENDENT_CODE ON)
  target_compile_features(dcp_${layer} PUBLIC cxx_std_20)
  target_sources(dcp_${layer} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}
                 FILES ${arg_HEADERS})
  target_include_directories(dcp_${layer} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>)
  target_link_libraries(dcp_${layer} PUBLIC ${arg_DEPS} PRIVATE $<BUILD_INTERFACE:dcp_flags>)
endfunction()

# dcp_test(<name> SOURCES ... DEPS ... [LABELS ...] [TIMEOUT seconds] [ARGS ...])
# One Catch2 program and one CTest test of the same name.
function(dcp_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;DEPS;LABELS;ARGS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE dcp_flags dcp_catch_main ${arg_DEPS})
  add_test(NAME ${name} COMMAND ${name} ${arg_ARGS})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  # `dcp_tests_<label>` builds what `ctest -L <label>` runs.
  foreach(label IN LISTS arg_LABELS)
    if(NOT TARGET dcp_tests_${label})
      add_custom_target(dcp_tests_${label})
    endif()
    add_dependencies(dcp_tests_${label} ${name})
  endforeach()
endfunction()
