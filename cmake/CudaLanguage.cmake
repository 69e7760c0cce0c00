# Enables the CUDA language where a compiler is found, and sets
#   BRIM_CUDA_KERNELS         ON or OFF
#   BRIM_CUDA_KERNELS_STATUS  the same in words
# Without one nothing fails: tensors on CUDA then use torch's own operators.
#
# CMAKE_CUDA_COMPILER and CMAKE_CUDA_ARCHITECTURES are the user's to set.
include(CheckLanguage)

# A toolkit is often not on the PATH, which is all that check_language() looks at.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(BRIM_NVCC nvcc HINTS "${CUDAToolkit_BIN_DIR}" ENV CUDA_PATH PATH_SUFFIXES bin)
  mark_as_advanced(BRIM_NVCC)
  if(BRIM_NVCC)
    set(CMAKE_CUDA_COMPILER "${BRIM_NVCC}")
  endif()
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  include(CudaArchitectures)
  brim_cuda_architectures(_architectures)
  set(CMAKE_CUDA_ARCHITECTURES ${_architectures} CACHE STRING "GPUs to build kernels for")
endif()

check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  if(BRIM_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${BRIM_CCACHE}")
  endif()
  set(BRIM_CUDA_KERNELS ON)
  set(BRIM_CUDA_KERNELS_STATUS
    "kernels for ${CMAKE_CUDA_ARCHITECTURES} by ${CMAKE_CUDA_COMPILER}")
else()
  set(BRIM_CUDA_KERNELS OFF)
  set(BRIM_CUDA_KERNELS_STATUS
    "no kernels (no CUDA compiler was found): torch's own operators do their work")
endif()
