# Installs brim into an empty prefix, then configures, builds and runs programs against it, as a user
# would: nothing but one option says where brim is.
set(prefix "${WORK}/prefix")
file(REMOVE_RECURSE "${prefix}")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
endfunction()

# use(<name of the executable> <its source> <option>)
function(use name source option)
  set(build "${WORK}/${name}")
  file(REMOVE_RECURSE "${build}")
  run("${CMAKE_COMMAND}" -S "${source}" -B "${build}" -G "${GENERATOR}"
    "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX}" -DCMAKE_BUILD_TYPE=Release
    "${option}")
  run("${CMAKE_COMMAND}" --build "${build}")
  run("${build}/${name}")
endfunction()

run("${CMAKE_COMMAND}" --install "${BRIM_BUILD}" --prefix "${prefix}")
use(consumer "${CONSUMER}" "-DCMAKE_PREFIX_PATH=${prefix}")
use(server "${CONSUMER}/../../examples/cpp/server" "-Dbrim_DIR=${prefix}/lib/cmake/brim")
