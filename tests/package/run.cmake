# Installs brim into an empty prefix, then configures, builds and runs the consumer against it, as a
# user would: nothing but CMAKE_PREFIX_PATH says where brim is.
set(prefix "${WORK}/prefix")
set(build "${WORK}/consumer")
file(REMOVE_RECURSE "${prefix}" "${build}")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
endfunction()

run("${CMAKE_COMMAND}" --install "${BRIM_BUILD}" --prefix "${prefix}")
run("${CMAKE_COMMAND}" -S "${CONSUMER}" -B "${build}" -G "${GENERATOR}"
  "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX}" -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_PREFIX_PATH=${prefix}")
run("${CMAKE_COMMAND}" --build "${build}")
run("${build}/consumer")
