#[[
FindLibtorch: libtorch, from the torch wheel of a Python environment or from an unpacked libtorch.

Why not torch's own TorchConfig.cmake: it needs a CUDA toolkit wherever torch was built with CUDA,
and puts that toolkit's paths into our RUNPATH. brim's core needs two libraries and their headers.

Input
  Libtorch_ROOT      the directory that holds include/ and lib/; no Python is needed then
  Python_EXECUTABLE  otherwise, the interpreter whose torch is meant
  BRIM_ANY_TORCH     ON: accept versions outside 2.11 .. 2.15

Result: Libtorch_FOUND, Libtorch_VERSION, Libtorch_ROOT_DIR, Libtorch_LIBRARY_DIR, and the targets
  Libtorch::c10
  Libtorch::torch_cpu     the operators on the CPU; links c10
  Libtorch::torch_python  where there is libtorch_python; has torch's own pybind11 in its headers
  Libtorch::c10_cuda      with the component cuda, where there are libc10_cuda and CUDA's headers
  Libtorch::torch         all of torch with its CUDA part, for programs that run kernels there
]]

# -- Where ------------------------------------------------------------------------------------
if(Libtorch_ROOT)
  set(Libtorch_ROOT_DIR "${Libtorch_ROOT}")
  set(_libtorch_how "Libtorch_ROOT is ${Libtorch_ROOT}.")
else()
  set(Libtorch_ROOT_DIR "")
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    # find_spec does not import torch, which would take seconds and could fail without its drivers.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
      OUTPUT_VARIABLE Libtorch_ROOT_DIR ERROR_QUIET)
  endif()
  set(_libtorch_how "Python is ${Python_EXECUTABLE}: set Python_EXECUTABLE to one that has torch, or\
 Libtorch_ROOT to an unpacked libtorch (with pip, use --no-build-isolation).")
endif()

# Never cached: another Python_EXECUTABLE or another torch in the same place must be seen at once.
find_path(Libtorch_INCLUDE_DIR c10/core/Allocator.h
  PATHS "${Libtorch_ROOT_DIR}/include" NO_DEFAULT_PATH NO_CACHE)
foreach(_lib IN ITEMS c10 torch_cpu torch torch_python c10_cuda)
  find_library(Libtorch_${_lib}_LIBRARY ${_lib}
    PATHS "${Libtorch_ROOT_DIR}/lib" NO_DEFAULT_PATH NO_CACHE)
endforeach()

# -- Which version ----------------------------------------------------------------------------
set(Libtorch_VERSION "")
foreach(_header IN ITEMS torch/headeronly/version.h torch/version.h
                         torch/csrc/api/include/torch/version.h)
  if(NOT Libtorch_VERSION AND EXISTS "${Libtorch_INCLUDE_DIR}/${_header}")
    file(STRINGS "${Libtorch_INCLUDE_DIR}/${_header}" _lines
      REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    # The three lines come in their order, and hold no other number.
    string(REGEX MATCHALL "[0-9]+" _numbers "${_lines}")
    list(JOIN _numbers "." Libtorch_VERSION)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_torch_cpu_LIBRARY Libtorch_c10_LIBRARY Libtorch_INCLUDE_DIR
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "${_libtorch_how}")

if(Libtorch_FOUND AND NOT BRIM_ANY_TORCH
   AND (Libtorch_VERSION VERSION_LESS 2.11 OR Libtorch_VERSION VERSION_GREATER_EQUAL 2.16))
  message(FATAL_ERROR "brim needs torch 2.11 to 2.15 and found ${Libtorch_VERSION} in\
 ${Libtorch_ROOT_DIR} (-DBRIM_ANY_TORCH=ON tries it all the same).")
endif()

# -- Targets ----------------------------------------------------------------------------------
if(Libtorch_FOUND)
  set(Libtorch_LIBRARY_DIR "${Libtorch_ROOT_DIR}/lib")

  # _libtorch_target(<name> [<what it links>...])
  function(_libtorch_target name)
    if(Libtorch_${name}_LIBRARY AND NOT TARGET Libtorch::${name})
      add_library(Libtorch::${name} SHARED IMPORTED)
      set_target_properties(Libtorch::${name} PROPERTIES
        IMPORTED_LOCATION "${Libtorch_${name}_LIBRARY}"
        INTERFACE_INCLUDE_DIRECTORIES
          "${Libtorch_INCLUDE_DIR};${Libtorch_INCLUDE_DIR}/torch/csrc/api/include"
        INTERFACE_LINK_LIBRARIES "${ARGN}")
    endif()
  endfunction()

  _libtorch_target(c10)
  _libtorch_target(torch_cpu Libtorch::c10)
  _libtorch_target(torch_python Libtorch::torch_cpu)

  # libtorch.so holds no symbol, it only pulls in the CUDA part, so a linker that drops unneeded
  # libraries would drop it.
  if(Libtorch_torch_LIBRARY AND NOT TARGET Libtorch::torch)
    add_library(Libtorch::torch INTERFACE IMPORTED)
    target_link_libraries(Libtorch::torch INTERFACE
      "-Wl,--push-state,--no-as-needed" "${Libtorch_torch_LIBRARY}" "-Wl,--pop-state"
      Libtorch::torch_cpu)
  endif()

  # The headers of c10_cuda include CUDA's. They may lie beside torch in site-packages (as
  # nvidia/cu13, or nvidia/cuda_runtime before) or in a toolkit. Some wheels leave crt/ out, and are
  # of no use then: hence the second header.
  if("cuda" IN_LIST Libtorch_FIND_COMPONENTS AND Libtorch_c10_cuda_LIBRARY
     AND NOT TARGET Libtorch::c10_cuda)
    file(GLOB _dirs "${Libtorch_ROOT_DIR}/../nvidia/cu*/include")
    find_package(CUDAToolkit QUIET)
    set(Libtorch_CUDA_INCLUDE_DIR "")
    foreach(_dir IN LISTS _dirs CUDAToolkit_INCLUDE_DIRS)
      if(NOT Libtorch_CUDA_INCLUDE_DIR
         AND EXISTS "${_dir}/cuda_runtime_api.h" AND EXISTS "${_dir}/crt/host_defines.h")
        file(REAL_PATH "${_dir}" Libtorch_CUDA_INCLUDE_DIR)
      endif()
    endforeach()
    if(Libtorch_CUDA_INCLUDE_DIR)
      _libtorch_target(c10_cuda Libtorch::c10)
      set_property(TARGET Libtorch::c10_cuda APPEND PROPERTY
        INTERFACE_INCLUDE_DIRECTORIES "${Libtorch_CUDA_INCLUDE_DIR}")
    endif()
  endif()
endif()
