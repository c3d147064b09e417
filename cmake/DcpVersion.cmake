# generated/base/version.h from project(VERSION) and git, as of the configure step.
# -DDCP_GIT_HASH=... names the commit where the sources come without their repository.

set(DCP_GIT_HASH "" CACHE STRING "Commit of the sources; empty: ask git")
if(NOT DCP_GIT_HASH)
  set(DCP_GIT_HASH unknown)
  find_package(Git QUIET)
  # Only a repository of our own: these sources may lie unpacked inside another one.
  if(GIT_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.git)
    execute_process(
      COMMAND ${GIT_EXECUTABLE} describe --always --dirty --abbrev=12 --exclude=*
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      OUTPUT_VARIABLE described RESULT_VARIABLE failed
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed AND described)
      set(DCP_GIT_HASH ${described})
    endif()
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/base/version.h.in
               ${PROJECT_BINARY_DIR}/generated/base/version.h @ONLY)
