# Which nvcc is accepted. A file of its own so that tests/cmake/cuda_version_test.cmake can ask it without a compiler.
set(SLUICE_CUDA_MINIMUM 12.3)
set(SLUICE_CUDA_SM100_MINIMUM 12.8)  # the first nvcc that knows Blackwell

# Versions are compared as numbers: 12.10 is newer than 12.3, though its text sorts before it.
function(sluice_judge_nvcc version accepted reason)
  if(NOT version MATCHES "^[0-9]+(\\.[0-9]+)*$")
    set(${accepted} OFF PARENT_SCOPE)
    set(${reason} "nvcc says its version is \"${version}\", which is no number" PARENT_SCOPE)
  elseif(version VERSION_LESS SLUICE_CUDA_MINIMUM)
    set(${accepted} OFF PARENT_SCOPE)
    set(${reason} "nvcc ${version} found, ${SLUICE_CUDA_MINIMUM} or newer is needed" PARENT_SCOPE)
  else()
    set(${accepted} ON PARENT_SCOPE)
    set(${reason} "${version}" PARENT_SCOPE)
  endif()
endfunction()

# Architectures of the kernels that only move or weigh bytes. On a GPU the GEMMs are not made for, they still run, and
# what declines there is the GEMM, with its reason.
function(sluice_portable_architectures version architectures)
  set(list 80-real 90-real)
  if(NOT version VERSION_LESS SLUICE_CUDA_SM100_MINIMUM)
    list(APPEND list 100-real)
  endif()
  set(${architectures} "${list}" PARENT_SCOPE)
endfunction()
