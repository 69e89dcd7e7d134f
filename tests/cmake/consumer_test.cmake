# cmake -D BUILD=<build folder> -D CONSUMER=<tests/cmake/consumer> -D SCRATCH=<folder> -D GENERATOR= -D CXX= -P: installs
# the library, then configures, builds and runs a project that finds it. A private dependency of the static library that
# the package file forgets shows here.
file(REMOVE_RECURSE ${SCRATCH})
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}: status ${status}\n${output}")
  endif()
endfunction()
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/prefix)
step(${CMAKE_COMMAND} -S ${CONSUMER} -B ${SCRATCH}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
     -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${SCRATCH}/build)
step(${SCRATCH}/build/consumer)
