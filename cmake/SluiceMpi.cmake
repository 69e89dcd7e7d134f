# Ranks that are MPI processes: the library sluice::mpi.
#   SLUICE_MPI = AUTO  build it where an MPI is found (default)
#                ON    fail without one
#                OFF   leave it out
set(SLUICE_MPI AUTO CACHE STRING "Build the MPI transport: AUTO, ON or OFF")
set_property(CACHE SLUICE_MPI PROPERTY STRINGS AUTO ON OFF)
if(NOT SLUICE_MPI MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SLUICE_MPI is \"${SLUICE_MPI}\"; AUTO, ON and OFF are known")
endif()

set(SLUICE_WITH_MPI OFF)
if(NOT SLUICE_MPI STREQUAL "OFF")
  # The C bindings alone: those of C++ left the standard with MPI 3.0.
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI 3.1 QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(SLUICE_WITH_MPI ON)
    sluice_dependency("MPI" "${MPI_CXX_VERSION}" "ranks that are processes")
  elseif(SLUICE_MPI STREQUAL "ON")
    message(FATAL_ERROR "SLUICE_MPI is ON, and no MPI of version 3.1 or newer was found")
  else()
    sluice_dependency("MPI" "no" "none of version 3.1 or newer found")
  endif()
else()
  sluice_dependency("MPI" "no" "turned off")
endif()
