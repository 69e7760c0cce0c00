#!/usr/bin/env bash
# Everything on a machine with a GPU: build from source, all tests (the CUDA ones run there), the
# demo, the benchmarks. Takes the Python on PATH with its torch as it is and installs nothing.
#
#     tools/gpu.sh [test|demo|bench|sanitize|prove]...      default: test demo bench
#
# sanitize runs the tests of the CUDA kernels under compute-sanitizer (memcheck and racecheck, of our
# kernels alone), prove fails allocations on the GPU, half a minute for each kind of call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BRIM_PYTHON=${BRIM_PYTHON:-$(command -v python3)} PYTHONUNBUFFERED=1
# A compiler that links libstdc++ statically would bring a second one into the process.
export CXX=${BRIM_CXX:-/usr/bin/g++}
status=0

sanitize() {
  local tool build tests='cuda and not kept and not keeps and not recompute and not stream'
  ./dev build || return
  build=build/$("$BRIM_PYTHON" -c 'import torch; print(torch.__version__.split("+")[0])')
  for tool in memcheck racecheck; do
    # racecheck crashes in kernels of cuDNN and cuBLAS, also where it looks at none of ours.
    [[ $tool == memcheck ]] ||
      tests+=' and not Conv and not conv and not bottleneck and not net and not given_again_as'
    # One process, or each would wait for the others. torch's kernels are not looked into, and tests
    # of bytes are left out: under the tool torch's own layers keep others.
    PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} compute-sanitizer --tool "$tool" \
      --kernel-name kns=brim --error-exitcode 1 --target-processes all \
      "$BRIM_PYTHON" -m pytest -q -p no:xdist -m 'not slow' -k "$tests" \
      tests/python/test_nn_{cuda,cuda_norms,cross_entropy,float32_rms_norm,gated}.py || status=1
  done
}

for part in "${@:-test demo bench}"; do
  for name in $part; do
    case $name in
      test) ./dev test || status=1 ;;
      demo) ./dev demo || status=1 ;;
      bench) ./dev bench || status=1 ;;
      sanitize) sanitize || status=1 ;;
      prove) ./dev prove faults -- --device cuda --seconds 30 || status=1 ;;
      *) echo "tools/gpu.sh: unknown part '$name': test, demo, bench, sanitize or prove" >&2; exit 2 ;;
    esac
  done
done
exit $status
