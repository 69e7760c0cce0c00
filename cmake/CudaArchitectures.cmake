# brim_cuda_architectures(<result>): the GPUs to build kernels for by default.
#   native     only those of this machine, where the driver shows one: a fraction of the time
#   all-major  elsewhere: one per generation, and PTX for later ones
function(brim_cuda_architectures result)
  set(${result} all-major PARENT_SCOPE)
  if(DEFINED ENV{CUDA_VISIBLE_DEVICES} AND "$ENV{CUDA_VISIBLE_DEVICES}" MATCHES "^(-1)?$")
    return() # hidden, also from nvcc, which fails for `native` then
  endif()
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0 AND gpus MATCHES "^GPU [0-9]+:")
    set(${result} native PARENT_SCOPE)
  endif()
endfunction()
